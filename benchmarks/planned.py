"""A step that the planner predicts for this machine, and the same step run: who is right?

    python -m benchmarks.planned                         measures this machine, then all layouts, then the sleepers
    python -m benchmarks.planned --cluster here.json     rates of a file (`minimegatron plan --measure here.json`)
    python -m benchmarks.planned --smoke                 seconds: does it run?
    chrt -f 10 python -m benchmarks.planned --wall       (as root) before all other processes, wall time

The same flags go to the planner and to the real trainer. What the planner knows of this machine are the rates of single
operations, copies and messages (`planner/measure`), measured by as many ranks at once as the layout has; nothing is
fitted to a step.

**CPU-seconds** of all ranks together are predicted and measured: a rank that waits uses none, so four ranks on two
cores cost what they cost on four. A rate drifts with the neighbours of this machine, so every round measures the rates
anew, before and behind the steps of each layout, and the ratio is taken in the round. Reported are medians over rounds.

With `--wall` it is seconds of a step. Where more ranks than cores compute, a step takes at least what all of them
compute over the cores: max(time of the schedule, CPU-seconds / cores).

The sleepers are pipelines whose stages sleep for as long as they would compute (`benchmarks/bubble`); the planner's own
simulation of the schedule (`timing.played`) predicts them.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import statistics
from pathlib import Path

import torch

from labkit.ranks.pool import shared_pool
from minimegatron.comm.mesh import rank_groups
from minimegatron.config.run import RunConfig
from minimegatron.models.chunks import placement_of
from minimegatron.parallel.pipeline.schedules import SCHEDULES
from minimegatron.planner.cluster import Cluster, read_cluster
from minimegatron.planner.measure import CPU, WALL, Clock, measure
from minimegatron.planner.pass_time import PassTime, added
from minimegatron.planner.timing import around, played, stages_of_run, step_time
from minimegatron.planner.traffic import run_messages
from minimegatron.training.arguments import parse_args
from minimegatron.training.build import build_trainer
from minimegatron.training.memory_report import work_of_run
from minimegatron.training.observers import Step
from minimegatron.training.trainer import Trainer

MODEL = "--preset laptop-10m --mock-data --lr 1e-4 --log-interval 1000 --eval-interval 1000 --eval-iters 0".split()
SHORT = "--seq-length 256 --micro-batch-size 2 --global-batch-size 16".split()
LONG = "--seq-length 2048 --micro-batch-size 1 --global-batch-size 4".split()  # what context parallelism is for
SMALL = "--num-layers 2 --hidden-size 64 --ffn-hidden-size 128 --vocab-size 512".split()
TP, CP, PP = (f"--{axis}-parallel-size 2".split() for axis in ("tensor-model", "context", "pipeline-model"))
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "1 process": (1, SHORT),
    "tp2": (2, SHORT + TP),
    "pp2": (2, SHORT + PP),
    "cp2": (2, LONG + CP),
    "dp2": (2, SHORT),
    "tp2 x pp2": (4, SHORT + TP + PP),
}


@dataclasses.dataclass
class Stopwatch:
    """A trainer's steps, timed."""

    trainer: Trainer
    clock: Clock

    def steps(self) -> list[float]:
        """Seconds of each."""
        step, found = self.trainer._step, list[float]()

        def timed(asks_to_stop: bool) -> Step:
            begun = self.clock.now()
            done = step(asks_to_stop)
            found.append(self.clock.now() - begun)
            return done

        self.trainer._step = timed  # type: ignore[method-assign]
        self.trainer.train()
        return found


def trained(rank: int, world: int, run: RunConfig, clock: Clock) -> list[float]:
    """Seconds of each step of a rank but the first, which is slow."""
    trainer = build_trainer(run, quiet=True)
    try:
        return Stopwatch(trainer, clock).steps()[1:]
    finally:
        trainer.close()


def processor_seconds(run: RunConfig, world: int, cluster: Cluster) -> float:
    """What all ranks of a step compute and carry, waiting left out."""
    plan, _, stages = stages_of_run(run, world, cluster)
    m, total = work_of_run(run, world, cluster.device).microbatches, 0.0
    ranks = rank_groups(run.parallel, world, "pp")[0]
    for rank, numbers in zip(ranks, placement_of(plan), strict=True):
        mine = added([stages[number] for number in numbers])
        rest = around(run, rank, world, cluster, mine)
        total += m * (mine.forward + mine.backward + rest.each) + sum(rest.parts.values())
        sent = run_messages(run, rank, world, cluster.device).items()
        total += sum(n * cluster.message(to.nbytes, ranks[:2]) for (to, _), n in sent if to.name == "send")
    return total * world / plan.ranks


