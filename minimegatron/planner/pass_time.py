"""The time of a microbatch in a stage: rooflines for what the stage computes, links for what it sends.

The problem in a sentence: a rank waits for its link and for its memory, and a pass takes longer than its FLOPs at the
peak.

One layer of each kind is run on fake tensors (`footprint/kinds`), with the operators that compute on a GPU. Its
operations and messages are then timed in the order in which they were issued:

    product       FLOPs / (peak * share) + bytes / (copy * share)            `Cluster.operation`
    memory        bytes / (copy * share)                                     norms, activations, the loss, AdamW
    message       bytes of a ring / link + steps * latency                   `Cluster.collective`; a link carries one
                                                                             message after the other, and the rank
                                                                             computes until it waits for the message
    launches      a pass of a layer takes at least calls * `Cluster.call`

A stage is a sum of such pieces (`Pieces`): its layers, and the ends of the model that it has.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from minimegatron.comm.mesh import Mesh
from minimegatron.config.stages import StagePlan
from minimegatron.footprint.dry_run import Run, Sizes
from minimegatron.footprint.events import AGAIN, BACKWARD, FORWARD, WEIGHTS, Event, Message, Operation, Sent, Window
from minimegatron.footprint.kinds import kinds_of, run_of
from minimegatron.planner.cluster import Cluster

OF_AXIS = {"tp": "tp", "cp": "cp", "cp_inner": "cp", "cp_outer": "cp"}  # the others move rows of experts
PEAK, BELOW, MEMORY, RECOMPUTE = "products at the peak", "products below the peak", "memory", "recompute"
LAUNCHES = "launches"  # what a pass waits for the host, which asks for one operation after the other
KINDS = {  # class of a module -> what its operations are measured as on a CPU (`planner/measure`)
    "ColumnParallelLinear": "linear", "RowParallelLinear": "linear", "SelfAttention": "attention",
    "CoreAttention": "attention", "Norm": "norm", "MLP": "activation", "VocabParallelEmbedding": "table",
}  # fmt: skip


class Phase(NamedTuple):
    """One phase of a microbatch in one part of a stage: forward, backward, or wgrad.

    Attributes:
        busy: seconds that the rank computes and waits for messages.
        launches: seconds that the host needs to ask for all of it.
        parts: {part of the waterfall: seconds}; they add up to `busy`.
    """

    busy: float
    launches: float
    parts: dict[str, float]

    @property
    def seconds(self) -> float:
        """The time of the phase: the rank waits for the host, or the host for the rank."""
        return max(self.busy, self.launches)

    def extended(self, two: Phase, b: int) -> Phase:
        """Extrapolate to b samples, from this phase of one sample and `two` of two.

        Several samples need as many launches as two; one needs fewer copies.
        """
        names = self.parts.keys() | two.parts.keys()
        parts = {name: extended(self.parts.get(name, 0.0), two.parts.get(name, 0.0), b) for name in names}
        return Phase(extended(self.busy, two.busy, b), two.launches, parts)


@dataclasses.dataclass(frozen=True)
class PassTime:
    """Seconds of one microbatch in one stage.

    Attributes:
        forward, backward: seconds of the two passes.
        weights: seconds of wgrad, a part of `backward` that a split schedule defers.
        parts: {part of the waterfall: seconds} of both passes.
        once: messages that only the first microbatch of a step sends, and how often.
        phases: forward, backward without wgrad, wgrad; () where the times are a sum of several parts.
    """

    forward: float
    backward: float
    weights: float
    parts: dict[str, float]
    once: Counter[Message] = dataclasses.field(default_factory=Counter)
    phases: tuple[Phase, ...] = ()

    @classmethod
    def of_phases(cls, phases: Sequence[Phase], once: Counter[Message]) -> PassTime:
        """The time of one part of a stage."""
        forward, backward, weights = (phase.seconds for phase in phases)
        waits = [{LAUNCHES: phase.seconds - phase.busy} for phase in phases if phase.seconds > phase.busy]
        parts = _sums([*(phase.parts for phase in phases), *waits])
        return cls(forward, backward + weights, weights, parts, once, tuple(phases))

    def extended(self, two: PassTime, b: int) -> PassTime:
        """Extrapolate to b samples, from this time of one sample and `two` of two.

        What the rank does is linear in the micro-batch size. The time is not: small micro-batches take as long as the
        host needs to launch them, whatever their size.
        """
        phases = [one.extended(other, b) for one, other in zip(self.phases, two.phases, strict=True)]
        return PassTime.of_phases(phases, self.once)


class _Clock:
    """Simulates a pass: a rank that computes, and a link that carries one message after the other.

    Args:
        mesh, cluster: the axes, rates and links.

    Attributes:
        now: seconds since the pass began.
        parts: {part of the waterfall: seconds} so far.
    """

    def __init__(self, mesh: Mesh, cluster: Cluster) -> None:
        self.mesh, self.cluster, self.now, self.parts = mesh, cluster, 0.0, dict[str, float]()
        self._calls, self._link = 0, 0.0
        self._arrives = dict[Sent, float]()

    def _take(self, part: str, seconds: float) -> None:
        """Advance the clock."""
        if seconds:
            self.now += seconds
            self.parts[part] = self.parts.get(part, 0.0) + seconds

    def play(self, events: Iterable[tuple[str, Event]]) -> Phase:
        """The phase of these events, pairs of (kind of module (`KINDS`), event)."""
        for kind, (_, phase, what) in events:
            if isinstance(what, Operation):
                self._calls += 1
                self._compute(what, kind, phase == AGAIN)
            elif isinstance(what, Sent):
                self._calls += 1
                self._link = max(self._link, self.now) + message_time(what.message, self.mesh, self.cluster)
                self._arrives[what] = self._link
                if not self.cluster.overlaps:
                    self._wait(what)
            elif what.sent in self._arrives:
                self._wait(what.sent)
        return Phase(self.now, self._calls * self.cluster.call, self.parts)

    def _wait(self, sent: Sent) -> None:
        late = self._arrives.pop(sent) - self.now
        self._take(OF_AXIS.get(sent.message.axis, "experts"), max(0.0, late))

    def _compute(self, operation: Operation, kind: str, again: bool) -> None:
        seconds = self.cluster.operation(operation, kind)
        if again:
            self._take(RECOMPUTE, seconds)
        elif operation.flops:
            ideal = operation.flops / (self.cluster.fp8 if operation.unit == "fp8" else self.cluster.matmul)
            self._take(PEAK, ideal)
            self._take(BELOW, seconds - ideal)
        else:
            self._take(MEMORY, seconds)


def message_time(message: Message, mesh: Mesh, cluster: Cluster) -> float:
    """Seconds of one communication of this rank."""
    return cluster.collective(message.name, message.nbytes, mesh.axis(message.axis).ranks)


def pass_time(run: Run, part: int, mesh: Mesh, cluster: Cluster) -> PassTime:
    """The time of one microbatch through one part of a stage that has been run."""

    def phase(*names: str) -> Phase:
        events = ((_kind(run.windows[e.window]), e) for e in run.of_part(part) if e.phase in names)
        return _Clock(mesh, cluster).play(events)

    once = Counter({message: count for (where, message), count in run.once.items() if where == part})
    return PassTime.of_phases([phase(FORWARD), phase(BACKWARD, AGAIN), phase(WEIGHTS)], once)


def _kind(window: Window) -> str:
    """The kind under which operations of this window are measured; operations of the stage itself count as the loss."""
    return KINDS.get(window.kind, "") if window.name else "loss"


def _sums(tables: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for table in tables for name in table)
    return {name: sum(table.get(name, 0.0) for table in tables) for name in names}


class Pieces:
    """The times of the pieces of a stage: both ends of the model, and one layer of each kind.

    Args:
        z: a microbatch of this layout.
        cluster: rates and links.
        splits: wgrad is deferred.
    """

    def __init__(self, z: Sizes, cluster: Cluster, splits: bool = False) -> None:
        self.config, self.kinds = z.config, kinds_of(z.config, z.spec)
        numbers = sorted(set(self.kinds))
        again = self.config.recompute_granularity == "full"
        runs = {again: pieces_run(z, again, splits)}
        if again and self.config.recompute_method == "block":
            runs[False] = pieces_run(z, False, splits)
        self.first, self.last = (pass_time(runs[again], part, z.mesh, cluster) for part in (0, len(numbers) + 1))
        self._layers = {
            (number, whole): pass_time(run, part, z.mesh, cluster)
            for whole, run in runs.items()
            for part, number in enumerate(numbers, 1)
        }

    def extended(self, two: Pieces, b: int) -> Pieces:
        """Extrapolate to b samples, from these pieces of one sample and `two` of two."""
        found = copy.copy(self)
        found.first, found.last = self.first.extended(two.first, b), self.last.extended(two.last, b)
        found._layers = {key: time.extended(two._layers[key], b) for key, time in self._layers.items()}
        return found

    def stage(self, plan: StagePlan, number: int) -> PassTime:
        """The time of one stage of a cut model."""
        return added(self._parts(plan, number))

    def seconds(self, plan: StagePlan, number: int) -> float:
        """Seconds of a microbatch in one stage, forward and backward."""
        parts = self._parts(plan, number)
        return sum(part.forward for part in parts) + sum(part.backward for part in parts)

    def _parts(self, plan: StagePlan, number: int) -> list[PassTime]:
        """The times of the stage's pieces: its layers, then the ends of the model that it has."""
        layers, full = plan.layers[number], self.config.recompute_granularity == "full"
        some = self.config.recompute_num_layers if self.config.recompute_method == "block" else len(layers)
        parts = [self._layers[self.kinds[n], full and i < some] for i, n in enumerate(layers)]
        return parts + [self.first] * (number == 0) + [self.last] * (number == len(plan.layers) - 1)


def extended(one: Any, two: Any, b: int) -> Any:
    """Extrapolate a number that is linear in the micro-batch size, from its values for one sample and for two."""
    return one + (two - one) * (b - 1)


def pieces_run(z: Sizes, again: bool, splits: bool = False) -> Run:
    """Run one layer of each kind between both ends of the model; each layer is recomputed by itself, or none is."""
    numbers, config = sorted(set(kinds_of(z.config, z.spec))), z.config
    if config.recompute_granularity == "full":
        several = 1 if config.recompute_method == "uniform" else len(numbers)
        config = config.replace(recompute_num_layers=several) if again else config.replace(recompute_granularity=None)
    z = dataclasses.replace(z, config=config)
    return run_of(z, [(n,) for n in numbers], tuple((again, (n,)) for n in numbers), True, True, splits)


def added(parts: Sequence[PassTime]) -> PassTime:
    """The time of several parts one after the other."""
    return PassTime(
        sum(part.forward for part in parts),
        sum(part.backward for part in parts),
        sum(part.weights for part in parts),
        _sums([part.parts for part in parts]),
        sum((part.once for part in parts), Counter()),
    )
