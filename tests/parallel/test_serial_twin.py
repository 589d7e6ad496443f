"""Every layout gives the gradients of one process."""

from __future__ import annotations

import contextlib
from typing import Any
from unittest import mock

import pytest
import torch

from minimegatron.comm import collectives
from minimegatron.layers import linear
from minimegatron.parallel.data import ddp, finalize
from tests.axes import CP, PP, SP, TP
from tests.thorough import mostly_thorough
from tests.twin import Case, compare_with_serial, problems

LAYOUTS: list[dict[str, Any]] = [{}, {TP: 2}, {TP: 2, SP: True}, {TP: 4}, {TP: 4, SP: True}]
MATRIX = [(layout, accumulation, dp) for layout in LAYOUTS for accumulation in (1, 4) for dp in (1, 2)]


@pytest.mark.parametrize(
    ("layout", "accumulation", "dp"),
    mostly_thorough(
        MATRIX,
        lambda case: case in (({TP: 2, SP: True}, 4, 2), ({}, 1, 1), ({TP: 2}, 1, 1), ({}, 4, 2), ({TP: 4}, 4, 1)),
        lambda case: case in (({TP: 2, SP: True}, 4, 2), ({}, 1, 1), ({TP: 2}, 1, 1)),
    ),
)
def test_layouts(assert_same_as_serial, layout, dp, accumulation):
    assert_same_as_serial(Case(layout, accumulation=accumulation, double=True, seed=accumulation), dp)


