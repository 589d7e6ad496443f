"""The time of a training step: rooflines of what a stage computes, links of what it sends, and the schedule played.

The problem in a sentence: ranks wait for links, for memory and for each other, and the sum of what each does is not the
time that all take.

    product       FLOPs / (peak * share) + bytes / (copy * share)            `Cluster.product`
    memory        bytes / (copy * share)                                     norms, activations, the loss, AdamW
    message       what a ring sends / link + steps * latency                 `Cluster.collective`
    F, B, W       sums of a stage's operations; what travels beside a product counts where it takes longer
    launches      no pass of a layer is faster than the host asks for its operations: calls * `Cluster.call`
    the passes    `parallel/pipeline/schedule_sim` plays the list of actions that the executor runs
    the step      passes + gradients and weights that nothing hides + the optimizer

Gradients with `overlap_grad_reduce` travel during one backward pass, weights with `overlap_param_gather` during one
forward pass; the last bucket has nothing to hide behind. What ZeRO-2 and -3 send in every microbatch hides behind that
microbatch, gradients only with `overlap_grad_reduce`.

`StepTime.parts` is a waterfall: from what the model's FLOPs take at the peak to the step, each loss with its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from minimegatron.comm.mesh import Mesh, rank_groups
from minimegatron.config import TransformerConfig
from minimegatron.config.parallel import SPLIT, StagePlan, plan_stages
from minimegatron.config.run import RunConfig
from minimegatron.footprint.dry_run import Sizes, kinds_of, require_known
from minimegatron.footprint.prediction import Work, meta_model, meta_wrapper, sizes_of
from minimegatron.models.chunks import placement_of, schedule_of
from minimegatron.models.decoder import GPTModel
from minimegatron.models.spec import ModuleSpec
from minimegatron.parallel.pipeline.schedule_sim import Costs, Simulation, simulate
from minimegatron.planner.cluster import Cluster
from minimegatron.planner.stages import again, ends_work, layer_work
from minimegatron.planner.traffic import step_messages
from minimegatron.planner.update import update_messages, update_time
from minimegatron.planner.work import BACK, Message, Op, Product
from minimegatron.training.flops import step_flops
from minimegatron.training.memory_report import spec_of, work_of_run

FLASH_AGAIN = 0.5  # of a forward pass: attention that keeps no weights computes the scores once more on the way back
OF_AXIS = {"tp": "tp", "cp": "cp", "cp_inner": "cp", "cp_outer": "cp"}  # the others move rows of experts
PEAK, BELOW, MEMORY, AGAIN = "products at the peak", "products below the peak", "memory", "recompute"
LAUNCHES = "launches"  # what a pass waits for the host, which asks for one operation after the other
PLAYED = 4  # microbatches a rank of a pipeline that are played; a further one takes what the busiest rank needs


@dataclasses.dataclass(frozen=True)
class PassTime:
    """Seconds of one microbatch in one stage.

    Attributes:
        forward, backward: of the passes.
        weights: of the backward pass, products that a split one puts off.
        parts: {part of the waterfall: seconds} of both.
    """

    forward: float
    backward: float
    weights: float
    parts: dict[str, float]


@dataclasses.dataclass(frozen=True)
class StepTime:
    """A step.

    Attributes:
        seconds: of it.
        parts: {name: seconds} of the busiest rank, which add up to it.
        model_flops: of all ranks, with half of attention's square.
        gpus, peak: how many there are, and FLOP/s of each.
    """

    seconds: float
    parts: dict[str, float]
    model_flops: float
    gpus: int
    peak: float

    @property
    def tflops(self) -> float:
        """Model FLOPs a second and GPU, in TFLOP/s."""
        return self.model_flops / self.seconds / self.gpus / 1e12

    @property
    def mfu(self) -> float:
        """Share of the dense peak; model FLOPs count half of attention's square and no recompute."""
        return self.tflops * 1e12 / self.peak


