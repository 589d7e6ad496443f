"""A model whose sequence is on several ranks has the gradients of one process."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.axes import CP, SP, TP
from tests.thorough import mostly_thorough
from tests.twin import Case

KIND, SIZES = "cp_comm_type", "hierarchical_context_parallel_sizes"


TWO = mostly_thorough(
    itertools.product(["p2p", "allgather", "a2a"], ["llama", "mistral"], [False, True]),
    lambda case: case[2] == (case[1] == "mistral"),
)


@pytest.mark.parametrize("kind, family, documents", TWO)
def test_two_ranks(assert_same_as_serial, kind, family, documents):
    model: dict[str, Any] = {"family": family}
    if family == "mistral":
        model |= {"sliding_window": 5}
    assert_same_as_serial(Case({CP: 2, KIND: kind}, model, 2, double=True, documents=documents))


@pytest.mark.parametrize("kind", mostly_thorough(["p2p", "allgather", "a2a", "a2a+p2p"], [0, 3]))
def test_four_ranks(assert_same_as_serial, kind):
    layout: dict[str, Any] = {CP: 4, KIND: kind} | ({SIZES: (2, 2)} if "+" in kind else {})
    assert_same_as_serial(Case(layout, {"family": "qwen3"}, double=True, documents=True, overlap=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", mostly_thorough(["p2p", "allgather", "a2a"], [0, 2], [0]))
def test_with_tensor_sequence_and_data_parallelism(assert_same_as_serial, kind):
    case = Case({CP: 2, TP: 2, SP: True, KIND: kind}, {"family": "qwen2"}, accumulation=2, double=True, documents=True)
    assert_same_as_serial(case)
    assert_same_as_serial(Case({CP: 2, KIND: kind}, accumulation=2, double=True, empty_rank=1), dp=2)


@pytest.mark.thorough
def test_eight_ranks(assert_same_as_serial):
    assert_same_as_serial(Case({CP: 2, TP: 2, SP: True}, accumulation=2, double=True), dp=2)


@pytest.mark.slow
def test_learned_positions_and_recompute(assert_same_as_serial):
    model: dict[str, Any] = {"family": "gpt2", "num_query_groups": 4, "untie_embeddings_and_output_weights": False}
    for granularity in ("selective", "full"):
        case = Case({CP: 2, TP: 2, SP: True}, {**model, "recompute_granularity": granularity}, double=True)
        assert_same_as_serial(case)


@pytest.mark.parametrize("heads,groups", mostly_thorough([(3, 3), (3, 1), (6, 3)], [1, 2], [1]))
def test_odd_numbers_of_heads(assert_same_as_serial, heads, groups):
    model = {"num_attention_heads": heads, "num_query_groups": groups, "kv_channels": 6}
    for kind in ("p2p", "allgather", "a2a") if heads == 6 else ("p2p", "allgather"):
        assert_same_as_serial(Case({CP: 2, KIND: kind}, model, double=True))


@pytest.mark.parametrize(
    "schedule,kind", mostly_thorough([("1f1b", "p2p"), ("interleaved", "a2a"), ("zb_v", "allgather")], [1, 2], [2])
)
def test_with_a_pipeline(assert_same_as_serial, schedule, kind):
    layout = {CP: 2, KIND: kind, "pipeline_model_parallel_size": 2, "pipeline_schedule": schedule}
    case = Case(layout, {"num_layers": 4}, accumulation=4, double=True, documents=True)
    assert_same_as_serial(case)
