"""The time of a training step: rooflines for what a stage computes, links for what it sends, and the schedule
simulated.

The problem in a sentence: ranks wait for links, for memory and for each other, and the time of a step is not the sum of
the times of its parts.

One layer of each kind is run on fake tensors (`footprint/kinds`), with the operators that compute on a GPU. Its
operations and messages are then timed in the order in which they were issued:

    product       FLOPs / (peak * share) + bytes / (copy * share)            `Cluster.operation`
    memory        bytes / (copy * share)                                     norms, activations, the loss, AdamW
    message       bytes of a ring / link + steps * latency                   `Cluster.collective`; a link carries one
                                                                             message after the other, and the rank
                                                                             computes until it waits for the message
    launches      a pass of a layer takes at least calls * `Cluster.call`
    the passes    `parallel/pipeline/schedule_sim` simulates the list of actions that the executor runs
    the step      passes + gradients and weights that compute does not hide + the optimizer

With `overlap_grad_reduce` gradients travel during one backward pass, with `overlap_param_gather` weights during one
forward pass; nothing hides the last bucket. Messages of ZeRO-2 and -3 are sent in every microbatch and hide behind that
microbatch, gradients only with `overlap_grad_reduce`.

`StepTime.parts` is a waterfall: it begins with the time of the products at the peak, and adds each loss by name until
the time of the step.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from minimegatron.comm.mesh import Mesh, rank_groups
from minimegatron.config.parallel import SPLIT
from minimegatron.config.run import RunConfig
from minimegatron.config.stages import StagePlan, plan_stages
from minimegatron.footprint.dry_run import Run, Sizes
from minimegatron.footprint.kinds import kinds_of, run_of
from minimegatron.footprint.prediction import sizes_of
from minimegatron.footprint.recorder import (
    AGAIN,
    BACKWARD,
    FORWARD,
    WEIGHTS,
    Event,
    Message,
    Operation,
    Sent,
    Window,
    require_known,
)
from minimegatron.footprint.states import meta_model, meta_wrapper
from minimegatron.models.chunks import placement_of, schedule_of
from minimegatron.parallel.pipeline.schedule_sim import Costs, Simulation, simulate
from minimegatron.planner.cluster import Cluster
from minimegatron.planner.traffic import messages_around
from minimegatron.planner.update import update_messages, update_time
from minimegatron.training.flops import step_flops
from minimegatron.training.memory_report import spec_of, work_of_run

OF_AXIS = {"tp": "tp", "cp": "cp", "cp_inner": "cp", "cp_outer": "cp"}  # the others move rows of experts
PEAK, BELOW, MEMORY, RECOMPUTE = "products at the peak", "products below the peak", "memory", "recompute"
LAUNCHES = "launches"  # what a pass waits for the host, which asks for one operation after the other
KINDS = {  # class of a module -> what its operations are measured as on a CPU (`planner/measure`)
    "ColumnParallelLinear": "linear", "RowParallelLinear": "linear", "SelfAttention": "attention",
    "CoreAttention": "attention", "Norm": "norm", "MLP": "activation", "VocabParallelEmbedding": "table",
}  # fmt: skip
PLAYED = 4  # microbatches a rank of a pipeline that are played; a further one takes what the busiest rank needs


@dataclasses.dataclass(frozen=True)
class PassTime:
    """Seconds of one microbatch in one stage.

    Attributes:
        forward, backward: seconds of the two passes.
        weights: seconds of wgrad, a part of `backward` that a split schedule defers.
        parts: {part of the waterfall: seconds} of both passes.
        once: messages that only the first microbatch of a step sends, and how often.
    """

    forward: float
    backward: float
    weights: float
    parts: dict[str, float]
    once: Counter[Message] = dataclasses.field(default_factory=Counter)

    def extended(self, two: PassTime, b: int) -> PassTime:
        """Extrapolate to b samples, from this time of one sample and `two` of two."""
        names = self.parts.keys() | two.parts.keys()
        parts = {name: extended(self.parts.get(name, 0.0), two.parts.get(name, 0.0), b) for name in names}
        return PassTime(
            extended(self.forward, two.forward, b),
            extended(self.backward, two.backward, b),
            extended(self.weights, two.weights, b),
            parts,
        )


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The time of a step.

    Attributes:
        seconds: the time.
        parts: {name: seconds} of the busiest rank; they add up to `seconds`.
        model_flops: model FLOPs of all ranks, with half of attention's square.
        gpus, peak: the number of GPUs, and the peak FLOP/s of each.
    """

    seconds: float
    parts: dict[str, float]
    model_flops: float
    gpus: int
    peak: float

    @property
    def tflops(self) -> float:
        """Model TFLOP/s of each GPU."""
        return self.model_flops / self.seconds / self.gpus / 1e12

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: the share of the dense peak. Model FLOPs count half of attention's square and no
        recompute."""
        return self.tflops * 1e12 / self.peak


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

    def play(self, events: Iterable[tuple[str, Event]]) -> float:
        """Seconds of these events, pairs of (kind of module (`KINDS`), event); at least the time of their launches."""
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
        self._take(LAUNCHES, max(0.0, self._calls * self.cluster.call - self.now))
        return self.now

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

    def seconds(*phases: str) -> tuple[float, dict[str, float]]:
        clock = _Clock(mesh, cluster)
        events = ((_kind(run.windows[e.window]), e) for e in run.of_part(part) if e.phase in phases)
        return clock.play(events), clock.parts

    (forward, one), (backward, two), (weights, three) = seconds(FORWARD), seconds(BACKWARD, AGAIN), seconds(WEIGHTS)
    once = Counter({message: count for (where, message), count in run.once.items() if where == part})
    return PassTime(forward, backward + weights, weights, _sums([one, two, three]), once)


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


class Around(NamedTuple):
    """Time outside of the passes that compute does not hide: seconds of each microbatch, and {part of the waterfall:
    seconds}
    once a step."""

    each: float
    parts: dict[str, float]


def around(run: RunConfig, rank: int, world: int, cluster: Cluster, mine: PassTime) -> Around:
    """The `Around` of one rank, whose stages take `mine` for a microbatch."""
    work, parallel = work_of_run(run, world, cluster.device), run.parallel
    mesh, plan = Mesh.planned(parallel, rank, world), plan_stages(parallel, run.model.num_layers)
    ddp = meta_wrapper(meta_model(run.model, mesh, run.optimizer, spec_of(run)), mesh, run.optimizer)
    z = sizes_of(run.model, mesh, run.optimizer, work, spec_of(run))
    found: dict[str, list[float]] = {}
    few = min(work.microbatches, plan.ranks + work.microbatches % plan.ranks)  # each sends the same
    messages = messages_around(plan, ddp, z, few)
    messages.update({(message, "end of step"): count for message, count in mine.once.items()})
    for (message, part), count in messages.items():
        found.setdefault(part, []).extend([message_time(message, mesh, cluster)] * count)

    def left(hidden: float, *kinds: str, times: int = 1) -> float:
        """Seconds of messages that compute does not hide; nothing hides the last message."""
        seconds = [s for part in kinds for s in found.get(part, [])]
        total = sum(seconds) / times
        last = seconds[-1] if seconds else 0.0
        return min(total, last + max(0.0, total - last - hidden * cluster.overlaps))

    overlaps, updated = parallel.overlap_grad_reduce, update_time(ddp, run.optimizer, cluster.of("optimizer"))
    updated += (cluster.measured("optimizer") or (0.0,))[0]
    beside = ("weights on use", "shards") if overlaps else ("weights on use",)
    each = left(mine.forward + mine.backward, *beside, times=few) + left(0.0, "shards", times=few) * (not overlaps)
    once = {
        "gradients": left(mine.backward * overlaps, "gradients"),
        "weights": left(mine.forward * parallel.overlap_param_gather, "weights"),
        "optimizer": sum((message_time(m, mesh, cluster) for m in update_messages(ddp, run.optimizer)), updated),
        "end of step": left(0.0, "end of step"),
    }
    return Around(each, once)


def play(plan: StagePlan, z: Sizes, cluster: Cluster, stages: list[PassTime], m: int) -> tuple[float, int]:
    """(Seconds of all passes, the busiest rank)."""
    placement = placement_of(plan)
    busy = [sum(stages[s].forward + stages[s].backward for s in row) for row in placement]
    busiest = busy.index(max(busy))
    if plan.ranks == 1:
        return m * busy[0], 0

    def makespan(microbatches: int) -> float:
        return float(played(plan, z, cluster, stages, microbatches).makespan)

    p, grouped = plan.ranks, z.mesh.parallel.microbatch_group_size_per_virtual_pipeline_stage is not None
    few = PLAYED * p + m % p
    if m <= few or grouped:
        return makespan(m), busiest
    first = makespan(few)
    return first + (m - few) / p * (first - makespan(few - p)), busiest


def played(plan: StagePlan, z: Sizes, cluster: Cluster, stages: list[PassTime], m: int) -> Simulation:
    """The simulated schedule of m microbatches."""
    later = [s.weights * (plan.schedule in SPLIT) for s in stages]
    backward = [s.backward - weights for s, weights in zip(stages, later, strict=True)]
    costs = Costs([s.forward for s in stages], backward, later, cluster.message(z.stream, z.mesh.pp.ranks[:2]))
    return simulate(schedule_of(plan, z.mesh.parallel, m), costs, checked=True)


def as_asked(run: RunConfig, cluster: Cluster) -> Cluster:
    """The cluster for this run: a step that is recorded as a CUDA graph has no launch times."""
    return cluster if run.training.cuda_graph_impl == "none" else dataclasses.replace(cluster, call=0.0)


def stages_of_run(run: RunConfig, world: int, cluster: Cluster) -> tuple[StagePlan, Sizes, list[PassTime]]:
    """How the model is cut, a microbatch of the first rank, and the time of each stage."""
    plan, mesh = plan_stages(run.parallel, run.model.num_layers), Mesh.planned(run.parallel, 0, world)
    z = sizes_of(run.model, mesh, run.optimizer, work_of_run(run, world, cluster.device), spec_of(run))
    pieces = Pieces(z, as_asked(run, cluster), plan.schedule in SPLIT)
    return plan, z, [pieces.stage(plan, number) for number in range(len(plan.layers))]


def step_time(run: RunConfig, world: int, cluster: Cluster) -> StepTime:
    """The time of a step of a run on this cluster.

    Raises:
        ConfigError: the layout is not possible.
        Unpredicted: the time of an operation is not known.
    """
    require_known(not run.optimizer.freeze, "the time of a model with frozen parameters")
    work, ranks = work_of_run(run, world, cluster.device), rank_groups(run.parallel, world, "pp")[0]
    plan, z, stages = stages_of_run(run, world, cluster)
    placement, m = placement_of(plan), work.microbatches
    two = {0, plan.ranks - 1}
    ends = [around(run, ranks[r], world, cluster, added([stages[s] for s in placement[r]])) for r in two]
    slowest, each = max(ends, key=lambda end: sum(end.parts.values())), max(end.each for end in ends)
    later = [dataclasses.replace(s, backward=s.backward + each / plan.chunks) for s in stages]
    passes, busiest = play(plan, z, cluster, later, m)
    mine = added([stages[s] for s in placement[busiest]])
    parts = {name: m * seconds for name, seconds in mine.parts.items()}
    parts |= {"sharding": m * each} if each else {}
    parts["bubble"] = max(0.0, passes - sum(parts.values())) if plan.ranks > 1 else 0.0
    parts |= slowest.parts
    samples = m * work.micro_batch_size * run.parallel.data_parallel_size(world)
    flops = step_flops(run.model, samples, work.seq_length, spec=spec_of(run))
    return StepTime(sum(parts.values()), {n: s for n, s in parts.items() if s}, flops, world, cluster.matmul)
