"""A second way for ranks to communicate, for when collectives no longer work: the store of the job.

The problem in a sentence: when one rank fails, the others learn it as "Connection closed by peer" or not at all, and
three of four tracebacks are consequences. So ranks also use the store that every torch job has (a small key-value
server in the launcher): slow, and independent of the process group.

| entry       | written by                                    | read by                                        |
|-------------|-----------------------------------------------|------------------------------------------------|
| `cause`     | the first rank that fails, or sees a death    | every rank: its own error is a consequence     |
| `asked`     | a rank whose collective ran out of time       | the watch of every rank (`launch.watch`)         |
| `at/r`      | rank r, or its watch: the call it is in       | the rank that asked: which are missing?        |
| `met/x/r`   | rank r has come to meeting x                  | the others, which can name those that have not |
| `met/x/progress` | a rank that sees another on its machine still starting | the others, which then wait on |

None of it runs in a training step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch.distributed as dist

from minimegatron.errors import DeadlineError, named
from minimegatron.launch.patience import Patience

INTERRUPTED = "was interrupted"


class Cause(NamedTuple):
    """Why the job ends: which rank, what happened to it ("was killed by SIGKILL"), and the rank that wrote it."""

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
    """The store of one job, seen by one rank.

    Args:
        store: shared by all ranks; a connection of its own, because a blocking read blocks the whole connection.
    """

    def __init__(self, store: dist.Store, rank: int, world: int) -> None:
        self.store = store
        self.rank = rank
        self.world = world

    def claim(self, rank: int, text: str) -> Cause:
        """Write down the cause, unless there is one; the one that stands."""
        mine = json.dumps(Cause(rank, text, self.rank))
        return Cause(*json.loads(self.store.compare_set("cause", "", mine)))

    def cause(self) -> Cause | None:
        return Cause(*json.loads(self.store.get("cause"))) if self.store.check(["cause"]) else None

    def ask(self) -> None:
        """Have every rank say where it is."""
        self.store.set("asked", "1")

    def asked(self) -> bool:
        return self.store.check(["asked"])

    def answer(self, position: Position, *, certain: bool = True) -> None:
        """Say where this rank is; an uncertain answer (of the watch) does not replace one that is there."""
        text = json.dumps(position)
        if certain:
            self.store.set(f"at/{self.rank}", text)
        else:
            self.store.compare_set(f"at/{self.rank}", "", text)

    def answers(self, ranks: Iterable[int], seconds: float) -> dict[int, Position]:
        """The positions of those of `ranks` that answer in time."""
        missing, found = set(ranks), dict[int, Position]()
        deadline = time.monotonic() + seconds
        while missing:
            for r in [r for r in missing if self.store.check([f"at/{r}"])]:
                op, axis, members, line = json.loads(self.store.get(f"at/{r}"))
                found[r] = Position(op, axis, tuple(members), line)
                missing.discard(r)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        return found

    def come(self, what: str) -> None:
        """Be counted at a meeting without waiting for the others."""
        self.store.set(f"met/{what}/{self.rank}", "1")
        self.store.add(f"met/{what}", 1)

    def meet(self, what: str, seconds: float, progress: Callable[[], bool] = lambda: False) -> None:
        """Return when every rank has come here.

        Args:
            what: name of the meeting.
            seconds: longest time without a sign of progress: of the ranks on this machine, or told by those on others.
            progress: whether ranks that this one can see, and that have not come, got on since it was asked last.

        Raises:
            DeadlineError: names the ranks that have not.
        """
        self.come(what)
        told = 0

        def some_rank_progresses() -> bool:
            nonlocal told
            before, told = told, self.store.add(f"met/{what}/progress", int(progress()))
            return told > before

        patience, pause = Patience(seconds, some_rank_progresses), 0.002
        while self.store.add(f"met/{what}", 0) < self.world:
            if patience.is_over():
                missing = [r for r in range(self.world) if not self.store.check([f"met/{what}/{r}"])]
                raise DeadlineError(
                    f"{what}: {named(missing)} did not come within {seconds:g} s",
                    where=f"rank {self.rank} of {self.world}",
                    fix="look at the log of the missing ranks; a longer wait is timeout_seconds",
                )
            time.sleep(pause := min(2 * pause, 0.1))
