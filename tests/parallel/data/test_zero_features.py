"""What a model or a schedule has besides layers, under every sharding strategy and FSDP2: the gradients of one process.

In fp64, where only mistakes are visible.
"""

from __future__ import annotations

from typing import Any

import pytest

from minimegatron.config.parallel import SPLIT
from tests.axes import CP, EP, ETP, PP, SP, TP, VP
from tests.thorough import mostly_thorough
from tests.twin import Case, compare_all, problems

STAGES = ("no_shard", "optim", "optim_grads", "optim_grads_params", "fsdp2")
TIED = {"untie_embeddings_and_output_weights": False}
FOUR = {"num_layers": 4, **TIED}
GPT2 = {"family": "gpt2", "num_query_groups": 4, **TIED}
EXPERTS = {"num_layers": 4, "num_experts": 4, "moe_ffn_hidden_size": 24, "moe_layer_freq": "2"}
PENALTIES = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1}
AGAIN = {"recompute_granularity": "full"}
SELECTIVE = {"recompute_granularity": "selective"}
MTP = {"mtp_num_layers": 2}


def pipe(schedule: str, chunks: int = 1) -> dict[str, Any]:
    return {PP: 2, "pipeline_schedule": schedule, **({VP: chunks} if chunks > 1 else {})}


LAST_LAYER = ("*embedding*", "*layers.[012].*", "*final*", "*output*")  # what has no gradient but the last layer
# name -> (ranks, layout, model, more)
FEATURES: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "tied over stages": (4, pipe("1f1b"), {**GPT2, **FOUR}, {}),
    "frozen and unused": (2, {}, TIED, {"freeze": ("*norm*", "*layers.1.mlp*"), "unused": True}),
    "frozen embedding, unused, interleaved": (
        4, pipe("interleaved", 2), FOUR, {"freeze": ("*embedding*", "*layers.[01].*"), "unused": True},
    ),
    "a stage without weights that train": (2, pipe("zb_v"), {"num_layers": 4}, {"freeze": LAST_LAYER}),
    "frozen, unused, experts": (
        4, {TP: 2, SP: True, EP: 2}, EXPERTS, {"freeze": ("*norm*", "*layers.0.mlp*"), "unused": True},
    ),
    "mtp, pp": (4, pipe("1f1b"), {**MTP, **FOUR}, {}),
    "mtp, tp, sp, learned positions": (4, {TP: 2, SP: True}, {**GPT2, **MTP}, {}),
    "documents, cp": (4, {CP: 2}, {}, {"documents": True}),
    "recompute two by two": (2, {}, {**FOUR, **AGAIN, "recompute_num_layers": 2}, {}),
    "recompute mlp and norms": (2, {}, {**SELECTIVE, "recompute_modules": ("mlp", "layernorm")}, {}),
    "recompute experts": (2, {EP: 2}, {**EXPERTS, **SELECTIVE, "recompute_modules": ("moe",)}, {}),
    "recompute, zb_h1": (4, pipe("zb_h1"), {**FOUR, **AGAIN}, {}),
    "dualpipe_v": (4, pipe("dualpipe_v"), {**FOUR, **MTP}, {}),
    "zb_v, tp, sp, experts": (8, {**pipe("zb_v"), TP: 2, SP: True, EP: 2}, {**EXPERTS, **PENALTIES}, {}),
    "cp all-gather, tp": (8, {CP: 2, TP: 2, SP: True, "cp_comm_type": "allgather"}, {}, {}),
    "etp, ep, cp": (4, {CP: 2, ETP: 2, EP: 2}, {**EXPERTS, **PENALTIES}, {}),
    "a rank without counted tokens": (2, {}, TIED, {"empty_rank": 1}),
}  # fmt: skip
# Feature and whether messages travel behind computation; FSDP2 decides that by itself.
ORDINARY = (("frozen, unused, experts", False), ("a stage without weights that train", True))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, overlap",
    mostly_thorough(
        [(name, on) for name in FEATURES for on in (False, True)], ORDINARY.__contains__, ORDINARY[1:].__contains__
    ),
)
def test_gradients_are_those_of_one_process(ranks: Any, name: str, overlap: bool) -> None:
    world, layout, model, more = FEATURES[name]
    alone = overlap or layout.get("pipeline_schedule") in SPLIT
    options = {"accumulation": 2 if PP not in layout else 4, "double": True, "overlap": overlap, **more}
    cases = [Case(layout, model, sharding=stage, **options) for stage in (STAGES[:4] if alone else STAGES)]
    for reports in ranks(world).run(compare_all, cases, timeout=300):
        for case, report in zip(cases, reports, strict=True):
            assert problems(report, 1e-10) == [], case.sharding
