"""The timeline of a step: what every rank computed, sent and waited for, and when; and the time by section.

`--log-timeline-interval N` records every N-th step with `minimegatron/trace`, on all ranks. The log file gets an object
of its own, which `minimegatron watch` draws:

    {"event": "timeline", "iteration": 20, "seconds": 0.5, "ranks": [[["forward", "compute", 0.0, 0.1, ""], ...], ...]}

An event is [name, kind, start, seconds, axis]; starts count from the first event of the step, of any rank. The line of
the step gets `sections`, {section: [least, most seconds of a rank]}, in all logs:

| section                             | what                                                                      |
|-------------------------------------|---------------------------------------------------------------------------|
| `forward`, `backward`; `F`, `B`, `W` | passes of all microbatches; in a pipeline its actions                    |
| `optimizer_step`                    | norm, update, messages of weights                                         |
| `other`                             | the rest of the step: sums of gradients at its end, losses, the host      |
| `waiting`                           | in calls of communication, for other ranks; it is a part of the others    |

Times are those of the host: on a GPU an event ends when its operations are launched. Ranks of one machine share a
clock; those of several are as far apart as the clocks of their machines. A step of more than `MOST` events keeps the
longest of each rank.

Torch's profiler (`observers/profile`) has every operator, costs much more, and writes a file a rank.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minimegatron import trace
from minimegatron.comm import async_ops
from minimegatron.comm.agree import gather_objects
from minimegatron.comm.mesh import Mesh
from minimegatron.training.observers import Observer, Step

MOST = 1 << 15  # events of all ranks
KINDS = ("compute", "comm")


class Blocked(async_ops.Observer):
    """Notes when this rank is blocked in a communication: while it issues one, and while it waits for it."""

    def __init__(self) -> None:
        self.events: list[trace.Event] = []
        self._since: dict[int, float] = {}

    def issue(self, work: async_ops.Work) -> None:
        self._since[id(work)] = time.monotonic()

    def issued(self, work: async_ops.Work) -> None:
        start = self._since.pop(id(work), None)
        if start is not None:
            self.events.append(trace.Event("wait", "wait", 0, start, time.monotonic(), work.axis.name))

    wait, waited = issue, issued


class Timeline(Observer):
    """Records every `interval`-th step; all ranks record the same steps.

    Args:
        mesh: the ranks.
        interval: steps between two; None records nothing.
        add: given the fields for the line of the step.
        write: given the object for the log file.
    """

    def __init__(
        self,
        mesh: Mesh,
        interval: int | None,
        add: Callable[[dict[str, Any]], None],
        write: Callable[[dict[str, Any]], None],
    ) -> None:
        self.mesh, self.interval, self.add, self.write = mesh, interval, add, write
        self._log: trace.Log | None = None
        self._blocked = Blocked()

    def during_step(self, done: int) -> contextlib.AbstractContextManager[None]:
        if self.interval is None or (done + 1) % self.interval:
            return contextlib.nullcontext()
        return self._recorded()

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        self._blocked = Blocked()
        async_ops.add_observer(self._blocked)
        try:
            with trace.record(self.mesh.rank) as self._log:
                yield
        finally:
            async_ops.remove_observer(self._blocked)

    def after_step(self, step: Step) -> None:
        log, self._log = self._log, None
        if log is None or step.report is None:
            return
        events = [e for e in log.events if e.kind in KINDS] + self._blocked.events
        spent = sections(events, step.seconds)
        left = len(events) - MOST // self.mesh.world.size
        events = sorted(events, key=lambda e: e.seconds)[max(left, 0) :]
        shift = time.time() - time.monotonic()
        mine = sorted((e.start + shift, e.seconds, e.name, e.kind, e.axis) for e in events)
        ranks = gather_objects((spent, mine), self.mesh.world)
        names = dict.fromkeys(name for of_rank, _ in ranks for name in of_rank)
        each = {name: [of_rank.get(name, 0.0) for of_rank, _ in ranks] for name in names}
        self.add({"sections": {name: [min(seconds), max(seconds)] for name, seconds in each.items()}})
        first = min((found[0][0] for _, found in ranks if found), default=0.0)
        drawn = [
            [
                [name, kind, round(start - first, 6), round(seconds, 6), axis]
                for start, seconds, name, kind, axis in found
            ]
            for _, found in ranks
        ]
        self.write({"event": "timeline", "iteration": step.iteration, "seconds": step.seconds, "ranks": drawn})


def sections(events: Sequence[trace.Event], seconds: float) -> dict[str, float]:
    """{section: seconds} of a rank's step that took `seconds`; a span inside another belongs to the outer one."""
    spent, covered = dict[str, float](), float("-inf")
    for event in sorted((e for e in events if e.kind == "compute"), key=lambda e: (e.start, -e.end)):
        if event.end > covered:
            spent[event.name] = spent.get(event.name, 0.0) + event.seconds
            covered = event.end
    waiting, until = 0.0, float("-inf")
    for event in sorted((e for e in events if e.kind == "wait"), key=lambda e: e.start):
        waiting += max(0.0, event.end - max(event.start, until))
        until = max(until, event.end)
    return {**spent, "other": max(0.0, seconds - sum(spent.values())), "waiting": waiting}
