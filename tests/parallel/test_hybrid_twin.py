"""A hybrid of Mamba-2, attention, MLPs and experts has the gradients of one process, however it is cut."""

from __future__ import annotations

from typing import Any

import pytest

from tests.axes import CP, EP, ETP, PP, SP, TP
from tests.thorough import mostly_thorough
from tests.twin import Case

SIZES: dict[str, Any] = {
    "family": "nemotron_h", "hybrid_override_pattern": "M*-M", "num_layers": 4, "mamba_num_heads": 8,
    "mamba_head_dim": 4, "mamba_num_groups": 4, "mamba_state_dim": 6, "mamba_conv_kernel": 3, "mamba_chunk_size": 5,
}  # fmt: skip
EXPERTS = {
    **SIZES, "hybrid_override_pattern": "MEM*", "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 16, "moe_router_score_function": "sigmoid",
}  # fmt: skip
FULL = {"recompute_granularity": "full"}
CORES = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")}
KIND = "cp_comm_type"


def case(layout: dict[str, Any], model: dict[str, Any] = SIZES, **how: Any) -> Case:
    return Case(layout, model, double=True, **how)


TWO = [
    case({TP: 2}),
    case({TP: 2, SP: True}, SIZES | CORES, documents=True),
    case({PP: 2, "pipeline_schedule": "zb_h1"}, accumulation=3),
    case({PP: 2, "num_virtual_stages_per_pipeline_rank": 2}, SIZES | FULL, accumulation=2),
    case({CP: 2}, documents=True),
    case({CP: 2, KIND: "a2a"}, SIZES | FULL),
    case({EP: 2}, EXPERTS),
    case({}, SIZES, sharding="optim_grads_params", accumulation=2, overlap=True, empty_rank=1),
    case({}, SIZES, sharding="fsdp2"),
]


@pytest.mark.parametrize("which", mostly_thorough(range(len(TWO)), [1, 2, 4, 5, 6, 7], [1, 4]))
def test_two_ranks(assert_same_as_serial, which):
    assert_same_as_serial(TWO[which], dp=1 if {TP, PP, CP} & TWO[which].layout.keys() else 2)


FOUR = [
    case({CP: 4}, documents=True),
    case({CP: 2, TP: 2, SP: True}, EXPERTS | CORES, documents=True),
    case({CP: 4, KIND: "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)}, documents=True),
    case({TP: 4}),
    case({PP: 2, TP: 2, SP: True, EP: 2, ETP: 1}, EXPERTS, accumulation=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("which", mostly_thorough(range(len(FOUR)), [1]))
def test_four_ranks(assert_same_as_serial, which):
    assert_same_as_serial(FOUR[which])