def predicted(run: RunConfig, world: int, cluster: Cluster, cores: int | None) -> float:
    """CPU-seconds of all ranks; with `cores`, seconds."""
    if cores is None:
        return processor_seconds(run, world, cluster)
    seconds = step_time(run, world, cluster).seconds
    return max(seconds, processor_seconds(run, world, cluster) / cores) if world > cores else seconds


def compare(name: str, rounds: int, steps: int, clock: Clock, file: Path | None, smoke: bool) -> str:
    """The row of a layout."""
    from benchmarks.planned import trained as on_rank  # ranks import a function by the name of its module

    cores = len(os.sched_getaffinity(0)) if clock is WALL else None
    together = max if clock is WALL else sum
    (world, flags), pairs = LAYOUTS[name], list[tuple[float, float]]()
    run = parse_args([*MODEL, *(SMALL if smoke else []), *flags, "--train-iters", str(1 + steps)], world)

    def rates() -> Cluster:
        return read_cluster(str(file)) if file else measure(torch.device("cpu"), clock, 1 if smoke else 5, world)

    now = rates()
    for _ in range(rounds):
        per_rank = shared_pool(world).run(on_rank, run, clock, timeout=300)
        took = statistics.median(together(of) for of in zip(*per_rank, strict=True))
        before, now = now, rates()
        pairs.append((statistics.mean(predicted(run, world, cluster, cores) for cluster in (before, now)), took))
    return row(name, pairs)


def row(name: str, pairs: list[tuple[float, float]]) -> str:
    told, took = (statistics.median(of) for of in zip(*pairs, strict=True))
    ratios = [a / b for a, b in pairs]
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    return f"{name:20} {told:9.3f} {took:9.3f} {statistics.median(ratios):7.3f}  ({spread})"


def sleepers(cluster: Cluster, smoke: bool) -> list[str]:
    """A row for each schedule: seconds of a batch whose stages sleep, played by the planner and by ranks."""
    from benchmarks.bubble import spans_of

    step, rounds, rows = (0.002, 1, list[str]()) if smoke else (0.05, 3, [])
    for world, m in ((2, 4),) if smoke else ((2, 4), (4, 8)):
        for name in sorted(SCHEDULES):
            layout = f"--pipeline-model-parallel-size {world} --pipeline-schedule {name} --num-layers {2 * world}"
            batch = f"--seq-length 1 --micro-batch-size 1 --global-batch-size {m}"  # messages are small
            run = parse_args([*MODEL, *layout.split(), *batch.split()], world)
            plan, z, stages = stages_of_run(run, world, cluster)
            asleep = [PassTime(step, 2 * step, step, {})] * len(stages)
            told = float(played(plan, z, cluster, asleep, m).makespan)
            per_rank = shared_pool(world).run(spans_of, name, m, step, rounds, timeout=120)
            took = [max(end for _, end in of) - min(begun for begun, _ in of) for of in zip(*per_rank, strict=True)]
            rows.append(row(f"{world} ranks, {name}", [(told, seconds) for seconds in took]))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cluster", type=Path, help="rates from this file; default measured in every round")
    parser.add_argument("--only", nargs="*", choices=[*LAYOUTS, "sleepers"], default=[*LAYOUTS, "sleepers"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="of a layout in a round, after one that is not counted")
    parser.add_argument("--wall", action="store_true", help="seconds of a step, not CPU-seconds of all ranks")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    args = parser.parse_args()
    names, clock = [name for name in LAYOUTS if name in args.only], WALL if args.wall else CPU
    rounds, steps = (1, 1) if args.smoke else (args.rounds, args.steps)
    unit = "seconds of a step" if args.wall else "CPU-seconds of a step, all ranks"
    print(f"torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores; {unit}; median of {rounds} rounds")
    print(f"{'':20} {'predicted':>9} {'measured':>9} {'ratio':>7}  (lowest to highest)", flush=True)
    for name in names:
        print(compare(name, rounds, steps, clock, args.cluster, args.smoke), flush=True)
    if "sleepers" in args.only:
        cluster = read_cluster(str(args.cluster)) if args.cluster else measure(torch.device("cpu"), repeats=1)
        print("\nstages that sleep, seconds of a batch", *sleepers(cluster, args.smoke), sep="\n")


if __name__ == "__main__":
    main()
