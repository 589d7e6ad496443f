"""Messages of ranks, in every form in which they are sent and waited for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from labkit.ranks.pool import WarmPool
from labkit.watched import group_calls, travels


def many_ways(rank: int, world: int) -> dict[str, Any]:
    """Gathers and reduce-scatters in every form that torch has; what was seen of each."""
    import torch.distributed._functional_collectives as functional

    world_group = dist.distributed_c10d._get_default_group()
    from_import, shard, whole = dist.all_gather_into_tensor, torch.ones(2), torch.zeros(4)
    ways: dict[str, Callable[[], Any]] = {
        "into a tensor": lambda: from_import(whole, shard),
        "a list": lambda: dist.all_gather(list(whole.chunk(2)), shard),
        "waited for later": lambda: dist.all_gather_into_tensor(whole, shard, async_op=True).wait(),
        "functional": lambda: functional.wait_tensor(functional.all_gather_tensor(shard, 0, world_group)),
        "sums": lambda: dist.reduce_scatter_tensor(shard.clone(), whole),
        "sums of a list": lambda: dist.reduce_scatter(shard.clone(), list(whole.chunk(2))),
        "functional sums": lambda: functional.wait_tensor(
            functional.reduce_scatter_tensor(whole, "sum", 0, world_group)
        ),
        "never waited for": lambda: dist.all_gather_into_tensor(whole, shard, async_op=True),
    }
    seen = {}
    for name, way in ways.items():
        with travels(rank, "dp") as events:
            way()
        seen[name] = [(e.name, e.kind, e.axis, e.end >= e.start) for e in events]
    with travels(rank, "dp") as events:
        work = dist.all_gather_into_tensor(whole, shard, async_op=True)
        time.sleep(0.02)
        work.wait()
        work.wait()
    seen["twice, late"] = [("late", e.seconds >= 0.02) for e in events]
    seen["FSDP2 waits for it"] = isinstance(work, dist.Work)
    for name in ("waited for later", "functional", "sums"):
        with travels(rank, "dp", waits=True) as events:
            ways[name]()
        sent, wait = sorted(events, key=lambda e: e.kind)
        seen[f"{name}, and its wait"] = [(sent.kind, wait.kind, sent.start <= wait.start, wait.end == sent.end)]
    seen["afterwards"] = _in_every_form(ways)
    dist.barrier()
    return seen


def _in_every_form(ways: Mapping[str, Callable[[], Any]]) -> list[str]:
    """Run them with nothing watching: a method put back wrongly is called without its group."""
    before = dict(vars(dist.ProcessGroup))
    for way in ways.values():
        way()
    with travels(0, "dp"):
        pass
    return [name for name, method in vars(dist.ProcessGroup).items() if method is not before[name]]


def test_every_form_of_a_gather_is_seen_until_it_has_been_waited_for(ranks: Callable[..., WarmPool]) -> None:
    for seen in ranks(2, fingerprints=False).run(many_ways):
        assert seen.pop("never waited for") == []
        assert seen.pop("twice, late") == [("late", True)]
        assert seen.pop("FSDP2 waits for it"), "it waits for nothing that is no Work, and computes with old weights"
        assert seen.pop("afterwards") == []
        waits = [seen.pop(name) for name in list(seen) if name.endswith("its wait")]
        assert waits == [[("comm", "wait", True, True)]] * 3
        for name, events in seen.items():
            what = "reduce_scatter" if "sums" in name else "all_gather"
            assert events == [(what, "comm", "dp", True)], name


def to_the_right(rank: int, world: int, how: str) -> list[tuple[str, int, int, float]]:
    x, box = torch.full((3,), 7.0 + rank), torch.empty(3)
    right, left = (rank + 1) % world, (rank - 1) % world
    with group_calls() as calls:
        if how == "send":
            coming = dist.irecv(box, left)
            dist.send(x, right)
            coming.wait()
        elif how == "isend":
            sending = dist.isend(x, right)
            dist.recv(box, left)
            sending.wait()
        else:
            ops = [dist.P2POp(dist.isend, x, right), dist.P2POp(dist.irecv, box, left)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
    dist.barrier()
    dist.all_reduce(x)  # no longer watched
    return [(c.name, c.nbytes, c.to, c.first) for c in calls]


def reduced(rank: int, world: int) -> list[tuple[str, int, bool]]:
    pair = dist.new_group([0, 1])
    with group_calls() as calls:
        dist.all_reduce(torch.ones(5))
        if rank < 2:
            dist.all_reduce(torch.ones(2), group=pair, async_op=True).wait()
        dist.all_reduce(torch.ones(0))
    assert math.isnan(calls[-1].first)
    return [(c.name, c.nbytes, c.end > c.start) for c in calls]


def test_every_way_to_send_is_seen(ranks: Any) -> None:
    for how in ("send", "isend", "batch"):
        assert ranks(3).run(to_the_right, how) == [[("send", 12, (r + 1) % 3, 7.0 + r)] for r in range(3)], how


def test_all_reduces_of_every_group_are_seen_and_their_end(ranks: Any) -> None:
    first, second, third = ranks(3).run(reduced)
    assert first == second == [("all_reduce", 20, True), ("all_reduce", 8, True), ("all_reduce", 0, True)]
    assert third == [first[0], first[2]]
