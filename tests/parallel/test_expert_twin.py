"""A model with experts has the gradients of one process in every layout, with every router and dispatcher."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest

from minimegatron.comm.collectives import Work
from minimegatron.parallel.data import finalize, grad_buffer
from tests import twin
from tests.thorough import mostly_thorough
from tests.twin import Case

TP, SP, CP, PP = (
    "tensor_model_parallel_size",
    "sequence_parallel",
    "context_parallel_size",
    "pipeline_model_parallel_size",
)
EP, ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"
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
        **PENALTIES,
        "num_experts": 8,
        "moe_router_topk": 4,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 4,
        "moe_router_group_topk": 2,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 40,
    },
    "all experts": {"moe_router_topk": 4},
    "one of sixteen": {"num_experts": 16, "moe_router_topk": 1, "moe_router_pre_softmax": True},
}


def case(layout: dict[str, Any], router: str = "softmax", dispatcher: str = "alltoall", **more: Any) -> Case:
    model = {**EXPERTS, **ROUTERS[router], "moe_token_dispatcher_type": dispatcher, **more.pop("model", {})}
    return Case(layout, model, double=True, **more)


def check(pool: Any, cases: list[Case], tolerance: float = 1e-10, timeout: float = 120) -> None:
    for reports in pool.run(twin.compare_all, cases, timeout=timeout):
        for one, report in zip(cases, reports, strict=True):
            assert twin.problems(report, tolerance) == [], one


@pytest.mark.parametrize("router", ROUTERS)
def test_two_ranks(ranks, router):
    layouts = [{EP: 2}, {}, {TP: 2, SP: True}, {TP: 2, SP: True, ETP: 1}, {TP: 2, SP: True, ETP: 1, EP: 2}, {ETP: 2}]
    both = router == "softmax"
    ways = itertools.product(layouts, DISPATCHERS) if both else zip(layouts, itertools.cycle(DISPATCHERS), strict=False)
    check(ranks(2), [case(x, router, d) for x, d in ways])


@pytest.mark.parametrize("router", mostly_thorough(["softmax", "sigmoid in groups"], [1]))
def test_four_ranks(ranks, router):
    layouts = [
        {EP: 4},
        {EP: 2},
        {EP: 2, ETP: 2},
        {TP: 2, SP: True, EP: 2, ETP: 2},
        {TP: 2, SP: True, EP: 4, ETP: 1},
        {TP: 2, SP: True, EP: 2, ETP: 1},
        {TP: 4, SP: True, EP: 2, ETP: 2},
    ]
    first = DISPATCHERS if router == "softmax" else DISPATCHERS[::-1]
    check(ranks(4), [case(x, router, d) for x, d in zip(layouts, itertools.cycle(first), strict=False)])


def test_with_context_and_pipeline(ranks):
    layouts = [
        {CP: 2, EP: 4},
        {CP: 2, TP: 2, SP: True, EP: 2},
        {PP: 2, EP: 2},
        {PP: 2, TP: 2, SP: True, EP: 2, ETP: 1},
    ]
    check(ranks(4), [case(x, "sigmoid in groups", accumulation=2) for x in layouts])


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


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_grouped_product(ranks, dispatcher):
    grouped = Case({EP: 2}, {**EXPERTS, "moe_grouped_gemm": True, "moe_token_dispatcher_type": dispatcher})
    check(ranks(2), [grouped], 1e-5)


# ------------------------------------------------------------------------------------------ everything at once

SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("moe", "core_attn")}
FULL = {"recompute_granularity": "full"}


def composed(layout: dict[str, Any], model: dict[str, Any], dispatcher: str, packed: bool) -> Case:
    shared = {"moe_shared_expert_intermediate_size": 40, **model}
    return case(layout, "softmax", dispatcher, model=shared, documents=packed, accumulation=2, micro_batch_size=1)


def test_compositions(ranks):
    """Each pair of (axis, axis or option) that the tests above leave out, in as few cases as hold them."""
    check(
        ranks(4),
        [
            composed({CP: 2, EP: 2, ETP: 2}, FULL, "alltoall", True),
            composed({CP: 2, TP: 2, SP: True, ETP: 1}, SELECTIVE, "allgather", True),
            composed({PP: 2, CP: 2, EP: 2}, FULL, "allgather", True),
            composed({PP: 2, ETP: 2}, SELECTIVE, "alltoall", False),
            composed({PP: 2, TP: 2, SP: True, EP: 1, ETP: 1}, {}, "alltoall", True),
            composed({PP: 4}, {**FULL, "num_layers": 4, "moe_layer_freq": "[1,0,1,1]"}, "allgather", True),
            composed({TP: 4, SP: True, EP: 4, ETP: 1}, FULL, "allgather", True),
            composed({TP: 2, SP: True, CP: 2, EP: 2, ETP: 1}, {"moe_shared_expert_gate": True}, "alltoall", False),
        ],
    )


def matrix() -> list[Case]:
    """Four ranks cut in every way: tp, cp, pp, the rest dp; ep and etp; dispatcher, recompute, packing."""
    cases = []
    for tp, cp, pp in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4)):
        if tp * cp * pp > 4:
            continue
        for ep, etp in itertools.product((1, 2, 4), (1, 2, 4)):
            if 4 // pp % (ep * etp):
                continue
            layout = {TP: tp, SP: tp > 1, CP: cp, PP: pp, EP: ep, ETP: etp}
            more = {"num_layers": 4, "moe_layer_freq": "[0,1,1,1]"} if pp == 4 else {}
            for options in itertools.product(({}, SELECTIVE, FULL), DISPATCHERS, (False, True)):
                cases.append(composed(layout, {**more, **options[0]}, *options[1:]))
    return cases


@pytest.mark.thorough
@pytest.mark.timeout(1200)
def test_every_composition(ranks):
    cases = matrix()
    assert len(cases) > 300
    for first in range(0, len(cases), 24):
        check(ranks(4), cases[first : first + 24], timeout=600)


# ------------------------------------------------------------------------------- mistakes that must be seen


def compare_with_mistake(rank: int, world: int, one: Case, mistake: str) -> dict[str, Any]:
    with _MISTAKES[mistake]():
        return twin.compare_with_serial(rank, world, one)


def _experts_not_summed() -> Any:
    real = grad_buffer.all_reduce_start
    return mock.patch.object(
        grad_buffer, "all_reduce_start", lambda x, axis: Work(x) if axis.name == "edp" else real(x, axis)
    )


def _experts_averaged() -> Any:
    real = grad_buffer.all_reduce_start

    def mean(x: Any, axis: Any) -> Any:
        return real(x.div_(axis.size) if axis.name == "edp" else x, axis)

    return mock.patch.object(grad_buffer, "all_reduce_start", mean)


def _router_not_summed() -> Any:
    real = finalize.partial_axes
    return mock.patch.object(finalize, "partial_axes", lambda mesh: {**real(mesh), "sequence": None})


_MISTAKES = {
    "experts not summed over edp": _experts_not_summed,
    "experts divided by edp": _experts_averaged,
    "router not summed over tp": _router_not_summed,
}


@pytest.mark.parametrize("mistake", _MISTAKES)
def test_classic_mistakes_are_seen(ranks, mistake):
    one = case({TP: 2, SP: True, EP: 2, ETP: 1})
    reports = ranks(4).run(compare_with_mistake, one, mistake)
    assert any("mlp." in text for r in reports for text in twin.problems(r, 1e-5)), f"{mistake!r} went unnoticed"
