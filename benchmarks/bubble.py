"""The bubble that schedules promise and the one that processes have: stages that sleep for as long as they would work.

    OMP_NUM_THREADS=1 python -m benchmarks.bubble                  2, 4 and 8 ranks, a few minutes
    OMP_NUM_THREADS=1 chrt -f 10 python -m benchmarks.bubble       the same (as root) before all other processes
    OMP_NUM_THREADS=1 python -m benchmarks.bubble --smoke          seconds

Every stage sleeps 50 ms for each of F, B and W, m = 2p microbatches, and messages of four bytes travel over gloo
through the real executor. The figure is idle time over work, (time of the batch) / (time of a rank's own work) - 1,
from the start of the first action to the end of the last, and beside it what `simulate` predicts. The last column is
the speed, work per time, over that of 1F1B.

The best of several rounds counts: other work on the machine only adds.
"""

from __future__ import annotations

import argparse
import time

import torch

from labkit.ranks.pool import WarmPool
from minimegatron import trace
from minimegatron.comm.collectives import barrier
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.p2p import PointToPoint
from minimegatron.config import ParallelConfig
from minimegatron.parallel.pipeline.overlapped import FunctionStage, TensorSpec, run
from minimegatron.parallel.pipeline.schedule_sim import Costs, simulate
from minimegatron.parallel.pipeline.schedules import SCHEDULES, build_schedule


def last_exactly(seconds: float) -> None:
    """Sleep, and be awake a little before the end: a sleeper is woken up to 0.3 ms late, at every action."""
    until = time.monotonic() + seconds
    time.sleep(max(seconds - 2e-4, 0.0))
    while time.monotonic() < until:
        pass


def spans_of(rank: int, world: int, name: str, m: int, step: float, rounds: int) -> list[tuple[float, float]]:
    """Of each round, when this rank began its first action and ended its last, on the machine's clock."""
    mesh = Mesh.build(ParallelConfig(pipeline_model_parallel_size=world))
    p2p, schedule = PointToPoint(mesh), build_schedule(name, world, m)

    def work(steps: float) -> torch.Tensor:
        last_exactly(steps * step)
        return torch.zeros(1)

    def stage(chunk: int) -> FunctionStage:
        def backward(i: int, dy: torch.Tensor | None) -> torch.Tensor:
            return work(1 if schedule.is_split(i, schedule.stage_of(rank, chunk)) else 2)

        return FunctionStage(
            lambda i, x: work(1), backward, lambda i: work(1), TensorSpec(torch.Size([1]), torch.float32)
        )

    stages, found = [stage(chunk) for chunk in range(schedule.v)], []
    for _ in range(rounds):
        barrier(mesh.pp)
        with trace.record(rank) as log:
            run(schedule, stages, p2p)
        did = log.select(kind="compute")
        found.append((did[0].start, did[-1].end))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="short: does it run?")
    smoke = parser.parse_args().smoke
    from benchmarks.bubble import spans_of as timed  # ranks import a function by the name of its module

    sizes, step, rounds = (((2, 4),), 0.002, 2) if smoke else (((2, 4), (4, 8), (8, 16), (8, 24)), 0.05, 3)
    print(f"idle time over work; {1000 * step:g} ms for each of F, B, W of a stage; best of {rounds}")
    for world, m in sizes:
        times = {}
        with WarmPool(world) as pool:
            for name in sorted(SCHEDULES, key=lambda name: name != "1f1b"):
                per_rank = pool.run(timed, name, m, step, rounds, timeout=60 + 20 * rounds * m * step)
                lasted = [max(e for _, e in of) - min(s for s, _ in of) for of in zip(*per_rank, strict=True)]
                schedule = build_schedule(name, world, m)
                predicted = float(simulate(schedule, Costs()).bubble)
                measured = min(lasted) / (3 * m * schedule.v * step) - 1
                times[name] = 1 + measured
                print(
                    f"{world} ranks, {m:2} microbatches  {name:12} predicted {predicted:.4f}  measured {measured:.4f}  "
                    f"time {(1 + measured) / (1 + predicted) - 1:+.2%}  of 1F1B's speed "
                    f"{times['1f1b'] / times[name]:.3f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
