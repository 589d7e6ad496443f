"""Hybrids of Mamba-2 or Gated DeltaNet with attention, MLPs and experts have the gradients of one process."""

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
# One query group on two ranks of tp: each has a part of its queries and of their gates.
DELTA: dict[str, Any] = {
    "family": "qwen3_next", "num_layers": 3, "linear_attention_freq": "2", "linear_num_key_heads": 4,
    "linear_num_value_heads": 8, "linear_key_head_dim": 6, "linear_value_head_dim": 4, "linear_conv_kernel_dim": 3,
    "linear_chunk_size": 3, "num_query_groups": 1, "kv_channels": 16, "num_experts": 4, "moe_router_topk": 2,
    "moe_layer_freq": "[0,1,0]", "moe_ffn_hidden_size": 24, "moe_shared_expert_intermediate_size": 16,
}  # fmt: skip
DENSE = {
    **DELTA, "num_layers": 4, "num_experts": None, "moe_router_topk": 2, "moe_layer_freq": "1",
    "moe_ffn_hidden_size": None, "moe_shared_expert_intermediate_size": None, "moe_shared_expert_gate": False,
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
    case({TP: 2}, DENSE),
    case({TP: 2, SP: True, EP: 2, ETP: 1}, DELTA | CORES, documents=True),
    case({CP: 2}, DELTA | CORES),
    case({PP: 2}, DENSE | FULL, accumulation=2),
    case({CP: 2, KIND: "a2a"}, DENSE, documents=True),
    case({}, DELTA, sharding="optim_grads_params", accumulation=2, overlap=True, empty_rank=1),
]


@pytest.mark.parametrize("which", mostly_thorough(range(len(TWO)), [1, 2, 4, 5, 9, 10, 11], [1, 4, 9]))
def test_two_ranks(assert_same_as_serial, which):
    assert_same_as_serial(TWO[which], dp=1 if {TP, PP, CP} & TWO[which].layout.keys() else 2)


FOUR = [
    case({CP: 4}, documents=True),
    case({CP: 2, TP: 2, SP: True}, EXPERTS | CORES, documents=True),
    case({CP: 4, KIND: "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)}, documents=True),
    case({TP: 4}),
    case({CP: 2, TP: 2, SP: True}, DELTA | CORES, documents=True),
    case({CP: 4}, DELTA, documents=True),
    case({PP: 2, TP: 2, SP: True, EP: 2, ETP: 1}, EXPERTS, accumulation=2),
]


@pytest.mark.slow
@pytest.mark.parametrize("which", mostly_thorough(range(len(FOUR)), [1]))
def test_four_ranks(assert_same_as_serial, which):
    assert_same_as_serial(FOUR[which])
