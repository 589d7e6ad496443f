"""Errors that only say that another rank is gone are told from causes."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minimegatron.comm.mesh import Axis
from minimegatron.errors import RankError
from minimegatron.launch.consequence import is_consequence, timed_out


def world_axis(rank: int, world: int) -> Axis:
    return Axis("dp", tuple(range(world)), rank, dist.group.WORLD)


def raised(call: Callable[[], Any]) -> str:
    """The text of the RankError that `call` must raise."""
    with pytest.raises(RankError) as caught:
        call()
    return str(caught.value)


# ---------------------------------------------------------------------------------------------- consequences


def lose(rank: int, world: int) -> tuple[bool, bool] | None:
    """Rank 1 leaves, or is late; what do the others get?"""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    if rank == 1:
        time.sleep(3)
        return None
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        return is_consequence(error), timed_out(error)
    return None


def test_what_gloo_says_of_a_silent_peer_is_recognised(ranks: Any) -> None:
    assert ranks(2).run(lose, timeout=20)[0] == (True, True)


@pytest.mark.parametrize(
    ("error", "consequence"),
    [
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:27788. This is typically ..."), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("Connection closed by peer"), False),
        (RankError("rank 1 failed: RuntimeError: Connection closed by peer"), False),
    ],
)
def test_consequences_are_told_from_causes(error: BaseException, consequence: bool) -> None:
    assert is_consequence(error) is consequence
