"""The memory of every pipeline rank over the time of a step: who holds how much, and when.

The problem in a sentence: a plan says how many bytes the fullest moment has, and not that the last stage is half empty
all the time, or that the first one is full for a tenth of it.

The spans of the simulated schedule (`timing.played`) say when an action runs, the passages of the same actions
(`footprint.prediction`) what is alive meanwhile: the parts of the stage one after the other, each at its fullest moment
and all equally long. So the fullest sample is `Prediction.peak`, owner by owner. A long batch repeats itself: four
microbatches for each rank of the pipeline are as full as all, but where a schedule keeps all (GPipe).
"""

from __future__ import annotations

from typing import NamedTuple

from minimegatron.comm.mesh import Mesh
from minimegatron.footprint.prediction import Passage, actions_of, meta_model, meta_wrapper, passages, sizes_of
from minimegatron.memory import ACTIVATIONS, WORKSPACE, Sample
from minimegatron.planner.planning import Plan, without_host
from minimegatron.planner.timing import PLAYED, played, stages_of_run
from minimegatron.training.memory_report import spec_of, work_of_run

AFTER = ("gradients", "weights", "optimizer", "end of step")  # parts of a step's time behind its passes


class Course(NamedTuple):
    """{Rank: samples in order} of the first rank of each stage, and `microbatches` of the `total` of a step."""

    ranks: dict[int, list[Sample]]
    microbatches: int
    total: int


def course(told: Plan) -> Course:
    """The memory of a planned step."""
    run, work = told.run, work_of_run(told.run, told.world, "cuda")
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
        ddp = meta_wrapper(meta_model(run.model, mesh, run.optimizer, spec_of(run)), mesh, run.optimizer)
        passed = zip(passages(ddp, here, actions_of(plan, here, few)), row, strict=True)
        lasting = without_host(told.memory[rank].lasting)
        samples = [Sample(0.0, lasting)]
        for passage, (start, stop) in passed:
            samples += _of(passage, start, stop, lasting)
        found[rank] = [*samples[:-1], Sample(samples[-1].seconds, lasting), Sample(end, lasting)]
    return Course(found, few, m)


def _of(passage: Passage, start: float, stop: float, lasting: dict[str, int]) -> list[Sample]:
    """One action, and the moment behind it."""
    moments, found = passage.moments(), []
    for i, moment in enumerate(moments):
        owners = {"communication": moment.communication, ACTIVATIONS: moment.activations, WORKSPACE: moment.workspace}
        at = start + (stop - start) * i / len(moments)
        found.append(Sample(at, lasting | {owner: n for owner, n in owners.items() if n}, moment.where))
    return [*found, Sample(stop, lasting | {ACTIVATIONS: passage.after})]
