"""A model that sees has the gradients of one process, wherever its tokens and patches are cut."""

from __future__ import annotations

from typing import Any

import pytest

from tests.axes import CP, PP, SP, TP
from tests.thorough import mostly_thorough
from tests.twin import Case

SEES: dict[str, Any] = {
    "family": "qwen2_5_vl", "mrope_section": (1, 1, 2), "image_token_id": 56, "vision_num_layers": 2,
    "vision_hidden_size": 32, "vision_num_attention_heads": 4, "vision_ffn_hidden_size": 24, "vision_patch_size": 2,
    "vision_temporal_patch_size": 1, "vision_window_size": 8, "vision_fullatt_block_indexes": (1,),
}  # fmt: skip
# LLaVA: pictures of 2 x 2 patches and a class token, an odd number of rows
CLIP: dict[str, Any] = {
    "family": "llava", "image_token_id": 56, "vision_num_layers": 2, "vision_hidden_size": 24,
    "vision_num_attention_heads": 4, "vision_ffn_hidden_size": 40, "vision_patch_size": 2, "vision_image_size": 4,
}  # fmt: skip
FULL = {"recompute_granularity": "full"}
CORES = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")}
PARTS = ("vision_model.*", "decoder.layers.*")  # LLaVA's first stage of training: the projector learns


def case(layout: dict[str, Any], model: dict[str, Any] = SEES, **how: Any) -> Case:
    return Case(layout, model, double=True, **how)


TWO = [
    case({TP: 2}, accumulation=2),
    case({TP: 2, SP: True}, SEES | CORES, accumulation=3),
    case({CP: 2}, documents=True, accumulation=3),
    case({PP: 2}, SEES | FULL, accumulation=3),
    case({}, sharding="optim_grads_params", accumulation=3, overlap=True, empty_rank=1),
    case({}, sharding="fsdp2", accumulation=2),
    case({PP: 2, "num_virtual_stages_per_pipeline_rank": 2}, SEES | {"num_layers": 4}, accumulation=2),
    case({PP: 2, "pipeline_schedule": "zb_h1"}, accumulation=3),
    case({CP: 2, "cp_comm_type": "a2a"}, SEES | FULL, accumulation=2),
    case({}, sharding="optim", accumulation=2, overlap=True, freeze=PARTS),
    case({TP: 2, SP: True}, SEES | FULL, accumulation=2, freeze=PARTS),
    case({TP: 2, SP: True, PP: 1}, SEES | {"num_query_groups": 1}, accumulation=2),
    case({TP: 2, SP: True}, CLIP | CORES, accumulation=3),
    case({CP: 2}, CLIP, documents=True, accumulation=3),
    case({TP: 2}, CLIP, accumulation=2),
    case({PP: 2}, CLIP | FULL, accumulation=3),
    case({}, CLIP, sharding="optim_grads_params", accumulation=3, overlap=True, empty_rank=1),
    case({}, CLIP, sharding="fsdp2", accumulation=2),
    case({}, CLIP, sharding="optim", accumulation=2, overlap=True, freeze=PARTS),
    case({CP: 2, "cp_comm_type": "a2a"}, CLIP | FULL, accumulation=2),
]


@pytest.mark.parametrize("which", mostly_thorough(range(len(TWO)), [0, 1, 2, 3, 4, 12, 13], [1, 2]))
def test_two_ranks(assert_same_as_serial, which):
    assert_same_as_serial(TWO[which], dp=1 if {TP, PP, CP} & TWO[which].layout.keys() else 2)


FOUR = [
    case({CP: 2, TP: 2, SP: True}, SEES | CORES, documents=True, accumulation=2),
    case({PP: 2, TP: 2, SP: True}, SEES | FULL, accumulation=2),
    case({CP: 4}, accumulation=2),
    case({TP: 4, SP: True}, accumulation=3),
    case({CP: 2, TP: 2, SP: True}, CLIP | CORES, documents=True, accumulation=2),
    case({PP: 2, TP: 2, SP: True}, CLIP | FULL, accumulation=2),
]


@pytest.mark.thorough
@pytest.mark.parametrize("which", range(len(FOUR)))
def test_four_ranks(assert_same_as_serial, which):
    assert_same_as_serial(FOUR[which])
