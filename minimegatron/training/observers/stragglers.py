"""Which rank is slow, in which section of a step, by how much, and always or at times (`--log-straggler`).

The problem in a sentence: all ranks take the time of the slowest, and their clocks show the same; the one that computes
for 60 ms and the one that waits for it for 40 of them both say 60.

So the clock of a rank has two hands, its own work and waiting for communication, and both are read for each section:

    | data | forward ......... wait ... | backward ... wait | optimizer | save |
      own    own               others    own       others

`Sections` is told of every change of section by the spans of `minimegatron/trace`, of waits by the door of all
communication (`comm/async_ops`), and of full collections by Python's garbage collector, which stops one rank at a time,
each in another step; the time between two changes belongs to what was going on. On a GPU the marks are events on the
stream, so a wait is the time in which the stream stands still for NCCL's.

Every `--log-interval` steps the ranks gather the times of each step. With the own time o of a rank in a section, and m
the median of the other ranks that do the same work (its stage of the pipeline, if that has others)::

    excess = o - m            slow in a step:  excess > SHARE of the step        slow:  so on average of the interval

A rank that waits is never slow: waiting is not in o. The times are differences of one clock each, so clocks of machines
need not agree. What a message costs itself counts as waiting, on all ranks alike.

| messages of an interval | axis    | bytes a rank                       |
|-------------------------|---------|------------------------------------|
| times of each step      | `world` | 8 * 2 sections * steps (128 most)  |

The same numbers go to the log file, `{"event": "stragglers", ...}`; see `report`. Megatron-LM: `StragglerDetector` in
`megatron/core/utils.py`, which compares the forward passes of ranks, waits included.
"""

from __future__ import annotations

import contextlib
import gc
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from minimegatron import trace
from minimegatron.comm import async_ops
from minimegatron.comm.agree import gather_objects
from minimegatron.comm.async_ops import Work
from minimegatron.comm.collectives import all_gather
from minimegatron.comm.mesh import Mesh, axis_groups
from minimegatron.config import TrainingConfig
from minimegatron.errors import named
from minimegatron.training.observers import Observer, Step

SECTIONS = ("data", "forward", "backward", "optimizer", "save", "evaluation", "garbage collection", "other")
# Names of spans (`training/step`, `parallel/pipeline/execution`, ...) -> section; other spans belong to what is around.
_OF_SPAN = {
    "data": 0, "forward": 1, "F": 1, "backward": 2, "B": 2, "W": 2, "optimizer_step": 3, "save": 4, "evaluation": 5,
}  # fmt: skip
COLLECTION, OTHER = len(SECTIONS) - 2, len(SECTIONS) - 1
FULL = 2  # the generation of a collection that looks at every object
SHARE = 0.1  # of a step: an excess below is noise
SAVE_MS = 200.0  # that the first rank may take longer in a save
STEPS = 128  # of an interval that are gathered; of longer ones the last

Times = list[list[list[float]]]  # of each rank, step and section, in seconds


class Sections(async_ops.Observer):
    """The clock of one rank, with two hands for each section. Use it as a context manager while it runs.

    Args:
        device: the device of the rank; on a GPU the marks are events.
    """

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"
        self._stack = [OTHER]
        self._waits = 0  # depth: a comparison inside of a call
        self._marks: list[tuple[int, Any]] = []  # on a GPU: what ended at this event
        self._times = [0.0] * (2 * len(SECTIONS))
        self._first: Any = None  # on a GPU: the event before them
        self._last = self._now()

    def __enter__(self) -> Sections:
        async_ops.add_observer(self)
        self._ranges = trace.ranges(self._span)
        self._ranges.__enter__()
        gc.callbacks.append(self._collection)
        return self

    def __exit__(self, *exc: Any) -> None:
        gc.callbacks.remove(self._collection)
        self._ranges.__exit__(None, None, None)
        async_ops.remove_observer(self)

    def read(self) -> list[float]:
        """Seconds of own work in each section, then seconds of waiting in each, since the last call."""
        self._switch()
        times, self._times = self._times, [0.0] * len(self._times)
        if self._marks:
            marks, self._marks = self._marks, []
            marks[-1][1].synchronize()
            before = self._first
            for hand, mark in marks:
                times[hand] += before.elapsed_time(mark) / 1000
                before = mark
            self._first = before
        return times

    def _now(self) -> float:
        if self.cuda:
            self._first = torch.cuda.Event(enable_timing=True)
            self._first.record()
        return time.perf_counter()

    def _switch(self) -> None:
        """Give the time since the last change to what has been going on."""
        hand = self._stack[-1] + (len(SECTIONS) if self._waits else 0)
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append((hand, event))
        else:
            now = time.perf_counter()
            self._times[hand] += now - self._last
            self._last = now

    @contextlib.contextmanager
    def _span(self, name: str) -> Iterator[None]:
        section, around = _OF_SPAN.get(name), self._stack[-1]
        # A save or an evaluation has passes of its own; and a thread beside the training is in no section.
        if section is None or SECTIONS[around] in ("save", "evaluation") or _beside():
            yield
            return
        self._switch()
        self._stack.append(section)
        try:
            yield
        finally:
            self._switch()
            self._stack.pop()

    def _collection(self, phase: str, info: dict[str, int]) -> None:
        """Called by Python's garbage collector at the beginning and at the end of each collection."""
        if info["generation"] < FULL or _beside():
            return
        self._switch()
        if phase == "start":
            self._stack.append(COLLECTION)
        elif self._stack[-1] == COLLECTION:
            self._stack.pop()

    def issue(self, work: Work) -> None:
        if not _beside():
            self._switch()
            self._waits += 1

    def issued(self, work: Work) -> None:
        if not _beside():
            self._switch()
            self._waits -= 1

    wait, waited = issue, issued


