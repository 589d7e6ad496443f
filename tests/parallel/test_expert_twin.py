"""A model with experts has the gradients of one process in every layout, with every router and dispatcher."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch

from minimegatron.comm import collectives as c
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.layers.logical import gather_logical
from minimegatron.layers.param import layout_of
from tests import twin
from tests.axes import CP, EP, ETP, PP, SP, TP
from tests.layers.moe.test_layer import H, new_layer
from tests.thorough import SLOW, mostly_slow, mostly_thorough
from tests.twin import Case

EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_ffn_hidden_size": 24, "moe_layer_freq": "[0,1]"}
DISPATCHERS = ("allgather", "alltoall")
PENALTIES = {"moe_aux_loss_coeff": 0.5, "moe_z_loss_coeff": 0.1}
ROUTERS: dict[str, dict[str, Any]] = {
    "softmax": PENALTIES,
    "softmax over all, per sequence": {
        **PENALTIES,
        "moe_router_pre_softmax": True,
        "moe_router_load_balancing_type": "seq_aux_loss",
    },
    "sigmoid in groups": {
        **PENALTIES, "num_experts": 8, "moe_router_topk": 4, "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True, "moe_router_num_groups": 4, "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5, "moe_shared_expert_intermediate_size": 40,
    },
    "all experts": {"moe_router_topk": 4},
    "one of sixteen": {"num_experts": 16, "moe_router_topk": 1, "moe_router_pre_softmax": True},
}  # fmt: skip


def case(layout: dict[str, Any], router: str = "softmax", dispatcher: str = "alltoall", **more: Any) -> Case:
    model = {**EXPERTS, **ROUTERS[router], "moe_token_dispatcher_type": dispatcher, **more.pop("model", {})}
    return Case(layout, model, double=True, **more)


def check(pool: Any, cases: list[Case], tolerance: float = 1e-10, timeout: float = 120) -> None:
    for reports in pool.run(twin.compare_all, cases, timeout=timeout):
        for one, report in zip(cases, reports, strict=True):
            assert twin.problems(report, tolerance) == [], one


@pytest.mark.parametrize("router", mostly_slow(ROUTERS, ["softmax"].__contains__))
def test_two_ranks(ranks, router):
    layouts = [{EP: 2}, {}, {TP: 2, SP: True}, {TP: 2, SP: True, ETP: 1}, {TP: 2, SP: True, ETP: 1, EP: 2}, {ETP: 2}]
    first = DISPATCHERS if router == "softmax" else DISPATCHERS[::-1]
    ways = list(zip(layouts, itertools.cycle(first), strict=False))
    if router != "sigmoid in groups":  # what the others do differently is before the dispatch
        ways = [ways[0], ways[4]]
    check(ranks(2), [case(x, router, d) for x, d in ways])


@SLOW
@pytest.mark.parametrize("router", mostly_thorough(["softmax", "sigmoid in groups"], [1]))
def test_four_ranks(ranks, router):
    layouts = [
        {EP: 2, ETP: 2},
        {TP: 2, SP: True, EP: 2, ETP: 2},
        {TP: 2, SP: True, EP: 4, ETP: 1},
        {TP: 4, SP: True, EP: 2, ETP: 2},
    ]
    first = DISPATCHERS if router == "softmax" else DISPATCHERS[::-1]
    check(ranks(4), [case(x, router, d) for x, d in zip(layouts, itertools.cycle(first), strict=False)])


@SLOW
def test_with_context_and_pipeline(ranks):
    layouts = [
        {CP: 2, EP: 4},
        {CP: 2, TP: 2, SP: True, EP: 2},
        {PP: 2, TP: 2, SP: True, EP: 2, ETP: 1},
    ]
    check(ranks(4), [case(x, "sigmoid in groups", accumulation=2) for x in layouts])


@SLOW
def test_with_other_schedules(ranks):
    """Weights of experts are not deferred: their gradients are complete with the backward pass."""
    four = {"num_layers": 4, "moe_layer_freq": "[0,1,1,1]"}
    chunks = {"num_virtual_stages_per_pipeline_rank": 2}
    layouts = [
        {PP: 2, EP: 2, "pipeline_schedule": "zb_h1"},
        {PP: 2, EP: 2, "pipeline_schedule": "interleaved", **chunks},
        {PP: 2, EP: 2, "pipeline_schedule": "zb_v", **chunks},
    ]
    cases = [case(x, model=four, accumulation=4, overlap=True, bucket_size=2000) for x in layouts]
    check(ranks(4), cases)


@pytest.mark.slow
def test_overlap_recompute_and_accumulation(ranks):
    shared = {"moe_shared_expert_intermediate_size": 40, "moe_shared_expert_overlap": True}
    again = {"recompute_granularity": "selective", "recompute_modules": ("moe", "core_attn")}
    check(
        ranks(2),
        [
            case({EP: 2}, overlap=True, bucket_size=500, accumulation=3),
            case({EP: 2}, model=shared, accumulation=2),
            case({EP: 2}, model={**shared, **again}),
            case({EP: 2}, model={"recompute_granularity": "full"}),
            case({EP: 2}, empty_rank=1, router="all experts"),
        ],
    )


# ------------------------------------------------------------------------------------------ everything at once

SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("moe", "core_attn")}
FULL = {"recompute_granularity": "full"}


def composed(layout: dict[str, Any], model: dict[str, Any], dispatcher: str, packed: bool) -> Case:
    shared = {"moe_shared_expert_intermediate_size": 40, **model}
    return case(layout, "softmax", dispatcher, model=shared, documents=packed, accumulation=2, micro_batch_size=1)


# Each pair of (axis, axis or option) that the tests above leave out, in as few cases as hold them; three each time.
COMPOSED = [
    composed({CP: 2, EP: 2, ETP: 2}, FULL, "alltoall", True),
    composed({PP: 2, ETP: 2}, SELECTIVE, "alltoall", False),
    composed({TP: 2, SP: True, CP: 2, EP: 2, ETP: 1}, {"moe_shared_expert_gate": True}, "alltoall", False),
    composed({CP: 2, TP: 2, SP: True, ETP: 1}, SELECTIVE, "allgather", True),
    composed({PP: 2, CP: 2, EP: 2}, FULL, "allgather", True),
    composed({PP: 2, TP: 2, SP: True, EP: 1, ETP: 1}, {}, "alltoall", True),
    composed({PP: 4}, {**FULL, "num_layers": 4, "moe_layer_freq": "[1,0,1,1]"}, "allgather", True),
    composed({TP: 4, SP: True, EP: 4, ETP: 1}, FULL, "allgather", True),
]


@SLOW
@pytest.mark.parametrize("cases", mostly_thorough([COMPOSED[:3], COMPOSED[3:]], [0]), ids=len)
def test_compositions(ranks, cases):
    check(ranks(4), cases)


# -------------------------------------------------------------------------------------------------- gpt-oss

GPT_OSS: dict[str, Any] = {
    "family": "gpt_oss", "num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 24, "kv_channels": 8,
    "sliding_window": 5, "activation_func_clamp_value": 0.3, "rope_scaling_original_max_position_embeddings": 8,
}  # fmt: skip
A2A, GATHERED = {CP: 2, "cp_comm_type": "a2a"}, {CP: 2, "cp_comm_type": "allgather"}


def gpt_oss(layout: dict[str, Any], dispatcher: str = "alltoall", **more: Any) -> Case:
    model = {**GPT_OSS, "moe_token_dispatcher_type": dispatcher, **more.pop("model", {})}
    return Case(layout, model, double=True, **more)


def test_gpt_oss_on_two_ranks(ranks):
    """Sinks and biases of experts: cut over tp, counted once over cp, added once over etp."""
    whole = {TP: 2, SP: True}
    check(
        ranks(2),
        [
            gpt_oss({EP: 2}, accumulation=2),
            gpt_oss(whole, "allgather", documents=True),
            gpt_oss({**whole, ETP: 1, EP: 2}, model={**SELECTIVE, "moe_grouped_gemm": False}),
            gpt_oss({CP: 2}, documents=True),
            gpt_oss(A2A),
            gpt_oss({PP: 2}, accumulation=2, model=FULL),
        ],
    )


@pytest.mark.thorough
def test_gpt_oss_on_two_ranks_in_other_ways(ranks):
    sharded = {"sharding": "optim_grads_params", "overlap": True, "bucket_size": 500}
    check(
        ranks(2),
        [gpt_oss(GATHERED), gpt_oss({}, **sharded), gpt_oss({TP: 2, SP: True}, model={"num_query_groups": 1})],
    )


@pytest.mark.thorough
def test_gpt_oss_on_four_ranks(ranks):
    check(
        ranks(4),
        [
            gpt_oss({TP: 2, SP: True, CP: 2, EP: 2, ETP: 1}, model=FULL),
            gpt_oss({TP: 2, SP: True, EP: 2, ETP: 2}, "allgather", sharding="optim_grads"),
            gpt_oss({PP: 2, CP: 2, EP: 2}, documents=True, accumulation=2),
            gpt_oss({PP: 2, TP: 2, SP: True}, accumulation=4, model={"num_layers": 4}, sharding="optim"),
            gpt_oss({CP: 4, "cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 2)}),
            gpt_oss({TP: 4, SP: True, EP: 4, ETP: 1}),
            gpt_oss({}, sharding="fsdp2"),
            gpt_oss({EP: 2}, model=SELECTIVE, sharding="optim_grads_params", overlap=True, accumulation=2),
        ],
    )


# ------------------------------------------------------------------------ a model whose biases force the choice

SIGMOID: dict[str, Any] = {**EXPERTS, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
SMALL_PENALTIES: dict[str, Any] = {"moe_aux_loss_coeff": 0.1, "moe_z_loss_coeff": 0.1}
NOBODY_TO_THE_FIRST, ALL_TO_THE_LAST = [-9.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 9.0]
Forced = tuple[list[float] | None, Case]


def extreme(layout: dict[str, Any], bias: list[float] | None, more: dict[str, Any], **case: Any) -> Forced:
    alltoall = {"moe_token_dispatcher_type": "alltoall"}
    return bias, Case(layout, {**(SIGMOID if bias else EXPERTS), **alltoall, **more}, double=True, **case)


def drop(factor: float, pad: bool = False) -> dict[str, Any]:
    return {"moe_expert_capacity_factor": factor, "moe_pad_expert_input_to_capacity": pad}


ALLGATHER = {"moe_token_dispatcher_type": "allgather"}
ONE = {"moe_router_topk": 1}
TWO_RANKS: list[Forced] = [
    extreme({EP: 2}, NOBODY_TO_THE_FIRST, SMALL_PENALTIES),
    extreme({EP: 2}, ALL_TO_THE_LAST, {**ONE, **SMALL_PENALTIES}, accumulation=2),
    extreme({EP: 2}, ALL_TO_THE_LAST, {**ONE, **ALLGATHER}),
    extreme({EP: 2}, ALL_TO_THE_LAST, {**ONE, **drop(1.0)}),
    extreme({EP: 2}, None, {**drop(0.0), **SMALL_PENALTIES}),
    extreme({EP: 2}, None, drop(0.0, pad=True)),
    extreme({EP: 2}, None, drop(float("inf"))),
    extreme({EP: 2}, None, drop(0.6, pad=True)),
    extreme({EP: 2}, None, {"moe_router_topk": 4, **SMALL_PENALTIES}),
    extreme({EP: 2}, None, SMALL_PENALTIES, seq_length=1, micro_batch_size=1, seed=2),
    extreme({TP: 2, SP: True, ETP: 2}, ALL_TO_THE_LAST, ONE),
    extreme({PP: 2}, ALL_TO_THE_LAST, ONE, accumulation=2),
]
FOUR_RANKS: list[Forced] = [
    extreme({EP: 4}, ALL_TO_THE_LAST, {**ONE, "moe_shared_expert_intermediate_size": 40}),
    extreme({EP: 4}, ALL_TO_THE_LAST, {**ONE, **ALLGATHER}),
    extreme({EP: 4}, None, {**drop(0.0), "recompute_granularity": "full"}),
    extreme({TP: 2, SP: True, EP: 2, ETP: 2}, NOBODY_TO_THE_FIRST, {}),
    extreme({TP: 2, SP: True, EP: 2, ETP: 1}, None, drop(0.0)),
    extreme({TP: 2, SP: True, EP: 4, ETP: 1}, ALL_TO_THE_LAST, ONE),
]


def compare(rank: int, world: int, forced: list[Forced]) -> list[dict[str, Any]]:
    real, found = twin.weights, []
    for bias, case in forced:

        def weights(*model: Any, bias: list[float] | None = bias) -> dict[str, torch.Tensor]:
            tensors = real(*model)
            return {n: torch.tensor(bias) if "expert_bias" in n else t for n, t in tensors.items()}

        with mock.patch.object(twin, "weights", weights):
            found += twin.compare_all(rank, world, [case])
    return found


FORCED = mostly_thorough([(2, TWO_RANKS), (4, FOUR_RANKS)], [0])


@SLOW
@pytest.mark.parametrize("world, forced", FORCED, ids=["2 ranks", "4 ranks"])
def test_gradients_are_those_of_one_process(ranks, world, forced):
    for reports in ranks(world).run(compare, forced, timeout=120):
        for (_, case), report in zip(forced, reports, strict=True):
            assert twin.problems(report, 1e-10) == [], case


# ------------------------------------------------------------- a layer whose ranks have other numbers of tokens

COUNTS = {2: ([1, 0], [0, 7], [0, 0]), 4: ([0, 0, 1, 0], [5, 0, 0, 3], [0, 0, 0, 0])}


def uneven(rank: int, world: int, layout: dict[str, Any], fields: dict[str, Any]) -> list[float]:
    """The largest difference from one process with all tokens, for each row of COUNTS: output and every gradient."""
    mesh = Mesh.build(ParallelConfig(**layout, variable_seq_lengths=True))
    found = []
    for counts in COUNTS[world]:
        first, n = sum(counts[:rank]), counts[rank]
        x = torch.randn(sum(counts), 1, H, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        whole, part = x.clone().requires_grad_(), x[first : first + n].clone().requires_grad_()
        serial, layer = new_layer(**fields).double(), new_layer(mesh, **fields).double()
        for model, tokens in ((serial, whole), (layer, part)):
            (model(tokens).sin() * torch.arange(1, H + 1)).sum().backward()
        assert all(p.grad is not None for p in layer.parameters() if p.requires_grad), "zeros, and not nothing"
        assert layer.router.tally.isfinite().all()
        pairs = [(part.grad, whole.grad[first : first + n])]
        with torch.no_grad():
            pairs.append((layer(part), serial(whole)[first : first + n]))
        for one, other in zip(layer.parameters(), serial.parameters(), strict=True):
            if one.requires_grad:
                grad = c.all_reduce(one.grad, mesh.world if layout_of(one).experts is None else mesh.edp)
                pairs.append((gather_logical(grad, layout_of(one), mesh), other.grad))
        found.append(max((a - b).abs().max().item() for a, b in pairs if a.numel()))
    return found


@pytest.mark.parametrize(
    "world, layout", mostly_thorough([(2, {EP: 2}), (4, {EP: 4}), (4, {EP: 2, ETP: 2})], [0, 2], [0]), ids=str
)
def test_one_token_in_all_and_ranks_without_any(ranks, world, layout):
    fields = {"moe_token_dispatcher_type": "alltoall", "moe_shared_expert_intermediate_size": 20}
    for found in ranks(world).run(uneven, layout, {**fields}):
        assert max(found) < 1e-12
    penalised = {"moe_aux_loss_coeff": 0.1, "moe_router_load_balancing_type": "global_aux_loss"}
    for found in ranks(world).run(uneven, layout, {**fields, **penalised}):
        assert max(found) < 1e-12, "the batch's shares are those of the tokens, however they lie"
