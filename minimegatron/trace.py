"""Events with a rank, a name, a start and an end: the one record behind every picture and every count.

Any code may emit events; only `viz/` draws. The planner's simulator emits the same events, so a predicted and a
measured timeline share one picture. Without a listener nothing is recorded, at almost no cost::

    with trace.record(rank=0) as log:
        model(x).sum().backward()
    log.count("all_reduce")             # how many
    log.nbytes("all_reduce", axis="tp") # payload bytes of this rank's tensors

Convention for `nbytes` of a collective: the bytes of the *larger* of input and output on one rank, i.e. the size `n`
in the textbook costs `all_reduce = 2 n (N-1)/N`, `all_gather = reduce_scatter = all_to_all = n (N-1)/N`.
`Event.wire_bytes` applies that factor (bytes a rank sends with a ring).
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

# Listeners, and profilers that want spans as their ranges. Module state, because autograd may run a backward pass on a
# thread of its own, where a context variable would be lost.
_logs: list[Log] = []
_ranges: list[Callable[[str], AbstractContextManager[Any]]] = []


@dataclasses.dataclass(frozen=True)
class Event:
    """Something that happened on one rank.

    Attributes:
        name: e.g. `all_reduce`, `forward`, `F`.
        kind: `comm`, `compute`, `wait`, `memory`, `mark`, or `unit` (`parallel/data/units`).
        rank: global rank.
        start, end: seconds on this machine's monotonic clock; equal for an instant.
        axis: the mesh axis of a communication (`tp`, `dp_cp` ...), else "".
        nbytes: payload in bytes (see the module docstring).
        size: number of ranks that took part.
        note: free text (a tensor's name, a microbatch).
    """

    name: str
    kind: str
    rank: int
    start: float
    end: float
    axis: str = ""
    nbytes: int = 0
    size: int = 1
    note: str = ""

    @property
    def seconds(self) -> float:
        return self.end - self.start

    @property
    def wire_bytes(self) -> float:
        """Bytes this rank sends: all of a message; for a collective the bytes that it sends in a ring."""
        if self.name in ("send", "recv", "ring_shift"):
            return float(0 if self.name == "recv" else self.nbytes)
        share = (self.size - 1) / self.size
        return self.nbytes * share * (2 if self.name == "all_reduce" else 1)


class Log:
    """The events of one rank, in order of their end."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.events: list[Event] = []

    def select(self, name: str | None = None, *, kind: str | None = None, axis: str | None = None) -> list[Event]:
        return [
            e
            for e in self.events
            if (name is None or e.name == name)
            and (kind is None or e.kind == kind)
            and (axis is None or e.axis == axis)
        ]

    def count(self, name: str | None = None, *, axis: str | None = None) -> int:
        """Number of communications with this name on this axis."""
        return len(self.select(name, kind="comm", axis=axis))

    def nbytes(self, name: str | None = None, *, axis: str | None = None) -> int:
        """Payload bytes of the communications with this name on this axis."""
        return sum(e.nbytes for e in self.select(name, kind="comm", axis=axis))

    def summary(self) -> dict[str, dict[str, int]]:
        """`{"all_reduce/tp": {"count": 4, "nbytes": 8192}, ...}`, sorted by key."""
        table: dict[str, dict[str, int]] = {}
        for event in self.select(kind="comm"):
            row = table.setdefault(f"{event.name}/{event.axis}", {"count": 0, "nbytes": 0})
            row["count"] += 1
            row["nbytes"] += event.nbytes
        return dict(sorted(table.items()))


@contextlib.contextmanager
def record(rank: int = 0) -> Iterator[Log]:
    """Collect everything emitted in this process while the block runs; blocks nest."""
    log = Log(rank)
    _logs.append(log)
    try:
        yield log
    finally:
        _logs.remove(log)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Record nothing in the block."""
    logs = _logs[:]
    _logs.clear()
    try:
        yield
    finally:
        _logs[:] = logs


@contextlib.contextmanager
def ranges(of: Callable[[str], AbstractContextManager[Any]]) -> Iterator[None]:
    """In the block every span is also a range `of(name)`, as profilers have them."""
    _ranges.append(of)
    try:
        yield
    finally:
        _ranges.remove(of)


def recording() -> bool:
    """Whether there is a listener; if not, callers can skip work done only for the record."""
    return bool(_logs)


def emit(
    name: str, kind: str, start: float, end: float, *, axis: str = "", nbytes: int = 0, size: int = 1, note: str = ""
) -> None:
    """Record one event with every listener."""
    for log in _logs:
        log.events.append(Event(name, kind, log.rank, start, end, axis, nbytes, size, note))


@contextlib.contextmanager
def span(
    name: str, kind: str = "compute", *, axis: str = "", nbytes: int = 0, size: int = 1, note: str = ""
) -> Iterator[None]:
    """Record the block as one event."""
    if not _logs and not _ranges:
        yield
        return
    start = time.monotonic()
    try:
        with contextlib.ExitStack() as inside:
            for of in _ranges:
                inside.enter_context(of(name))
            yield
    finally:
        emit(name, kind, start, time.monotonic(), axis=axis, nbytes=nbytes, size=size, note=note)
