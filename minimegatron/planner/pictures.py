"""The pictures of a plan: memory, the waterfall of a step's time, messages, products, the timeline of the pipeline, and
the layouts of a search.

Pictures need matplotlib, a plan itself does not. The timeline shows few microbatches, and no messages of ZeRO-2 and -3.

**Memory over a step** (`memory_over_step`). A plan has the bytes of the fullest moment; this picture shows every
moment. The simulated schedule (`timing.played`) says when an action runs, and `footprint.prediction` which bytes are
alive meanwhile: the parts of a stage run one after the other, each for the same time, and each is drawn at its fullest
moment. So the fullest sample equals `Prediction.peak`, owner by owner. The schedule repeats itself, so four
microbatches for each rank of the pipeline are drawn; GPipe keeps all microbatches, so all are drawn.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from minimegatron.comm.mesh import Mesh
from minimegatron.errors import ConfigError
from minimegatron.footprint.dry_run import Sizes
from minimegatron.footprint.events import FORWARD, Operation
from minimegatron.footprint.prediction import Passage, actions_of, passages, sizes_of
from minimegatron.footprint.states import planned_model
from minimegatron.memory import ACTIVATIONS, WORKSPACE, Sample
from minimegatron.planner.pass_time import BELOW, LAUNCHES, MEMORY, PEAK, RECOMPUTE, pieces_run
from minimegatron.planner.planning import Plan, without_host
from minimegatron.planner.report import sent
from minimegatron.planner.search import Found
from minimegatron.planner.timing import PLAYED, StepTime, played, stages_of_run
from minimegatron.training.memory_report import spec_of, work_of_run

AFTER = ("gradients", "weights", "optimizer", "end of step")  # parts of a step's time behind its passes


class MemoryOverStep(NamedTuple):
    """{rank: samples in order} for the first rank of each stage; `microbatches` are drawn of the `total` of a step."""

    ranks: dict[int, list[Sample]]
    microbatches: int
    total: int


def memory_over_step(told: Plan) -> MemoryOverStep:
    """Compute the memory over a step of a plan."""
    run, work = told.run, work_of_run(told.run, told.world, told.cluster.device)
    plan, z, stages = stages_of_run(run, told.world, told.cluster)
    m, p = work.microbatches, plan.ranks
    whole = plan.schedule == "gpipe" or run.parallel.microbatch_group_size_per_virtual_pipeline_stage is not None
    few = m if whole else min(m, PLAYED * p + m % p)
    if p > 1:
        spans = played(plan, z, told.cluster, stages, few).spans
        rows = [[(float(s.start), float(s.end)) for s in row] for row in spans]
    else:
        forward, both = stages[0].forward, stages[0].forward + stages[0].backward
        rows = [[(i * both + a, i * both + b) for i in range(few) for a, b in ((0.0, forward), (forward, both))]]
    parts = told.time.parts if told.time is not None else {}
    end = max(row[-1][1] for row in rows) + sum(parts.get(name, 0.0) for name in AFTER)
    found = {}
    for rank, row in zip(told.memory, rows, strict=True):
        mesh = Mesh.planned(run.parallel, rank, told.world)
        here = sizes_of(run.model, mesh, run.optimizer, work, spec_of(run))
        ddp = planned_model(run.model, mesh, run.optimizer, spec_of(run))
        passed = zip(passages(ddp, here, actions_of(plan, here, few)), row, strict=True)
        lasting = without_host(told.memory[rank].lasting)
        samples = [Sample(0.0, lasting)]
        for passage, (start, stop) in passed:
            samples += _of(passage, start, stop, lasting)
        found[rank] = [*samples[:-1], Sample(samples[-1].seconds, lasting), Sample(end, lasting)]
    return MemoryOverStep(found, few, m)


def _of(passage: Passage, start: float, stop: float, lasting: dict[str, int]) -> list[Sample]:
    """Samples of one action: its moments, and the moment after it."""
    moments, found = passage.moments(), []
    for i, moment in enumerate(moments):
        owners = {"communication": moment.communication, ACTIVATIONS: moment.activations, WORKSPACE: moment.workspace}
        at = start + (stop - start) * i / len(moments)
        found.append(Sample(at, lasting | {owner: n for owner, n in owners.items() if n}, moment.where))
    return [*found, Sample(stop, lasting | {ACTIVATIONS: passage.after})]


KINDS = (
    dict.fromkeys((PEAK, BELOW, RECOMPUTE), "compute")
    | {MEMORY: "memory", "optimizer": "memory"}
    | dict.fromkeys(("bubble", LAUNCHES), "wait")
)
PANELS = 6  # stages whose memory over a step is drawn: of more some, the first and the last among them
NAMES = {PEAK: "scores computed twice, uneven stages", MEMORY: "memory-bound work"}


def ready(folder: Path) -> None:
    """Make the folder.

    Raises:
        ConfigError: the folder cannot be made, or matplotlib is missing.
    """
    try:
        import matplotlib  # noqa: F401

        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (ImportError, OSError) as error:
        fix = "name a folder that can be written" if isinstance(error, OSError) else "pip install 'minimegatron[lab]'"
        raise ConfigError(f"--pictures {folder}: {error}", fix=fix) from error


def losses(time: StepTime) -> dict[str, tuple[float, str]]:
    """{part of the waterfall: (seconds, kind of its span on a timeline)}, from the model's FLOPs at the peak to the
    step."""
    ideal = min(time.model_flops / time.gpus / time.peak, time.parts[PEAK])  # that of FP8 is higher
    found, parts = {"model FLOPs at the peak": (ideal, "compute")}, {PEAK: 0.0, BELOW: 0.0} | time.parts
    for name, seconds in (parts | {PEAK: parts[PEAK] - ideal}).items():
        kind = KINDS.get(name, "comm")
        found[f"{name}, not hidden" if kind == "comm" else NAMES.get(name, name)] = seconds, kind
    return found


def products(z: Sizes) -> dict[str, Operation]:
    """{module, numbered where it has several products: product} of the forward pass of one layer of each kind."""
    run, found = pieces_run(z, again=False), dict[str, Operation]()
    for event in run.events:
        window, what = run.windows[event.window], event.what
        inside = 0 < window.part < len(run.lasting) - 1 and event.phase == FORWARD
        if inside and isinstance(what, Operation) and what.flops and what not in found.values():
            number = sum(name.split(" ")[0] == window.name for name in found)
            found[f"{window.name} {number + 1}" if number else window.name] = what
    return found


def draw(told: Plan, found: Sequence[Found] = (), seen: Sequence[tuple[float, float]] = ()) -> dict[str, Any]:
    """{name: picture} of a plan, which is the first of the layouts `found`; without a predicted time only memory is
    drawn."""
    from minimegatron.viz import bars, memory, pareto, roofline, timeline

    cluster, time = told.cluster, told.time
    held = {f"rank {n}, {len(one.layers)} layers": without_host(one.peak) for n, one in told.memory.items()}
    title = "Memory of each pipeline rank" + f", without {', '.join(told.unknown)}" * bool(told.unknown)
    figures: dict[str, Any] = {"memory": memory.ranks(held, limit=cluster.usable, title=title)}
    if time is None:
        return figures
    passed, last = memory_over_step(told), len(held) - 1
    some = sorted({i * last // (PANELS - 1) for i in range(PANELS)} if last >= PANELS else range(last + 1))
    over = {list(held)[i]: passed.ranks[list(told.memory)[i]] for i in some}
    title = f"Memory over a step with {passed.microbatches} of {passed.total} microbatches"
    figures["memory_over_step"] = memory.over_time(over, limit=cluster.usable, title=title)
    title, work = f"From the peak to a step: MFU {time.mfu:.1%}", time.model_flops / time.gpus
    figures["waterfall"] = bars.waterfall(losses(time), work=work, title=title)
    nbytes: dict[str, float] = {}
    for event, count in sent(told):
        key = f"{event.axis} ({event.size} ranks): {event.name}"
        nbytes[key] = nbytes.get(key, 0.0) + count * event.wire_bytes
    if by_axis := dict(sorted((name, n) for name, n in nbytes.items() if n)):
        figures["communication"] = bars.byte_bars(by_axis, title=f"What rank {told.fullest} sends in a step, by axis")
    plan, z, stages = stages_of_run(told.run, told.world, cluster)
    points = {n: (o.flops / o.nbytes, o.flops / cluster.operation(o)) for n, o in products(z).items()}
    figures["roofline"] = roofline.roofline({cluster.gpu: (cluster.matmul, cluster.copy)}, points, "A layer's products")
    if (p := plan.ranks) > 1:
        m = work_of_run(told.run, told.world, told.cluster.device).microbatches
        grouped = told.run.parallel.microbatch_group_size_per_virtual_pipeline_stage is not None
        few = m if grouped else min(m, p * (1 + (plan.chunks < 3)) + m % p)
        events = played(plan, z, cluster, stages, few).events()
        figures["timeline"] = timeline.gantt(events, by="name", title=f"The pipeline with {few} of {m} microbatches")
    if found:
        plans = [(one.plan.bytes, one.plan.time.seconds) for one in found if one.plan.time]
        figures["search"] = pareto.pareto(seen, plans, found[0].layout.words(), limit=cluster.usable)
    return figures