class _Watch:
    """Adds up seconds by part."""

    def __init__(self, z: Sizes, cluster: Cluster) -> None:
        self.z, self.cluster, self.parts, self.calls = z, cluster, dict[str, float](), 0

    def _add(self, part: str, seconds: float) -> float:
        if seconds:
            self.parts[part] = self.parts.get(part, 0.0) + seconds
        return seconds

    def product(self, op: Op, backward: bool = False) -> float:
        """Seconds of the products of a pass; of one that is computed backward twice, once."""
        products = op.products(False) if op.passes is None else op.products(backward)
        return sum(self._seconds(p) for p in products)

    def _seconds(self, p: Product) -> float:
        require_known(p.unit != "fp8" or self.cluster.fp8 > 0, f"FP8 products of {self.cluster.gpu}")
        return self.cluster.product(p.flops, p.nbytes, p.unit)

    def run(self, op: Op, backward: bool, again: bool = False) -> float:
        """An operation of a pass, with what it sends."""
        messages = [m for m in op.messages if m.backward == backward]
        self.calls += calls_of(op, backward) + len(messages)
        flash = op.product is not None and op.product.unit == "flash"
        times = 2 + FLASH_AGAIN * flash if backward and op.passes is None else 1
        product, back = times * self.product(op, backward), BACK * op.moved if op.moved_back is None else op.moved_back
        moved = self.cluster.moved(back if backward else op.moved)
        if again:
            self._add(AGAIN, product + moved)
        elif product:
            products = op.products(backward) if op.passes is not None else op.products(False)
            ideal = times * sum(
                p.flops / (self.cluster.fp8 if p.unit == "fp8" else self.cluster.matmul) for p in products
            )
            self._add(PEAK, ideal)
            self._add(BELOW, product - ideal)
        self._add(MEMORY, 0.0 if again else moved)
        return product + moved + self._send(messages, product)

    def asked(self, seconds: float) -> float:
        """A pass that takes the device so many seconds: as long as the host needs to ask for it, at least."""
        calls, self.calls = self.calls, 0
        return seconds + self._add(LAUNCHES, max(0.0, calls * self.cluster.call - seconds))

    def _send(self, messages: Sequence[Message], product: float) -> float:
        """What travels beside the product counts where it takes longer."""
        total = 0.0
        for beside in (False, True):
            some = [m for m in messages if m.beside == beside]
            seconds = sum(message_time(m, self.z.mesh, self.cluster) for m in some)
            if some:
                left = max(0.0, seconds - product) if beside and self.cluster.overlaps else seconds
                total += self._add(OF_AXIS.get(some[0].axis, "experts"), left)
        return total


class _Measured(_Watch):
    """The same where operations were measured by themselves: each has its own rates, and a price of each call."""

    def product(self, op: Op, backward: bool = False) -> float:
        with self._rates_of(op):
            return super().product(op, backward)

    def run(self, op: Op, backward: bool, again: bool = False) -> float:
        if (seconds := self.cluster.measured(_kind(op))) is None:
            return super().run(op, backward, again)
        calls = seconds[0] * calls_of(op, backward)
        with self._rates_of(op):
            return self._add(AGAIN if again else MEMORY, calls) + super().run(op, backward, again)

    @contextlib.contextmanager
    def _rates_of(self, op: Op) -> Iterator[None]:
        whole, self.cluster = self.cluster, self.cluster.of(_kind(op))
        yield
        self.cluster = whole


def calls_of(op: Op, backward: bool) -> int:
    """How often the host asks for something: backward once for the input of a product and once for its weight."""
    if op.calls is not None:
        return op.calls[backward]
    return 2 if backward and op.product is not None else 1


def _kind(op: Op) -> str:
    """What its times are kept under; a product with a weight is the same in all modules."""
    return "linear" if op.product is not None and op.weights else op.kind or op.what


def message_time(message: Message, mesh: Mesh, cluster: Cluster) -> float:
    """Of one communication of this rank."""
    return cluster.collective(message.name, message.nbytes, mesh.axis(message.axis).ranks)


def pass_time(ops: Iterable[Op], repeated: Iterable[Op], z: Sizes, cluster: Cluster) -> PassTime:
    """One microbatch through these operations, some of which the backward pass repeats."""
    watch, ops = (_Measured if cluster.operations else _Watch)(z, cluster), list(ops)
    forward = watch.asked(sum(watch.run(op, False) for op in ops))
    backward = sum(watch.run(op, True) for op in ops) + sum(watch.run(op, False, True) for op in repeated)
    backward = watch.asked(backward)
    return PassTime(forward, backward, sum(watch.product(op) for op in ops if op.weights), watch.parts)


class Pieces:
    """What stages are made of: both ends of the model, and one layer of each kind.

    Args:
        z: a microbatch of this layout.
        cluster: whose rates and links.
        model: with one layer of each kind (`one_of_each`).
    """

    def __init__(self, z: Sizes, cluster: Cluster, model: GPTModel) -> None:
        self.z, self._cluster = z, cluster
        first, last, repeated = ends_work(model, z)
        self.first, self.last = pass_time(first, (), z, cluster), pass_time(last, repeated, z, cluster)
        self._kinds = layer_kinds(z.config, z.spec)
        self._layers = {
            int(number): [self._layer(layer, int(number), whole) for whole in (False, True)]
            for number, layer in model.decoder.layers.items()
        }

    def _layer(self, layer: nn.Module, number: int, whole: bool) -> PassTime:
        ops, repeated = layer_work(layer, number, self.z)
        return pass_time(ops, again(ops, False) if whole else repeated, self.z, self._cluster)

    def stage(self, plan: StagePlan, number: int) -> PassTime:
        """One stage of a cut model."""
        config, layers = self.z.config, plan.layers[number]
        full, block = config.recompute_granularity == "full", config.recompute_method == "block"
        parts = [
            self._layers[self._kinds[n]][full and (not block or i < config.recompute_num_layers)]
            for i, n in enumerate(layers)
        ]
        parts += [self.first] * (number == 0) + [self.last] * (number == len(plan.layers) - 1)
        return added(parts)


def added(parts: Sequence[PassTime]) -> PassTime:
    """One after the other."""
    names = dict.fromkeys(name for part in parts for name in part.parts)
    return PassTime(
        sum(part.forward for part in parts),
        sum(part.backward for part in parts),
        sum(part.weights for part in parts),
        {name: sum(part.parts.get(name, 0.0) for part in parts) for name in names},
    )


