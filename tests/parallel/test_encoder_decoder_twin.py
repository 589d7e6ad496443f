"""Encoder-decoders have the gradients of one process, wherever a pipeline cuts them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.axes import PP, SP, TP
from tests.thorough import mostly_thorough
from tests.twin import Case

# A source of 10 and a target of 6 tokens; far and near buckets are used.
SIZES: dict[str, Any] = {
    "family": "t5", "num_layers": 5, "encoder_num_layers": 2, "num_query_groups": 4, "kv_channels": 6,
    "decoder_seq_length": 6, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 7,
}  # fmt: skip
GATED = {**SIZES, "activation": "geglu_tanh", "untie_embeddings_and_output_weights": True, "add_bias_linear": True}
FULL = {"recompute_granularity": "full"}
CORES = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")}
LAYOUT, VIRTUAL = "pipeline_model_parallel_layout", "num_virtual_stages_per_pipeline_rank"
ZERO = "optim_grads_params"


def case(layout: dict[str, Any], model: dict[str, Any] = SIZES, **how: Any) -> Case:
    return Case(layout, model, double=True, **how)


TWO = [
    case({TP: 2}, GATED),
    case({TP: 2, SP: True}, SIZES | CORES, documents=True),
    case({PP: 2, LAYOUT: "Et|ttttL"}, accumulation=3),  # the encoder goes on behind the cut
    case({PP: 2, LAYOUT: "Ettt|ttL"}, GATED | FULL, documents=True, accumulation=2),  # so does the decoder
    case({PP: 2, LAYOUT: "Ett|tttL", "pipeline_schedule": "zb_h1"}, accumulation=3),
    case({PP: 2, LAYOUT: "Et|t|tt|tL"}, SIZES | FULL, accumulation=2),
    case({PP: 2, LAYOUT: "E|tt|t|ttL", "pipeline_schedule": "zb_v"}, accumulation=2),
    case({}, SIZES | FULL, sharding=ZERO, accumulation=2, overlap=True, empty_rank=1),
    case({}, sharding="fsdp2"),
    case({}, GATED | {"attention_backend": "reference"}, sharding="optim", documents=True),
]


@pytest.mark.parametrize("which", mostly_thorough(range(len(TWO)), [1, 2, 3, 7, 8], [1, 3]))
def test_two_ranks(assert_same_as_serial, which):
    assert_same_as_serial(TWO[which], dp=1 if {TP, PP} & TWO[which].layout.keys() else 2)


FOUR = [
    case({PP: 4, LAYOUT: "Et|t|tt|tL"}, accumulation=4),
    case({PP: 2, TP: 2, SP: True, LAYOUT: "Et|ttttL"}, GATED | FULL, documents=True, accumulation=2),
    case({PP: 2, LAYOUT: "Ettt|ttL"}, sharding=ZERO, accumulation=2, overlap=True),
    case({TP: 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize("which", mostly_thorough(range(len(FOUR)), [1]))
def test_four_ranks(assert_same_as_serial, which):
    assert_same_as_serial(FOUR[which], dp=2 if which == 2 else 1)
