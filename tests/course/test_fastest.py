"""Lab 02's measurements: memory that autograd keeps, and the events of the fastest run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from course.lab02.fastest import best_of, kept_sizes, watched
from torch import nn

from labkit.ranks.pool import WarmPool

SUM = {"reduce_scatter": "sum"}


def test_what_is_kept_is_counted_once_and_parameters_not_at_all() -> None:
    linear = nn.Linear(4, 8)
    x = torch.randn(3, 4, requires_grad=True)
    assert kept_sizes(linear, x) == [4 * 3 * 4]

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * x).sum() + (x.view(-1) ** 2).sum()

    assert kept_sizes(Twice(), x) == [4 * 3 * 4]


def two_ways(rank: int, world: int) -> dict[str, Any]:
    dy, x, weight = torch.randn(6, 1, 3), torch.randn(6, 1, 4), torch.randn(3, 4)
    names, order, mine = {24: "dx", 12: "dW"}, [], torch.empty(3, 1, 4)

    def at_once(dy: Any, x: Any, weight: Any) -> None:
        order.append("at once")
        dx = dy @ weight
        dist.reduce_scatter_tensor(mine, dx)
        dy.flatten(0, 1).t() @ x.flatten(0, 1)

    def late(dy: Any, x: Any, weight: Any) -> None:
        order.append("late")
        if len(order) != 8:  # its third timed run is the fast one, on all ranks
            time.sleep(0.05)
        dx = dy @ weight
        handle = dist.reduce_scatter_tensor(mine, dx, async_op=True)
        time.sleep(0.05 if len(order) != 8 else 0)
        dy.flatten(0, 1).t() @ x.flatten(0, 1)
        handle.wait()

    best = best_of({"at once": at_once, "late": late}, (dy, x, weight), rank, names=names, messages=SUM, runs=3)
    one = watched(at_once, (dy, x, weight), rank, names, SUM)
    return {
        "order": order[:8], "kinds": {way: sorted(e.name for e in events) for way, events in best.items()},
        "lasted": {w: max(e.end for e in ev) - min(e.start for e in ev) for w, ev in best.items()},
        "one": [(e.name, e.kind, e.rank) for e in one],
    }  # fmt: skip


def test_ways_alternate_and_each_has_its_products_and_its_sum(ranks: Callable[..., WarmPool]) -> None:
    for rank, said in enumerate(ranks(2).run(two_ways)):
        assert said["order"] == ["at once", "late"] * 4
        assert said["kinds"] == {"at once": ["dW", "dx", "sum"], "late": ["dW", "dx", "sum"]}
        assert said["one"] == [("dx", "compute", rank), ("dW", "compute", rank), ("sum", "comm", rank)]


def test_an_error_gives_torch_its_methods_back(ranks: Callable[..., WarmPool]) -> None:
    assert ranks(2).run(after_an_error) == [True, True]


def after_an_error(rank: int, world: int) -> bool:
    group = dist.ProcessGroup
    real = group._reduce_scatter_base

    def broken() -> None:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        watched(broken, (), rank, {}, SUM)
    return group._reduce_scatter_base is real