def _beside() -> bool:
    """Whether this is a thread that Python started beside the main one; autograd's threads belong to the step."""
    ident = threading.get_ident()
    return ident != threading.main_thread().ident and any(t.ident == ident for t in threading.enumerate())


class Stragglers(Observer):
    """Prints which ranks were slow in an interval of the log, and writes it to the log file.

    Args:
        training: the interval; whether anything is measured.
        mesh: the ranks.
        say: prints a line on rank 0.
        log: writes tags and a record to the sinks of rank 0.
    """

    def __init__(
        self,
        training: TrainingConfig,
        mesh: Mesh,
        say: Callable[[str], None],
        log: Callable[[dict[str, float], dict[str, Any], int], None],
    ) -> None:
        self.on = training.log_straggler and mesh.world.size > 1
        self.interval, self.count = training.log_interval, training.straggler_minmax_count
        self.mesh, self.say, self.log = mesh, say, log
        self.peers = peers(mesh)
        self.hosts: list[str] = []
        self._steps = list[list[float]]()
        self._skip = True  # the first step allocates, connects and compiles
        self._stack = contextlib.ExitStack()

    def begin(self, done: int) -> None:
        if self.on:
            self.hosts = gather_objects(socket.gethostname(), self.mesh.world)
            self.sections = self._stack.enter_context(Sections(self.mesh.device))

    def after_step(self, step: Step) -> None:
        if not self.on:
            return
        times = self.sections.read()
        if self._skip:
            self._skip = False
        else:
            self._steps.append(times)
        if step.iteration % self.interval == 0:
            self._report(step.iteration)

    def end(self, done: int, reason: str) -> None:
        if self.on:
            self._steps.append(self.sections.read())  # the last save
            self._report(done)

    def close(self) -> None:
        self._stack.close()

    def _report(self, iteration: int) -> None:
        """All ranks have measured as many steps."""
        steps, self._steps = self._steps[-STEPS:], []
        if not steps:
            return
        mine = torch.tensor(steps, dtype=torch.float64, device=self.mesh.device).unsqueeze(0)
        times: Times = all_gather(mine, self.mesh.world).tolist()
        if self.mesh.rank == 0:
            found = report(times, self.peers, self.hosts, iteration)
            for line in lines(found, self.count):
                self.say(line)
            self.log(tags(found), found, iteration)


def peers(mesh: Mesh) -> list[list[int]]:
    """For each rank the other ranks of its stage of the pipeline; if it has none, all other ranks."""
    world = mesh.world.size
    stage = {rank: line.index(rank) for line in axis_groups(mesh.parallel, world)["pp"] for rank in line}
    same = [[q for q in range(world) if q != r and stage.get(q) == stage.get(r)] for r in range(world)]
    return [ranks or [q for q in range(world) if q != r] for r, ranks in enumerate(same)]


