"""Sinkhorn's assignment: Megatron's numbers, even loads, the same whatever shares the tokens."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from minimegatron.comm import collectives as c
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.errors import ConfigError
from minimegatron.layers.moe import router as s
from tests import twin
from tests.layers.test_router import config, new_router
from tests.parallel.test_expert_twin import CP, EP, ETP, EXPERTS, SP, TP
from tests.twin import Case

ALONE = Mesh.serial().tp_cp
SINKHORN: dict[str, Any] = {"moe_router_load_balancing_type": "sinkhorn"}


def logits(tokens: int = 40, experts: int = 8, scale: float = 2.0) -> torch.Tensor:
    """All tokens like the first two experts."""
    x = scale * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(3))
    x[:, :2] += 2 * scale
    return x


@pytest.mark.filterwarnings("ignore")
def test_the_table_is_megatrons():
    pytest.importorskip("megatron.core", reason="the oracle is optional")
    from megatron.core.transformer.moe.moe_utils import sinkhorn

    for x in (logits(), logits(7, 3, 0.5)):
        got, want = s.sinkhorn(x, ALONE), sinkhorn(x)
        torch.testing.assert_close(got.float(), want, rtol=1e-4, atol=1e-8)
        assert torch.equal(got.topk(2, -1).indices, want.topk(2, -1).indices)


def test_rows_and_columns_sum_to_equal_shares():
    table = s.sinkhorn(logits(), ALONE, tol=1e-9)
    for dim, parts in ((0, 8), (1, 40)):
        want = torch.full((parts,), 1 / parts, dtype=torch.float64)
        torch.testing.assert_close(table.sum(dim), want, rtol=1e-3, atol=0)


def test_large_logits_overflow_nothing():
    """e^90 is no fp32; Megatron's table would be NaN."""
    table = s.sinkhorn(logits(scale=150.0), ALONE)
    assert table.isfinite().all() and (table >= 0).all()
    torch.testing.assert_close(s.sinkhorn(logits() + 1000.0, ALONE), s.sinkhorn(logits(), ALONE), rtol=1e-3, atol=0)


@pytest.mark.parametrize("k", [1, 2])
def test_tokens_are_dealt_out_in_training_and_choose_in_evaluation(k):
    x = logits(256, scale=1.0)
    weights, chosen = s.assign(x, k, ALONE)
    assert chosen.flatten().bincount(minlength=8).max() < 1.3 * 256 * k / 8
    scores = x.sigmoid() if k == 1 else x.softmax(-1)
    assert torch.equal(weights, scores.gather(1, chosen)), "weights are the logits' own"
    _, free = s.assign(x, k, None)
    assert torch.equal(free, scores.topk(k, -1).indices)
    assert free.flatten().bincount(minlength=8).max() > 1.8 * 256 * k / 8, "which all like the same"


def test_a_router_deals_out_while_it_learns():
    router = new_router(**SINKHORN).double()
    x = torch.randn(64, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 1
    routing = router(x)
    routing.probs.sum().backward()
    assert routing.map.sum(0).max() < 1.3 * 128 * 2 / 8 < router.eval()(x).map.sum(0).max()
    assert router.weight.grad.norm() > 0


CASES = [
    Case(layout, {**EXPERTS, **SINKHORN, "moe_z_loss_coeff": 0.1, **more}, double=True, accumulation=2)
    for layout, more in (
        ({TP: 2, SP: True, EP: 2, ETP: 1}, {"moe_token_dispatcher_type": "alltoall"}),
        ({TP: 2, SP: True, CP: 2, EP: 4, ETP: 1}, {"recompute_granularity": "full"}),
        ({CP: 2, EP: 2}, {"moe_router_topk": 1}),
    )
]


def alone(rank: int, world: int) -> list[Any]:
    with mock.patch.object(s, "all_reduce", lambda x, axis: x * axis.size):
        return twin.compare_all(rank, world, CASES[:1])


@pytest.mark.thorough
def test_gradients_do_not_depend_on_the_layout(ranks):
    for reports in ranks(4).run(twin.compare_all, CASES, timeout=120):
        for one, report in zip(CASES, reports, strict=True):
            assert twin.problems(report, 1e-10) == [], one
    assert all(twin.problems(reports[0], 1e-6) for reports in ranks(4).run(alone)), "each rank for itself is seen"


def part_of_the_table(rank: int, world: int) -> bool:
    """Rows of uneven ranks: the first half of the tokens all like other experts than the second."""
    x = logits()
    x[20:] = x[20:].flip(1)
    axis = Mesh.build(ParallelConfig(context_parallel_size=world)).tp_cp
    mine = s.sinkhorn(x.chunk(world)[rank], axis)
    torch.testing.assert_close(mine, s.sinkhorn(x, ALONE).chunk(world)[rank], rtol=1e-9, atol=1e-12)
    return True


def test_ranks_balance_the_tokens_of_all(ranks):
    assert ranks(2).run(part_of_the_table) == [True, True]


def without_tokens(rank: int, world: int) -> tuple[int, int]:
    axis = Mesh.build(ParallelConfig(context_parallel_size=world)).tp_cp
    table = s.sinkhorn(torch.zeros(0, 4), axis)
    return len(table), int(c.all_reduce(torch.ones(()), axis))


def test_no_token_at_all_ends(ranks):
    assert ranks(2).run(without_tokens) == [(0, 2)] * 2


@pytest.mark.parametrize(
    "fields",
    [
        {"moe_aux_loss_coeff": 0.1},
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        {"moe_expert_capacity_factor": 1.0},
        {"moe_router_topk_scaling_factor": 2.0},
    ],
    ids=str,
)
def test_what_would_move_the_choice_is_refused(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))) as error:
        config(**SINKHORN, **fields)
    assert "sinkhorn" in str(error.value) and error.value.fix
