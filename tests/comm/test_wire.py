"""Sends and all-reduces are seen at the process group, whichever function was called."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.comm import wire


def to_the_right(rank: int, world: int, how: str) -> list[tuple[str, int, int, float]]:
    x, box = torch.full((3,), 7.0 + rank), torch.empty(3)
    right, left = (rank + 1) % world, (rank - 1) % world
    with wire.watched() as calls:
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
    with wire.watched() as calls:
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
