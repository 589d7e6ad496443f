"""The store of the job, as a second way to communicate when collectives no longer work.

The problem in a sentence: when one rank fails, the others see "Connection closed by peer" or nothing at all, and three
of four tracebacks are consequences. So ranks also use the key-value store that every torch job has (the launcher, or
rank 0, serves it): it is slow, and independent of the process group. No training step uses it.

| entry            | written by                                  | read by                                             |
|------------------|---------------------------------------------|-----------------------------------------------------|
| `cause`          | the first rank that fails, or sees a death  | every rank: its own error is then a consequence     |
| `asked`          | a rank whose collective ran out of time     | the watch of every rank (`launch/watch`)            |
| `at/r`           | rank r, or its watch: the call it is in     | the rank that asked, to find out which are missing  |
| `dumps`          | a rank that got SIGUSR2: how many dumps     | the watch of every rank                             |
| `record/n/r`     | the watch of rank r: its flight record      | the rank that asked, to find the first mismatch     |
| `met/x/r`        | rank r has come to meeting x                | the others, which can name those that have not come |
| `met/x/progress` | a rank that sees another one on its machine | the others, which then wait on                      |
|                  | still starting                              |                                                     |
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch.distributed as dist

from minimegatron.errors import DeadlineError, named
from minimegatron.launch.startup_deadline import StartupDeadline

INTERRUPTED = "was interrupted"


class Cause(NamedTuple):
    """Why the job ends: the rank, what happened to it ("was killed by SIGKILL"), and the rank that wrote this."""

    rank: int
    text: str
    author: int


class Position(NamedTuple):
    """Where a rank is: the collective it is in, its axis and ranks ("" and () outside of one), and the line."""

    op: str
    axis: str
    ranks: tuple[int, ...]
    line: str


class Ledger:
    """The store of one job, used by one rank.

    Args:
        store: shared by all ranks; a connection of its own, because a blocking read blocks the whole connection.
    """

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self.store = store
        self.rank = rank
        self.world = world

    def claim(self, rank: int, text: str) -> Cause:
        """Write the cause, unless there is one; returns the one in the store."""
        cause = json.dumps(Cause(rank, text, self.rank))
        return Cause(*json.loads(self.store.compare_set("cause", "", cause)))

    def cause(self) -> Cause | None:
        return Cause(*json.loads(self.store.get("cause"))) if self.store.check(["cause"]) else None

    def ask(self) -> None:
        """Ask every rank where it is."""
        self.store.set("asked", "1")

    def asked(self) -> bool:
        return self.store.check(["asked"])

    def answer(self, position: Position, *, certain: bool = True) -> None:
        """Write where this rank is; an uncertain answer (the watch's) does not replace an existing one."""
        text = json.dumps(position)
        if certain:
            self.store.set(f"at/{self.rank}", text)
        else:
            self.store.compare_set(f"at/{self.rank}", "", text)

    def answers(self, ranks: Iterable[int], seconds: float) -> dict[int, Position]:
        """The positions of those of `ranks` that answer in time."""
        missing, positions = set(ranks), dict[int, Position]()
        deadline = time.monotonic() + seconds
        while missing:
            for r in [r for r in missing if self.store.check([f"at/{r}"])]:
                op, axis, members, line = json.loads(self.store.get(f"at/{r}"))
                positions[r] = Position(op, axis, tuple(members), line)
                missing.discard(r)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return positions

    def dumps(self, more: int = 0) -> int:
        """How many dumps of all flight recorders have been asked for; asks for `more`."""
        return self.store.add("dumps", more)

    def record(self, number: str, text: str) -> None:
        """Write the flight record of this rank, for the request with this number."""
        self.store.set(f"record/{number}/{self.rank}", text)

    def records(self, number: str, ranks: Iterable[int], seconds: float) -> dict[int, str]:
        """The flight records of those of `ranks` that answer the request in time."""
        missing, found = set(ranks), dict[int, str]()
        deadline = time.monotonic() + seconds
        while True:
            for r in [r for r in missing if self.store.check([f"record/{number}/{r}"])]:
                found[r] = self.store.get(f"record/{number}/{r}").decode()
                missing.discard(r)
            if not missing or time.monotonic() > deadline:
                return found
            time.sleep(0.05)

    def come(self, what: str) -> None:
        """Arrive at a meeting without waiting for the others."""
        self.store.set(f"met/{what}/{self.rank}", "1")
        self.store.add(f"met/{what}", 1)

    def meet(self, what: str, seconds: float, progress: Callable[[], bool] = lambda: False) -> None:
        """Return when every rank has arrived.

        Args:
            what: name of the meeting.
            seconds: longest time without progress of a starting rank, on this machine or another.
            progress: whether ranks of this machine that have not come made progress since its last call.

        Raises:
            DeadlineError: names the ranks that have not arrived.
        """
        self.come(what)
        last = 0

        def some_rank_progresses() -> bool:
            nonlocal last
            before, last = last, self.store.add(f"met/{what}/progress", int(progress()))
            return last > before

        deadline, pause = StartupDeadline(seconds, some_rank_progresses), 0.002
        while self.store.add(f"met/{what}", 0) < self.world:
            if deadline.is_over():
                missing = [r for r in range(self.world) if not self.store.check([f"met/{what}/{r}"])]
                raise DeadlineError(
                    f"{what}: {named(missing)} did not come within {seconds:g} s",
                    where=f"rank {self.rank} of {self.world}",
                    fix="look at the log of the missing ranks; a longer wait is timeout_seconds",
                )
            time.sleep(pause := min(2 * pause, 0.1))
