"""All layouts of a run on a number of GPUs, pruned by memory, ranked by time.

The problem in a sentence: tp, cp, pp, its chunks and schedule, ep, etp, the micro-batch, recompute and ZeRO make
thousands of layouts of 4,096 GPUs, and a plan of one takes a second.

So every layout (`layouts`) is estimated in a millisecond (`Estimator`). The layouts with the fastest estimates are
planned (`planning`); the plans decide which of them fit, and rank them.

An estimate is a sum of pieces. One layer of each kind and both ends of the model are run once for each tp, cp, ep, etp,
recompute and micro-batch (`pass_time.pieces_run`); their bytes and seconds add up to those of a stage. An estimate
leaves out the padding of buckets, the edges of the schedule and differences between stages. In
`tests/planner/test_search` estimates are within 18 % of the plans in bytes and within 25 % in seconds.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from typing import Any

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.config.parallel import SPLIT, V_SHAPED
from minimegatron.config.run import RunConfig
from minimegatron.config.stages import StagePlan, plan_stages
from minimegatron.errors import ConfigError, require
from minimegatron.footprint.dry_run import Sizes, Step, Tape
from minimegatron.footprint.kinds import kinds_of, one_of_each
from minimegatron.footprint.prediction import Work, sizes_of
from minimegatron.footprint.states import meta_wrapper, states
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.parallel.data.buckets import DEFAULT_BUCKET_SIZE
from minimegatron.parallel.pipeline.schedules import build_schedule
from minimegatron.planner.closed_forms import bubble
from minimegatron.planner.cluster import Cluster
from minimegatron.planner.layouts import Layout, layouts
from minimegatron.planner.pass_time import Pieces, extended, pieces_run
from minimegatron.planner.planning import RECOMPUTE, Plan, plan
from minimegatron.planner.timing import as_asked
from minimegatron.planner.update import update_time
from minimegatron.training.memory_report import spec_of
from minimegatron.training.model_class import has_documents

SPLIT_BUBBLE = {"zb_h1": 3, "zb_v": 6}  # (p-1)/(3m), (p-1)/(6m): `parallel/pipeline/schedules`


class Estimator:
    """Estimates bytes and seconds of layouts from pieces.

    Args:
        base: the run; the layouts are changes of it.
        world: the number of GPUs.
        cluster: the GPUs and links.
    """

    def __init__(self, base: RunConfig, world: int, cluster: Cluster) -> None:
        self.base, self.world, self.cluster = base, world, as_asked(base, cluster)
        self.spec, self.kinds = spec_of(base), kinds_of(base.model, spec_of(base))
        self._bytes, self._update = self._of_an_element()
        self.pieces = functools.cache(self._pieces)
        self.model = functools.cache(self._model)
        self.live = functools.cache(self._live)
        self.cut = functools.cache(self._cut)

    def _of_an_element(self) -> tuple[tuple[float, float, float], float]:
        """For each parameter: bytes of the weight, of its gradient and of optimizer state on the GPU; seconds of its
        update."""
        mesh = Mesh.serial()
        model = one_of_each(self.base.model.replace(recompute_granularity=None), mesh, self.spec)
        ddp = meta_wrapper(model, mesh, self.base.optimizer)
        held, seconds = states(ddp, self.base.optimizer), update_time(ddp, self.base.optimizer, self.cluster)
        count = sum(p.numel() for p in model.parameters())
        state = sum(n for owner, n in held.items() if owner in ("main parameters", "moments"))
        return (held["parameters"] / count, held["gradients"] / count, state / count), seconds / count

    def _model(self, tp: int, cp: int, ep: int, etp: int) -> tuple[Mesh, Any, dict[str, tuple[int, int]]]:
        """The model without a pipeline, its mesh, and {number of a layer, first, last: elements outside of experts, of
        experts}."""
        parallel = ParallelConfig(
            tensor_model_parallel_size=tp, sequence_parallel=tp > 1, context_parallel_size=cp,
            cp_comm_type=self.base.parallel.cp_comm_type, expert_model_parallel_size=ep,
            expert_tensor_parallel_size=etp, order=self.base.parallel.order,
        )  # fmt: skip
        mesh = Mesh.planned(parallel, 0, self.world)
        model = one_of_each(self.base.model.replace(recompute_granularity=None), mesh, self.spec)
        counts: dict[str, tuple[int, int]] = {}
        for name, param in logical_parameters(model):
            words = name.split(".")
            part = words[2] if words[:2] == ["decoder", "layers"] else "first" if words[0] == "embedding" else "last"
            dense, experts = counts.get(part, (0, 0))
            of_expert = layout_of(param).experts is not None
            counts[part] = (dense + param.numel() * (not of_expert), experts + param.numel() * of_expert)
        return mesh, model, counts

    def _sizes(self, *place: int | str) -> Sizes:
        """The `Sizes` of a microbatch; `place` is tp, cp, ep, etp, micro-batch, recompute."""
        *axes, b, recompute = place
        config = self.base.model
        if "recompute_granularity" not in self.base.given:
            config = config.replace(**RECOMPUTE[str(recompute)])
        work = Work(self.base.data.seq_length, int(b), 1, has_documents(self.base), self.cluster.device)
        return sizes_of(config, self.model(*axes)[0], self.base.optimizer, work, self.spec)

    def _pieces(self, splits: bool, *place: int | str) -> tuple[Pieces, dict[int, Tape], tuple[Tape, Tape]]:
        """Seconds of layers and of both ends; tapes of layers, and of both ends.

        Micro-batches of one and two samples are run; larger ones are extrapolated. `splits`: wgrad is deferred.
        """
        *axes, b, recompute = place
        if int(b) > 2:
            (one, each, ends), (two, others, more) = (self.pieces(splits, *axes, n, recompute) for n in (1, 2))
            layers = {kind: _extended(tape, others[kind], int(b)) for kind, tape in each.items()}
            first, last = (_extended(x, y, int(b)) for x, y in zip(ends, more, strict=True))
            return one.extended(two, int(b)), layers, (first, last)
        z = self._sizes(*place)
        first, *tapes, last = pieces_run(z, z.config.recompute_granularity == "full", splits).tapes
        kinds = sorted(set(self.kinds))
        return Pieces(z, self.cluster, splits), dict(zip(kinds, tapes, strict=True)), (first, last)

    def _live(self, schedule: str, p: int, m: int, v: int, rank: int) -> list[tuple[int, ...]]:
        """How many microbatches wait on a rank, before and after each of its backward passes; the largest counts alone.

        Returns:
            Those that wait for their backward pass: in all chunks of the rank, in the first stage of the model, in the
            last besides one; those that wait for wgrad alone: in all chunks, in the first stage, in the last; and
            whether the loss is next.
        """
        built = build_schedule(schedule, p, m, v)
        backward, wgrad, moments = [0, 0, 0], [0, 0, 0], set[tuple[int, ...]]()

        def note(loss: bool) -> None:
            moments.add((*backward[:2], max(0, backward[2] - 1), *wgrad, loss))

        for action in built.actions[rank]:
            stage = built.stage_of(rank, action.chunk)
            last = stage == p * v - 1
            if action.kind == "B":
                note(last)
            for i, here in enumerate((True, stage == 0, last)):
                backward[i] += here * {"F": 1, "B": -1, "W": 0}[action.kind]
                wgrad[i] += here * {"F": 0, "B": built.is_split(action.microbatch, stage), "W": -1}[action.kind]
            if action.kind == "B":
                note(False)
        found: list[tuple[int, ...]] = []
        for counts in sorted(moments, key=sum, reverse=True):
            if not any(all(n <= most for n, most in zip(counts, other, strict=True)) for other in found):
                found.append(counts)
        return found

    def _cut(self, pp: int, fields: tuple[tuple[str, Any], ...]) -> StagePlan:
        cut = ParallelConfig(pipeline_model_parallel_size=pp, **dict(fields))
        return plan_stages(cut, self.base.model.num_layers)

    def estimate(self, layout: Layout) -> tuple[float, float]:
        """(Bytes of the fullest rank, seconds of a step).

        Raises:
            ConfigError: the layers cannot be cut into these stages.
        """
        ranks = [self._rank(layout, rank) for rank in {0, layout.pp - 1}]
        busy, m = max(seconds for _, seconds, _ in ranks), self._microbatches(layout)
        idle = float(bubble(layout.pp, m, 1 if layout.schedule in SPLIT_BUBBLE else layout.v))
        idle /= SPLIT_BUBBLE.get(layout.schedule, 1)
        elements = max((held for _, _, held in ranks), key=sum)
        inside = min(seconds for _, seconds, _ in ranks)  # of a stage without an end, nearly; they make the bubble
        seconds = m * (busy + idle * inside) + self._around(layout, elements, busy, m)
        return max(nbytes for nbytes, _, _ in ranks), seconds

    def _microbatches(self, layout: Layout) -> int:
        batch = self.base.training.global_batch_size
        assert batch is not None, "a search needs one"
        return batch * layout.tp * layout.cp * layout.pp // self.world // layout.micro_batch

    def _rank(self, layout: Layout, rank: int) -> tuple[float, float, tuple[int, int]]:
        """(Bytes, seconds of a microbatch, elements outside of experts and of experts) of a pipeline rank."""
        axes = layout.tp, layout.cp, layout.ep, layout.etp
        _, model, counts = self.model(*axes)
        cut = self.cut(layout.pp, tuple(layout.pipeline.items()))
        place = layout.schedule in SPLIT, *axes, layout.micro_batch, layout.recompute
        pieces, tapes, ends = self.pieces(*place)
        last = len(cut.layers) - 1
        mine = [rank, last - rank] if layout.schedule in V_SHAPED else list(range(rank, last + 1, layout.pp))
        numbers = [n for stage in mine for n in cut.layers[stage]]
        kinds = {kind: sum(self.kinds[n] == kind for n in numbers) for kind in tapes}
        dense, experts = (sum(k * counts[str(kind)][i] for kind, k in kinds.items()) for i in (0, 1))
        outside = counts["first"][0] * (0 in mine) + counts["last"][0] * (last in mine)
        if model.ties_ends and last in mine and 0 not in mine:
            outside += counts["first"][0]
        live: list[tuple[int, ...]] = [(1, 1, 0, 0, 0, 0, 1)]
        if layout.pp > 1:
            m = min(self._microbatches(layout), 2 * layout.pp)
            live = self.live(layout.schedule, layout.pp, m, layout.v, rank)
        nbytes: list[float] = []  # of a microbatch, beside each number of `live`
        for part in ("kept", "put_off"):
            layers = sum(k * getattr(tapes[kind], part) for kind, k in kinds.items()) / layout.v
            nbytes += [layers, *(getattr(end, part) for end in ends)]
        layer, loss = max(tape.highest(True).total for tape in tapes.values()), ends[1].highest(True).total
        nbytes.append(max(0, loss - layer))
        kept = layer + max(sum(map(operator.mul, counts, nbytes)) for counts in live)
        replicas = self.world // (layout.tp * layout.pp), self.world // (layout.etp * layout.ep * layout.pp)
        states = sum(self._states(n, d, layout.zero) for n, d in zip((dense + outside, experts), replicas, strict=True))
        comes_and_goes = self._travelling(layout.zero, (dense + experts) / max(1, len(numbers)), outside)
        seconds = sum(pieces.seconds(cut, number) for number in mine)
        return states + kept + comes_and_goes, seconds, (dense + outside, experts)

    def _travelling(self, zero: int, layer: float, outside: float) -> float:
        """Bytes of gathered weights (of two layers, and of those outside of layers) and of gradients under way: ZeRO-2
        and -3."""
        weight, grad, _ = self._bytes
        if zero < 2:
            return 0.0
        return grad * min(layer, DEFAULT_BUCKET_SIZE) if zero == 2 else (2 * weight + grad) * layer + weight * outside

    def _states(self, elements: float, replicas: int, zero: int) -> float:
        shares = (replicas if zero >= stage else 1 for stage in (3, 2, 1))
        return elements * sum(nbytes / share for nbytes, share in zip(self._bytes, shares, strict=True))

    def _around(self, layout: Layout, elements: tuple[int, int], busy: float, m: int) -> float:
        """Seconds of gradients, weights and the optimizer; a third of `busy` is the forward pass."""
        (weight, grad, _), mesh = self._bytes, self.model(layout.tp, layout.cp, layout.ep, layout.etp)[0]
        overlaps, total = self.base.parallel.overlap_grad_reduce, 0.0
        for count, ranks in zip(elements, (mesh.dp_cp.ranks, mesh.edp.ranks), strict=True):
            if not count:
                continue
            some = ranks[: len(ranks) // layout.pp]
            bucket = max(DEFAULT_BUCKET_SIZE, 1_000_000 * len(some)) if overlaps or layout.zero == 2 else count
            units = 1 + self.base.model.num_layers // layout.pp if layout.zero == 3 else -(-count // bucket)
            name = "reduce_scatter" if layout.zero else "all_reduce"
            grad_each = self.cluster.collective(name, grad * count / units, some)
            weight_each = self.cluster.collective("all_gather", weight * count / units, some)
            if layout.zero == 3:
                seconds = _left(units * (2 * weight_each + grad_each * overlaps), weight_each, busy)
                total += m * (seconds + units * grad_each * (not overlaps))
            else:
                times = max(units, layout.v) if layout.zero == 2 else units  # every chunk sends the buckets it is in
                each = _left(times * grad_each, grad_each, busy * 2 / 3 * overlaps)
                total += each * (m if layout.zero == 2 else 1)
                total += units * weight_each * (layout.zero > 0)
            shared = layout.zero > 0 or self.base.optimizer.optimizer == "dist_muon"
            total += self._update * count / (len(some) if shared else 1)
        return total


def _extended(one: Tape, two: Tape, b: int) -> Tape:
    """The tape of a micro-batch of b samples, extrapolated from those of one and of two."""
    fields = ("keeps", "forward", "backward", "puts_off")
    return Tape(
        Step(x.name, *(extended(getattr(x, field), getattr(y, field), b) for field in fields))
        for x, y in zip(one, two, strict=True)
    )


def _left(total: float, last: float, hidden: float) -> float:
    """Seconds of messages that compute does not hide; nothing hides the last message."""
    return min(total, last + max(0.0, total - last - hidden))


PLANNED = 8  # of the fastest estimates
MARGIN = 1.1  # what is estimated to need so much more than there is may fit


@dataclasses.dataclass(frozen=True)
class Found:
    """A layout and its plan."""

    layout: Layout
    plan: Plan


def search(base: RunConfig, world: int, cluster: Cluster, number: int = 5, seen: list | None = None) -> list[Found]:
    """The fastest layouts that fit, the fastest first. A layout that was estimated to fit, and whose plan does not, is
    left
    out. `seen` gets the bytes and seconds of every layout that is estimated.

    Raises:
        ConfigError: there is no global batch size, or nothing fits.
    """
    estimator, kept = Estimator(base, world, cluster), list[tuple[float, int, Layout]]()
    for n, layout in enumerate(layouts(base, world, cluster)):
        try:
            nbytes, seconds = estimator.estimate(layout)
        except ConfigError:
            continue
        if seen is not None:
            seen.append((nbytes, seconds))
        if nbytes <= MARGIN * cluster.usable:
            kept.append((seconds, n, layout))
    found: list[Found] = []
    for _, _, layout in sorted(kept)[: 4 * PLANNED]:
        try:
            told = plan(layout.run(base), world, cluster)
        except ConfigError:
            continue
        if told.fits and told.time is not None:
            found.append(Found(layout, told))
        if len(found) >= max(number, PLANNED):
            break
    require(
        bool(found),
        f"no layout of {world} {cluster.gpu} fits: of {len(kept)} that were estimated to, none does",
        "more GPUs, a smaller --global-batch-size or --seq-length, or fewer flags that fix the layout",
    )
    return sorted(found, key=lambda one: one.plan.time.seconds if one.plan.time else 0.0)[:number]
