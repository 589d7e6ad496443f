"""The time of a training step: the schedule simulated, and what is around the passes.

The problem in a sentence: ranks wait for each other, and the time of a step is not the sum of the times of its parts.

    the passes    `planner/pass_time` has the time of a microbatch in each stage; `parallel/pipeline/schedule_sim`
                  simulates the list of actions that the executor runs
    the step      passes + gradients and weights that compute does not hide + the optimizer

With `overlap_grad_reduce` gradients travel during one backward pass, with `overlap_param_gather` weights during one
forward pass; nothing hides the last bucket. Messages of ZeRO-2 and -3 are sent in every microbatch and hide behind that
microbatch, gradients only with `overlap_grad_reduce`.

`StepTime.parts` is a waterfall: it begins with the time of the products at the peak, and adds each loss by name until
the time of the step.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from minimegatron.comm.mesh import Mesh, rank_groups
from minimegatron.config.parallel import SPLIT
from minimegatron.config.run import RunConfig
from minimegatron.config.stages import StagePlan, plan_stages
from minimegatron.footprint.dry_run import Sizes
from minimegatron.footprint.events import require_known
from minimegatron.footprint.prediction import sizes_of
from minimegatron.footprint.states import planned_model
from minimegatron.models.chunks import placement_of, schedule_of
from minimegatron.parallel.pipeline.schedule_sim import Costs, Simulation, simulate
from minimegatron.planner.cluster import Cluster
from minimegatron.planner.pass_time import PassTime, Pieces, added, message_time
from minimegatron.planner.traffic import messages_around
from minimegatron.planner.update import update_messages, update_time
from minimegatron.training.flops import step_flops
from minimegatron.training.memory_report import spec_of, work_of_run

PLAYED = 4  # microbatches a rank of a pipeline that are played; a further one takes what the busiest rank needs


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


class Around(NamedTuple):
    """Time outside of the passes that compute does not hide: seconds of each microbatch, and once a step {part of the
    waterfall: seconds}."""

    each: float
    parts: dict[str, float]


def around(run: RunConfig, rank: int, world: int, cluster: Cluster, mine: PassTime) -> Around:
    """The `Around` of one rank, whose stages take `mine` for a microbatch."""
    work, parallel = work_of_run(run, world, cluster.device), run.parallel
    mesh, plan = Mesh.planned(parallel, rank, world), plan_stages(parallel, run.model.num_layers)
    ddp = planned_model(run.model, mesh, run.optimizer, spec_of(run))
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
