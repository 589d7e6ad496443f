"""BERT has the gradients of one process: rows with padding, heads of words and of pairs, norms in both places."""

from __future__ import annotations

from typing import Any

import pytest

from tests.axes import CP, EP, ETP, PP, SP, TP
from tests.thorough import THOROUGH, mostly_thorough
from tests.twin import Case

BERT: dict[str, Any] = {"family": "bert", "num_query_groups": 4}
MEGATRON = {**BERT, "family": "megatron-bert"}
FULL = {"recompute_granularity": "full"}
SOME = {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")}
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24}


def case(layout: dict[str, Any], model: dict[str, Any] = BERT, **how: Any) -> Case:
    return Case(layout, model, double=True, **how)


TWO = [
    case({TP: 2, SP: True}, accumulation=2),
    case({TP: 2}, MEGATRON | SOME),
    case({PP: 2}, accumulation=3),
    case({CP: 2}),
    case({}, BERT | FULL, sharding="optim_grads_params", accumulation=2, overlap=True, empty_rank=1),
    case({}, sharding="fsdp2"),
    case({CP: 2, "cp_comm_type": "a2a"}, MEGATRON | SOME),
    case({CP: 2, "cp_comm_type": "allgather"}),
    case({TP: 2, SP: True}, BERT | SOME),
    case({PP: 2, "num_virtual_stages_per_pipeline_rank": 2}, {**BERT, "num_layers": 4}, accumulation=2),
    case({PP: 2}, MEGATRON | FULL, accumulation=2),
    case({PP: 2}, {**BERT, "bert_head": "lm", "untie_embeddings_and_output_weights": True}, accumulation=2),
    case({EP: 2}, BERT | EXPERTS),
    case({TP: 2, SP: True, EP: 2, ETP: 1}, MEGATRON | EXPERTS),
    case({}, sharding="optim"),
]


@pytest.mark.parametrize("which", mostly_thorough(range(len(TWO)), [0, 2, 3, 4], [0, 3]))
def test_two_ranks(assert_same_as_serial, which):
    assert_same_as_serial(TWO[which], dp=1 if {TP, PP, CP} & TWO[which].layout.keys() else 2)


FOUR = [
    case({TP: 2, SP: True, PP: 2}, accumulation=2),
    case({CP: 2, TP: 2, SP: True}, BERT | FULL),
    case({CP: 4}, MEGATRON),
    case({TP: 4, SP: True}, {**BERT, "bert_head": "lm"}),
    case({CP: 4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)}),
    case({TP: 2, SP: True}, sharding="optim_grads_params", accumulation=2, overlap=True),
]


@THOROUGH
@pytest.mark.parametrize("which", range(len(FOUR)))
def test_four_ranks(assert_same_as_serial, which):
    assert_same_as_serial(FOUR[which], dp=2 if "optim_grads_params" == FOUR[which].sharding else 1)