def layer_kinds(config: TransformerConfig, spec: ModuleSpec | None = None) -> tuple[int, ...]:
    """For each layer the number of the first one that is like it, whatever is recomputed."""
    return kinds_of(config.replace(recompute_granularity=None), spec)


def one_of_each(config: TransformerConfig, mesh: Mesh, spec: ModuleSpec | None = None) -> GPTModel:
    """The model with one layer of each kind, shapes without memory."""
    with torch.device("meta"):
        return GPTModel(config, mesh, spec, layer_numbers=sorted(set(layer_kinds(config, spec))))


class Around(NamedTuple):
    """What nothing hides besides the passes: seconds a microbatch, and {part of the waterfall: seconds} once a step."""

    each: float
    parts: dict[str, float]


def around(run: RunConfig, rank: int, world: int, cluster: Cluster, mine: PassTime) -> Around:
    """Of one rank, whose stages take `mine` for a microbatch."""
    work, parallel = work_of_run(run, world, "cuda"), run.parallel
    mesh, plan = Mesh.planned(parallel, rank, world), plan_stages(parallel, run.model.num_layers)
    ddp = meta_wrapper(meta_model(run.model, mesh, run.optimizer, spec_of(run)), mesh, run.optimizer)
    z = sizes_of(run.model, mesh, run.optimizer, work, spec_of(run))
    found: dict[str, list[float]] = {}
    few = min(work.microbatches, plan.ranks + work.microbatches % plan.ranks)  # each sends the same
    for (message, part), count in step_messages(plan, ddp, z, few).items():
        if part not in ("forward", "backward", "pipeline"):
            found.setdefault(part, []).extend([message_time(message, mesh, cluster)] * count)

    def left(hidden: float, *kinds: str, times: int = 1) -> float:
        """Seconds that are not hidden; the last message has nothing to hide behind."""
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
    """(Seconds of all passes, the rank that works longest)."""
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
    """The schedule of m microbatches."""
    later = [s.weights * (plan.schedule in SPLIT) for s in stages]
    backward = [s.backward - weights for s, weights in zip(stages, later, strict=True)]
    costs = Costs([s.forward for s in stages], backward, later, cluster.message(z.stream, z.mesh.pp.ranks[:2]))
    return simulate(schedule_of(plan, z.mesh.parallel, m), costs, checked=True)


def as_asked(run: RunConfig, cluster: Cluster) -> Cluster:
    """The cluster as a run finds it: a step that was recorded as a CUDA graph is asked for at once."""
    return cluster if run.training.cuda_graph_impl == "none" else dataclasses.replace(cluster, call=0.0)


def stages_of_run(run: RunConfig, world: int, cluster: Cluster) -> tuple[StagePlan, Sizes, list[PassTime]]:
    """Where the model is cut, a microbatch of the first rank, and the seconds of each stage."""
    plan, mesh = plan_stages(run.parallel, run.model.num_layers), Mesh.planned(run.parallel, 0, world)
    z = sizes_of(run.model, mesh, run.optimizer, work_of_run(run, world, "cuda"), spec_of(run))
    pieces = Pieces(z, as_asked(run, cluster), one_of_each(run.model, mesh, z.spec))
    return plan, z, [pieces.stage(plan, number) for number in range(len(plan.layers))]


def sample_flops(run: RunConfig) -> float:
    """Model FLOPs of a sample, forward and backward: what modules multiply, or have multiplied in a run."""
    mesh, spec, config = Mesh.serial(), spec_of(run), run.model.replace(recompute_granularity=None)
    z = sizes_of(config, mesh, run.optimizer, Work(run.data.seq_length, device="cuda"), spec)
    model, kinds = one_of_each(config, mesh, spec), layer_kinds(config, spec)
    first, last, _ = ends_work(model, z)
    of_kind = {int(n): layer_work(layer, int(n), z)[0] for n, layer in model.decoder.layers.items()}
    ops = [*first, *last, *(op for kind in kinds for op in of_kind[kind])]
    return 3.0 * sum(product.flops for op in ops for product in op.products(False))


def step_time(run: RunConfig, world: int, cluster: Cluster) -> StepTime:
    """A step of a run on GPUs of this cluster.

    Raises:
        ConfigError: the layout cannot be.
        Unpredicted: an operation's time is not known.
    """
    require_known(not run.model.first_last_layers_bf16, "the time of layers in two precisions")
    require_known(run.model.attn_logit_softcapping is None, "the time of capped attention scores")
    require_known(run.model.window_attn_skip_freq is None, "the time of layers with different windows")
    require_known(not run.optimizer.freeze, "the time of a model with frozen parameters")
    work, ranks = work_of_run(run, world, "cuda"), rank_groups(run.parallel, world, "pp")[0]
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
    flops = step_flops(run.model, samples, work.seq_length) if run.spec is None else samples * sample_flops(run)
    return StepTime(sum(parts.values()), {n: s for n, s in parts.items() if s}, flops, world, cluster.matmul)
