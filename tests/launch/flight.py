"""Flight records without processes: each rank's program runs by itself, over a transport that moves nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from minimegatron.comm.async_ops import alone
from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import all_gather_start, all_reduce_start
from minimegatron.comm.flight_recorder import FlightRecorder
from minimegatron.comm.transport import FakeTransport, Started
from minimegatron.launch import flight_dump

Axes = dict[str, Axis]
Program = Callable[[int, Axes], object]


class Waits(Exception):
    """A rank waits, and will for ever."""


class Stuck:
    def wait(self, *_: Any) -> None:
        raise Waits


class Silent(FakeTransport):
    """Moves nothing; no wait for what it begins ends while `stuck`."""

    stuck = False

    def _begin(self, *_: Any) -> Started:
        return Started([Stuck()] if Silent.stuck else [])

    all_reduce = all_gather = reduce_scatter = all_to_all = _begin  # type: ignore[assignment]
    broadcast = ring_shift = send = recv = _begin  # type: ignore[assignment]


def axes(rank: int) -> Axes:
    """Four ranks, tp 2 and dp 2."""
    tp, dp = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
    return {
        "tp": Axis("tp", tp, tp.index(rank)),
        "dp": Axis("dp", dp, dp.index(rank)),
        "world": Axis("world", (0, 1, 2, 3), rank),
    }


@contextlib.contextmanager
def for_ever() -> Any:
    """In the block no wait ends."""
    Silent.stuck = True
    try:
        yield
    finally:
        Silent.stuck = False


def sums(axis: Axis, n: int = 8, dtype: torch.dtype = torch.float32, stuck: bool = False) -> None:
    with for_ever() if stuck else contextlib.nullcontext():
        all_reduce_start(torch.zeros(n, dtype=dtype), axis).wait()


def gathers(axis: Axis, n: int = 8) -> None:
    all_gather_start(torch.zeros(n), axis).wait()


def recorded(rank: int, program: Program, size: int = 100) -> dict[str, Any]:
    """The record of a rank after its program, or after a wait that does not end."""
    recorder = FlightRecorder(size)
    with alone(Silent(), recorder), contextlib.suppress(Waits):
        program(rank, axes(rank))
    return flight_dump.dump(recorder, rank, 4, "a test")


def all_recorded(program: Program, size: int = 100) -> dict[int, dict[str, Any]]:
    return {rank: recorded(rank, program, size) for rank in range(4)}