@pytest.mark.parametrize("layout", mostly_thorough(LAYOUTS, [2]), ids=str)
def test_layouts_in_fp32(assert_same_as_serial, layout):
    assert_same_as_serial(Case(layout, accumulation=2), dp=4 // layout.get(TP, 1))


@pytest.mark.parametrize("family", mostly_thorough(["gpt2", "llama", "mistral", "qwen2", "qwen3"], [0, 2, 4], [4]))
@pytest.mark.parametrize("sp", mostly_thorough([False, True], [1]))
def test_families(assert_same_as_serial, family, sp):
    model: dict[str, Any] = {"family": family}
    if family == "gpt2":
        model |= {"num_query_groups": 4, "untie_embeddings_and_output_weights": False}
    if family == "mistral":
        model |= {"sliding_window": 5}
    assert_same_as_serial(Case({TP: 2, SP: sp}, model, double=True), dp=2)


CAPPED = {"family": "gemma2", "sliding_window": 5, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.0}
OVER_HEADS = {"family": "olmo2"}


@pytest.mark.parametrize(
    ("model", "layout"),
    mostly_thorough(
        [(model, layout) for model in (CAPPED, OVER_HEADS) for layout in ({TP: 2, SP: True}, {TP: 2}, {CP: 2}, {PP: 2})]
        + [(CAPPED, {CP: 2, "cp_comm_type": kind}) for kind in ("allgather", "a2a")],
        [0, 2, 4, 7],
        [0, 7],
    ),
    ids=str,
)
def test_norms_of_outputs_caps_and_norms_over_all_heads(assert_same_as_serial, model, layout):
    assert_same_as_serial(Case(layout, model, accumulation=2, double=True))


TWO_BASES = {
    "family": "gemma3_text", "sliding_window": 5, "window_attn_skip_freq": "2", "rope_scaling_type": "linear",
    "rotary_base_local": 20.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("layout", "more"),
    mostly_thorough(
        [
            ({TP: 2, SP: True}, {"documents": True}),
            ({CP: 2}, {"model": {"recompute_granularity": "full"}}),
            ({PP: 2}, {"accumulation": 2}),
            ({TP: 2}, {}),
            ({CP: 2, "cp_comm_type": "allgather"}, {"documents": True}),
            ({CP: 2, "cp_comm_type": "a2a"}, {}),
            ({PP: 2, CP: 2}, {"accumulation": 2, "documents": True}),
            ({TP: 2, SP: True, CP: 2}, {"model": {"recompute_granularity": "selective"}}),
            *(({TP: 2, SP: True}, {"sharding": sharding}) for sharding in ("optim", "optim_grads_params", "fsdp2")),
        ],
        [0, 1],
        [0],
    ),
    ids=str,
)
def test_two_bases_of_rope(assert_same_as_serial, layout, more):
    model = {**TWO_BASES, **more.get("model", {})}
    dp = 2 if "sharding" in more else 1
    assert_same_as_serial(Case(layout, double=True, **{**more, "model": model}), dp)


@pytest.mark.parametrize(
    "model",
    mostly_thorough(
        [
            {"num_query_groups": 1, "add_bias_linear": True, "qk_layernorm": True},
            {"num_query_groups": 2, "num_attention_heads": 8, "kv_channels": 6},
            {"activation": "gelu", "add_bias_linear": True, "normalization": "LayerNorm"},
            {"layernorm_zero_centered_gamma": True, "rotary_interleaved": True, "rotary_percent": 0.5},
            {"untie_embeddings_and_output_weights": False, "vocab_size": 50, "make_vocab_size_divisible_by": 16},
        ],
        [0, 1, 3, 4],
        [0, 4],
    ),
    ids=str,
)
def test_fewer_groups_than_ranks_and_other_shapes(assert_same_as_serial, model):
    assert_same_as_serial(Case({TP: 4, SP: True}, model, double=True))


@pytest.mark.parametrize("bucket_size", mostly_thorough([1, 1000], [1]))
def test_overlap_and_bucket_sizes(assert_same_as_serial, bucket_size):
    case = Case({TP: 2, SP: True}, accumulation=3, overlap=True, bucket_size=bucket_size, double=True)
    assert_same_as_serial(case, dp=2)


def test_a_rank_whose_tokens_all_count_for_nothing(assert_same_as_serial):
    assert_same_as_serial(Case({}, double=True, empty_rank=1, accumulation=2), dp=2)


@pytest.mark.parametrize("seed", mostly_thorough(range(3), [0]))
def test_other_seeds_and_odd_sizes(assert_same_as_serial, seed):
    case = Case(
        {TP: 2, SP: True},
        {"ffn_hidden_size": 34, "vocab_size": 31},
        seed=seed,
        seq_length=6,
        micro_batch_size=1,
        double=True,
    )
    assert_same_as_serial(case, dp=2)


# ------------------------------------------------------------------------------- mistakes that must be seen


def compare_with_mistake(rank: int, world: int, case: Case, mistake: str) -> dict[str, Any]:
    """`compare_with_serial` with one classic mistake made in the parallel code."""
    with _MISTAKES[mistake]():
        return compare_with_serial(rank, world, case)


def _patch(target: Any, name: str, value: Any) -> contextlib.AbstractContextManager:
    return mock.patch.object(target, name, value)


def _without(kind: str) -> contextlib.AbstractContextManager:
    real = finalize.partial_axes
    return _patch(finalize, "partial_axes", lambda mesh: {**real(mesh), kind: None})


def _mean_of_means() -> contextlib.AbstractContextManager:
    real = collectives.all_reduce

    def divide_locally(x, axis, op="sum"):
        return real(x, axis, op) if x.dim() else x * axis.size

    return _patch(finalize, "all_reduce", divide_locally)


def _bias_before_sum() -> contextlib.AbstractContextManager:
    def forward(self, x):
        y = torch.nn.functional.linear(x, self.weight, self.bias)
        return (
            linear.c.reduce_scatter_to_sequence_region(y, self.tp)
            if self.sequence_parallel
            else linear.c.reduce_from_region(y, self.tp)
        )

    return _patch(linear.RowParallelLinear, "forward", forward)


_MISTAKES = {
    "norms not summed": lambda: _without("sequence"),
    "qk norms not summed": lambda: _without("heads"),
    "copy without its all-reduce": lambda: _patch(
        linear.c, "all_reduce_start", lambda x, axis, op="sum": collectives.Work(x)
    ),
    "no reduction over dp": lambda: _patch(ddp.DistributedDataParallel, "finish_grad_sync", lambda self: None),
    "mean of means": _mean_of_means,
    "row bias on every rank": _bias_before_sum,
    "gather cuts instead of reducing": lambda: _patch(
        linear.c,
        "reduce_scatter_start",
        lambda x, axis, output=None: collectives.Work(collectives.local_part(x, axis, 0)),
    ),
}


@pytest.mark.parametrize("mistake", mostly_thorough(_MISTAKES, [0, 4, 6], [0]))
def test_classic_mistakes_are_seen(ranks, mistake):
    sp = mistake != "copy without its all-reduce"
    model = {"family": "qwen3", "add_bias_linear": True}
    case = Case({TP: 2, SP: sp}, model, accumulation=1)
    reports = ranks(4).run(compare_with_mistake, case, mistake)
    assert any(problems(r, 1e-5) for r in reports), f"{mistake!r} went unnoticed"
    assert max(r["grad_norm"] for r in reports) > 1e-5, "the gradient norm alone should show it"
