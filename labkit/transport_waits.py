"""The waits of all ranks, and whether any of them can still end.

A `Thing` is what a rank can wait for. When every live rank waits, and the broker has heard nothing for a
second, no message can ever come: that is a deadlock, and each of them is told who waits for whom. A rank that computes,
sleeps, or has a thread that does not wait is not waiting; it could still send.

When a rank has ended, only waits that need it fail.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from labkit.broker import Letter
from labkit.transport_log import Entry
from minimegatron.errors import named

QUIET_SECONDS = 1.0


@dataclasses.dataclass
class Thing:
    """Something a rank can wait for.

    Attributes:
        rank: the rank that may wait for it.
        what: "all_reduce of group [0, 1]".
        lacks: the ranks that must act before it is complete.
        any_of: one of them is enough.
        entry: its entry in the log.
        done: it is complete; `tensors` are the result.
        error: why it never will be.
    """

    rank: int
    what: str
    lacks: Callable[[], Iterable[int]]
    any_of: bool = False
    entry: Entry | None = None
    done: bool = False
    error: str = ""
    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class _Wait:
    thing: Thing
    number: int  # of the question that is to be answered
    deadline: float | None
    seconds: float
    threads: int


class Waits:
    """The present waits.

    Args:
        ranks: number of ranks.
        collected: called with a thing when its rank has got the result.

    Attributes:
        deadlock: the first one, in the words that every rank in it was told; or "".
    """

    def __init__(self, ranks: int, collected: Callable[[Thing], None]) -> None:
        self._alive, self._collected = set(range(ranks)), collected
        self._waits: list[_Wait] = []
        self._ended: dict[int, str] = {}
        self._heard = time.monotonic()
        self.deadlock = ""

    def heard(self) -> None:
        """A message has arrived."""
        self._heard = time.monotonic()

    def add(self, thing: Thing, number: int, threads: int, seconds: float | None) -> list[Letter]:
        """Add a wait; returns its answer, if there is one already."""
        deadline = None if seconds is None else time.monotonic() + seconds
        self._waits.append(_Wait(thing, number, deadline, seconds or 0.0, threads))
        return self.settle()

    def settle(self) -> list[Letter]:
        """Answers to all waits whose thing is complete, or never will be, now."""
        now, letters, left = time.monotonic(), list[Letter](), list[_Wait]()
        for wait in self._waits:
            thing = wait.thing
            late = wait.deadline is not None and wait.deadline <= now
            if not thing.done and not thing.error:
                thing.error = self._hopeless(thing)
            if thing.done and not thing.error:
                letters.append((thing.rank, {"id": wait.number, **thing.facts}, thing.tensors))
                self._collected(thing)
            elif thing.error or late:
                said = thing.error or f"{thing.what} timed out after {wait.seconds * 1000:.0f} ms"
                letters.append((thing.rank, {"id": wait.number, "error": said}, ()))
            else:
                left.append(wait)
        self._waits = left
        return letters

    def _hopeless(self, thing: Thing) -> str:
        """Why it can never be complete: a rank that it needs has ended; or ""."""
        lacks = set(thing.lacks())
        ended = lacks & self._ended.keys()
        if not ended or (thing.any_of and ended != lacks):
            return ""
        words = {word: sorted(rank for rank in ended if self._ended[rank] == word) for word in self._ended.values()}
        said = [f"{named(ranks)} {'has' if len(ranks) == 1 else 'have'} {word}"
                for word, ranks in words.items() if ranks]  # fmt: skip
        return f"{thing.what}: {', '.join(said)}"

    def gone(self, rank: int, word: str) -> list[Letter]:
        """Note that the rank has ended; returns answers to waits that cannot end any more."""
        self._alive.discard(rank)
        self._ended.setdefault(rank, word)
        self._waits = [wait for wait in self._waits if wait.thing.rank != rank or word != "ended"]
        return self.settle()

    def idle(self) -> list[Letter]:
        """Timeouts; and the end of a deadlock."""
        letters = self.settle()
        if letters or not self._waits or time.monotonic() - self._heard < QUIET_SECONDS:
            return letters
        for rank in self._alive:
            mine = [wait for wait in self._waits if wait.thing.rank == rank]
            if not mine or len(mine) < max(wait.threads for wait in mine) or any(w.deadline for w in mine):
                return letters
        waits = sorted(self._waits, key=lambda wait: wait.thing.rank)
        said = "; ".join(f"rank {wait.thing.rank} waits in {wait.thing.what}{_for(wait.thing)}" for wait in waits)
        self.deadlock = self.deadlock or f"deadlock: {said}"
        for wait in self._waits:
            wait.thing.error = f"deadlock: {said}"
        return self.settle()


def _for(thing: Thing) -> str:
    """The ranks that it waits for, if its name does not say so."""
    if thing.entry is not None and thing.entry.name in ("send", "recv") and not thing.any_of:
        return ""
    lacks = sorted(set(thing.lacks()))
    return f" for {'any of ' if thing.any_of and len(lacks) > 1 else ''}{named(lacks)}"