def report(times: Times, peers: Sequence[Sequence[int]], hosts: Sequence[str], iteration: int) -> dict[str, Any]:
    """The record of an interval.

    Args:
        times: [rank][step][section], own seconds of all sections, then waiting seconds of all.
        peers: for each rank those that do the same work.
        hosts: for each rank the name of its machine.
        iteration: the last step.

    Returns:
        `own_ms` and `wait_ms`, {section: [mean of a step, for each rank]}; `own_total_ms`, `wait_total_ms` and
        `step_ms`, [for each rank, for each rank, one]; `skew_ms`, by how much the own time of the slowest rank exceeds
        that of the fastest; `slow`, a list of {rank, host, section, own_ms, peers_ms, excess_ms, slow_steps, steps,
        when}, the worst first, with `when` "always", "at times" or "once".
    """
    ranks, steps, kinds = range(len(times)), range(len(times[0])), range(len(SECTIONS))
    mean = [[1000 * statistics.fmean(times[r][t][k] for t in steps) for k in range(2 * len(SECTIONS))] for r in ranks]
    step_ms = max(sum(mean[r]) for r in ranks)
    own = [sum(mean[r][: len(SECTIONS)]) for r in ranks]
    slow = list[dict[str, Any]]()
    for r in ranks:
        for k in kinds:
            of_peers = [statistics.median(times[q][t][k] for q in peers[r]) for t in steps]
            excess = [1000 * (times[r][t][k] - of_peers[t]) for t in steps]
            late = sum(e > SHARE * step_ms for e in excess)
            once = len(steps) > 1 and late < 2 and sum(excess) < step_ms  # a moment of the operating system's
            writes = SECTIONS[k] == "save" and sum(excess) < SAVE_MS  # the first rank publishes
            if statistics.fmean(excess) > SHARE * step_ms and not once and not writes:
                share = late / len(steps)
                slow.append({
                    "rank": r, "host": hosts[r], "section": SECTIONS[k], "own_ms": mean[r][k],
                    "peers_ms": 1000 * statistics.fmean(of_peers), "excess_ms": statistics.fmean(excess),
                    "slow_steps": late, "steps": len(steps),
                    "when": "once" if late <= 1 else "always" if share >= 0.8 else "at times",
                })  # fmt: skip
    slow.sort(key=lambda one: one["excess_ms"], reverse=True)
    return {
        "event": "stragglers",
        "iteration": iteration,
        "steps": len(steps),
        "step_ms": step_ms,
        "own_ms": {name: [mean[r][k] for r in ranks] for k, name in enumerate(SECTIONS)},
        "wait_ms": {name: [mean[r][len(SECTIONS) + k] for r in ranks] for k, name in enumerate(SECTIONS)},
        "own_total_ms": own,
        "wait_total_ms": [sum(mean[r][len(SECTIONS) :]) for r in ranks],
        "skew_ms": max(own) - min(own),
        "hosts": list(hosts),
        "slow": slow,
    }


def lines(found: dict[str, Any], count: int = 1) -> list[str]:
    """The report for people; `count` of the fastest and of the slowest ranks are named."""
    own, wait = found["own_total_ms"], found["wait_total_ms"]
    order = sorted(range(len(own)), key=lambda r: own[r])
    fast, slow = order[:count], order[::-1][:count]
    said = [
        f"own work of a step: {_each(own, fast)} the least, {_each(own, slow)} the most; "
        f"waiting: {min(wait):.1f} to {max(wait):.1f} ms of {found['step_ms']:.1f}"
    ]
    for one in found["slow"]:
        often = f"in {one['slow_steps']} of {one['steps']} steps"
        when = {"always": f"always ({often})", "at times": f"at times ({often})", "once": f"once ({often})"}[
            one["when"]
        ]
        said.append(
            f"straggler: {named([one['rank']])} on {one['host']} in {one['section']}: {one['own_ms']:.1f} ms a step, "
            f"{one['excess_ms']:.1f} more than its peers, {when}"
        )
    return said


def _each(own: Sequence[float], ranks: Sequence[int]) -> str:
    return ", ".join(f"{own[r]:.1f} ms on rank {r}" for r in ranks)


def tags(found: dict[str, Any]) -> dict[str, float]:
    """For TensorBoard and the like: the skew, and by section the least and the most of all ranks."""
    tags = {"straggler/skew-ms": found["skew_ms"], "straggler/wait-ms max": max(found["wait_total_ms"])}
    for name, times in found["own_ms"].items():
        tags |= {f"straggler/{name}-ms min": min(times), f"straggler/{name}-ms max": max(times)}
    return tags
