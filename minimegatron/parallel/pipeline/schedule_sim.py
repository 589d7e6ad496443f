"""Simulates a schedule: how long it takes, and how many activations it keeps alive.

A rank starts an action when it has finished the previous one and all inputs of the action have arrived::

    start(a) = max(end of the rank's previous action, max over inputs of a of end + latency if from another rank)
    end(a)   = start(a) + cost(a)

Nothing else is modelled: sends cost the sender no time and do not wait for each other. Costs may be integers or
fractions; then all results are exact, and closed forms hold with `==`. Three figures sum up a run:

    makespan        when the last rank finishes
    bubble          idle time / work, of a rank or of all: (p-1)/m for GPipe and 1F1B, (p-1)/(vm) interleaved
    inner_bubble    the same between a rank's own first and last action: 0 for ZB-V ("zero bubble"), which needs
                    optimizer steps that do not wait for the slowest rank

A `Simulation` has the events that a run emits, so a predicted timeline and a measured one are drawn in one picture
(`viz.timeline.gantt`) and written to one Perfetto trace (`viz.timeline.chrome_trace`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

from minimegatron.errors import ConfigError
from minimegatron.parallel.pipeline.actions import Action, Schedule
from minimegatron.parallel.pipeline.schedule_check import require_runnable
from minimegatron.trace import Event


def live_activations(schedule: Schedule) -> list[list[int]]:
    """`[rank][i]`: how many chunks' activations the rank holds while it does its i-th action.

    An activation lives from F to the end of B, or to the end of W where the backward is split. Without any backward
    (evaluation) it lives during its F only. The unit is one microbatch in one chunk, 1/v of a rank's layers.
    """
    curves = []
    for rank, row in enumerate(schedule.actions):
        live, curve = 0, []
        for action in row:
            live += action.kind == "F"
            curve.append(live)
            live -= schedule.forward_only or _frees(schedule, rank, action)
        curves.append(curve)
    return curves


def peak_live(schedule: Schedule) -> list[int]:
    """The most activations that each rank holds at one time (see `live_activations`)."""
    return [max(curve, default=0) for curve in live_activations(schedule)]


Number = int | float | Fraction
PerStage = Number | Sequence[Number]


@dataclasses.dataclass(frozen=True)
class Costs:
    """The time of one action, in any unit; each a number, or one number per stage.

    Attributes:
        forward: F.
        backward_input: a B whose wgrad is left to a W.
        backward_weight: W. An undivided B takes the sum of both.
        latency: from the end of an action to the moment another rank can use its result.
    """

    forward: PerStage = 1
    backward_input: PerStage = 1
    backward_weight: PerStage = 1
    latency: Number = 0

    def divided(self, v: int) -> Costs:
        """The costs of one of v chunks, if these are the costs of a rank; the latency stays."""

        def part(cost: PerStage) -> Number:
            if isinstance(cost, Sequence):
                raise ConfigError("costs per stage are already costs of chunks", fix="divide the costs of a whole rank")
            return Fraction(cost) / v

        return Costs(part(self.forward), part(self.backward_input), part(self.backward_weight), self.latency)

    def of(self, schedule: Schedule, rank: int, action: Action) -> Number:
        """The time of this action of this rank."""
        stage = schedule.stage_of(rank, action.chunk)
        if action.kind == "F":
            return _at(self.forward, stage, schedule)
        if action.kind == "W":
            return _at(self.backward_weight, stage, schedule)
        split = schedule.is_split(action.microbatch, stage)
        return _at(self.backward_input, stage, schedule) + (0 if split else _at(self.backward_weight, stage, schedule))


@dataclasses.dataclass(frozen=True)
class TimedAction:
    """One action of one rank with its start and end; `live` is how many activations the rank holds meanwhile."""

    rank: int
    action: Action
    start: Number
    end: Number
    live: int


@dataclasses.dataclass(frozen=True)
class Simulation:
    """The timed actions of every rank, `[rank]` in order, and what follows from them."""

    schedule: Schedule
    spans: tuple[tuple[TimedAction, ...], ...]

    @property
    def makespan(self) -> Number:
        return max(row[-1].end for row in self.spans if row)

    @property
    def busy(self) -> list[Number]:
        """The time that each rank works."""
        return [sum((s.end - s.start for s in row), start=0) for row in self.spans]

    @property
    def bubbles(self) -> list[Number]:
        """For each rank, idle time / work, from the start of the first rank to the end of the last."""
        return [_ratio(self.makespan - busy, busy) for busy in self.busy]

    @property
    def bubble(self) -> Number:
        """Idle time / work of all ranks together."""
        work = sum(self.busy, start=0)
        return _ratio(self.schedule.p * self.makespan - work, work)

    @property
    def inner_bubbles(self) -> list[Number]:
        """For each rank, idle time / work between its own first and last action."""
        return [
            _ratio(row[-1].end - row[0].start - busy, busy) for row, busy in zip(self.spans, self.busy, strict=True)
        ]

    @property
    def peak_live(self) -> list[int]:
        """The most activations of a chunk that each rank holds."""
        return [max(s.live for s in row) for row in self.spans]

    def events(self, unit: float = 1.0) -> list[Event]:
        """The events that a run would emit if one unit of cost took `unit` seconds: named F, B or W; the note is `3` or
        `3.1`."""
        return [
            Event(
                s.action.kind, "compute", s.rank, float(s.start) * unit, float(s.end) * unit,
                note=self.schedule.label(s.action)[1:],
            )
            for row in self.spans
            for s in row
        ]  # fmt: skip


def simulate(schedule: Schedule, costs: Costs | None = None, *, checked: bool = False) -> Simulation:
    """Simulate the schedule.

    Args:
        costs: default: F, B and W take 1, so an undivided backward takes 2; messages take no time.
        checked: the schedule is known to run: it was generated, or has passed `schedule_check.check`.

    Raises:
        ConfigError: the schedule cannot run (the sentences of `schedule_check.check`), or costs per stage are not one
            per stage.
    """
    if not checked:
        require_runnable(schedule)
    costs = costs or Costs()
    live = live_activations(schedule)
    ends: dict[tuple[int, Action], Number] = {}
    rows: list[list[TimedAction]] = [[] for _ in range(schedule.p)]
    took: dict[tuple[str, int, bool], Number] = {}
    ready, waiting = list(range(schedule.p))[::-1], dict[tuple[int, Action], list[int]]()  # ranks; what they wait for
    while ready:
        rank = ready.pop()
        row, todo = rows[rank], schedule.actions[rank]
        while len(row) < len(todo):
            action = todo[len(row)]
            start = row[-1].end if row else 0
            for need in schedule.needs(rank, action):
                if need not in ends:
                    waiting.setdefault(need, []).append(rank)
                    break
                start = max(start, ends[need] + (costs.latency if need[0] != rank else 0))
            else:
                stage = schedule.stage_of(rank, action.chunk)
                key = action.kind, stage, schedule.is_split(action.microbatch, stage)
                if key not in took:
                    took[key] = costs.of(schedule, rank, action)
                end = start + took[key]
                row.append(TimedAction(rank, action, start, end, live[rank][len(row)]))
                ends[rank, action] = end
                ready += waiting.pop((rank, action), ())
                continue
            break
    return Simulation(schedule, tuple(map(tuple, rows)))


def _frees(schedule: Schedule, rank: int, action: Action) -> bool:
    if action.kind == "B":
        return not schedule.is_split(action.microbatch, schedule.stage_of(rank, action.chunk))
    return action.kind == "W"


def _at(cost: PerStage, stage: int, schedule: Schedule) -> Number:
    if not isinstance(cost, Sequence):
        return cost
    if len(cost) != schedule.stages:
        raise ConfigError(
            f"{len(cost)} costs for the {schedule.stages} stages of `{schedule.name}`",
            fix="give one number, or one per stage",
        )
    return cost[stage]


def _ratio(part: Number, whole: Number) -> Number:
    """A fraction if both numbers are exact."""
    if isinstance(part, float) or isinstance(whole, float):
        return part / whole
    return Fraction(part) / Fraction(whole)
