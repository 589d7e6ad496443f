"""The timeline of a step: what every rank computed, sent and waited for, and when.

`--log-timeline-interval N` records every N-th step with `minimegatron/trace`, on all ranks, and writes one object to
the log file, which `minimegatron watch` draws:

    {"event": "timeline", "iteration": 20, "seconds": 0.51, "ranks": [[["forward", "compute", 0.0, 0.11, ""], ...], ...]}

An event is [name, kind, start, seconds, axis]; starts count from the first event of the step, of any rank. Times are
those of the host: on a GPU an event ends when its operations are launched. Ranks of one machine share a clock; those of
several are as far apart as the clocks of their machines. A step of more than `MOST` events keeps the longest of each
rank.

Torch's profiler (`observers/profile`) has every operator, costs much more, and writes a file a rank.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

from minimegatron import trace
from minimegatron.comm.agree import gather_objects
from minimegatron.comm.mesh import Mesh
from minimegatron.training.observers import Observer, Step

MOST = 1 << 15  # events of all ranks
KINDS = ("compute", "comm", "wait")


class Timeline(Observer):
    """Records every `interval`-th step; all ranks record the same steps.

    Args:
        mesh: the ranks.
        interval: steps between two; None records nothing.
        tell: given the object for the log file.
    """

    def __init__(self, mesh: Mesh, interval: int | None, tell: Callable[[dict[str, Any]], None]) -> None:
        self.mesh, self.interval, self.tell = mesh, interval, tell
        self._log: trace.Log | None = None

    def during_step(self, done: int) -> contextlib.AbstractContextManager[None]:
        if self.interval is None or (done + 1) % self.interval:
            return contextlib.nullcontext()
        return self._recorded()

    @contextlib.contextmanager
    def _recorded(self) -> Iterator[None]:
        with trace.record(self.mesh.rank) as self._log:
            yield

    def after_step(self, step: Step) -> None:
        log, self._log = self._log, None
        if log is None or step.report is None:
            return
        shift = time.time() - time.monotonic()
        events = [e for e in log.events if e.kind in KINDS]
        left = len(events) - MOST // self.mesh.world.size
        if left > 0:
            kept = sorted(events, key=lambda e: e.seconds)[left:]
            events = sorted(kept, key=lambda e: e.start)
        mine = [(e.name, e.kind, e.start + shift, e.seconds, e.axis) for e in events]
        ranks = gather_objects(mine, self.mesh.world)
        first = min((start for rank in ranks for _, _, start, *_ in rank), default=0.0)
        self.tell(
            {
                "event": "timeline",
                "iteration": step.iteration,
                "seconds": step.seconds,
                "ranks": [
                    [[name, kind, round(start - first, 6), round(seconds, 6), axis] for name, kind, start, seconds, axis in r]
                    for r in ranks
                ],
            }
        )
