"""The step on several ranks: one bad rank stops, or makes skip, all of them; and nobody forgets to take part."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from labkit.ranks.pool import shared_pool
from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig, ParallelConfig
from minimegatron.errors import NumericsError
from minimegatron.optim.build import build_optimizer

LAYOUT = {"tensor_model_parallel_size": 2}  # four ranks: tp 2, dp 2


def raise_on_one(rank: int, world: int, bad_rank: int) -> str:
    """fp32 without a scaler; the message, or "stepped"."""
    mesh = Mesh.build(ParallelConfig(**LAYOUT))
    net = nn.Linear(3, 3)
    net.weight.grad, net.bias.grad = torch.ones(3, 3), torch.ones(3)
    if rank == bad_rank:
        net.bias.grad[0] = math.inf
    before = net.weight.detach().clone()
    try:
        build_optimizer(OptimizerConfig(), net, mesh).step()
    except NumericsError as error:
        assert torch.equal(net.weight, before)
        return error.where
    return "stepped"


@pytest.mark.parametrize("bad_rank", [0, 3])
def test_all_ranks_stop_together(bad_rank: int) -> None:
    where = shared_pool(4).run(raise_on_one, bad_rank, timeout=60)
    assert all(w.startswith(f"rank {r} at") for r, w in enumerate(where))
    assert ["bias" in w for w in where] == [r == bad_rank for r in range(4)]


def skip_on_one(rank: int, world: int) -> list[tuple[bool, float | None, float, float]]:
    """fp16: per step what happened, the scale after it, and a weight."""
    mesh = Mesh.build(ParallelConfig(**LAYOUT))
    net = nn.Linear(3, 3, bias=False, dtype=torch.float16)
    net.weight.data.fill_(1.0)
    config = OptimizerConfig(lr=0.1, initial_loss_scale=8.0, hysteresis=1, loss_scale_window=2, clip_grad=0.0)
    optimizer = build_optimizer(config, net, mesh)
    seen = []
    for step in range(4):
        net.weight.grad = torch.full((3, 3), 2.0, dtype=torch.float16)
        if step == rank == 1:
            net.weight.grad[0, 0] = math.nan
        result = optimizer.step()
        seen.append((result.successful, result.grad_norm, optimizer.loss_scale, net.weight[1, 1].item()))
    return seen


def test_all_ranks_skip_together_and_keep_one_scale() -> None:
    results = shared_pool(4).run(skip_on_one, timeout=60)
    assert all(r == results[0] for r in results)
    assert [s[0] for s in results[0]] == [True, False, True, True]
    assert [s[1] for s in results[0]] == [0.75, None, 1.5, 1.5]  # sqrt(9 * 2 * 2) / scale
    assert [s[2] for s in results[0]] == [8.0, 4.0, 4.0, 8.0]
    assert results[0][0][3] == results[0][1][3] > results[0][2][3] > results[0][3][3]


def frozen_stage(rank: int, world: int) -> tuple[bool, float | None, float]:
    """The second pipeline stage has nothing to train."""
    mesh = Mesh.build(ParallelConfig(pipeline_model_parallel_size=2))
    net = nn.Linear(2, 2, bias=False)
    net.weight.requires_grad_(mesh.pp.is_first)
    net.weight.grad = torch.full((2, 2), 1.5) if mesh.pp.is_first else None
    before = net.weight.detach().clone()
    result = build_optimizer(OptimizerConfig(), net, mesh).step()
    return result.successful, result.grad_norm, (net.weight - before).abs().max().item()


def test_a_stage_without_trainable_parameters_takes_part() -> None:
    results = shared_pool(4).run(frozen_stage, timeout=60)
    assert [r[:2] for r in results] == [(True, 3.0)] * 4
    assert [r[2] > 0 for r in results] == [True, True, False, False]
