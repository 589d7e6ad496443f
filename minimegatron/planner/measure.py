"""This machine as a `Cluster`: products, copies, operations and messages timed, and what they say of its rates.

| rate       | what is timed                                     | fitted                                             |
|------------|---------------------------------------------------|----------------------------------------------------|
| copy       | a tensor onto another, larger than any cache      | read and written bytes a second                    |
| matmul     | a square product in the dtype of training         | its time, less that of the bytes that it touches   |
| link       | on a CPU: all-reduces, gathers, shifts of ranks   | sent bytes a second, and seconds of a step         |
| operations | on a CPU: those of `planner/operations`           | seconds of a call, a FLOP and bytes                |

On a CPU several ranks measure at once, as many as the run will have here: they take caches and cores from each other.
One that sends is one that does not compute: nothing overlaps.

Two clocks. `WALL` is a plan's: the fastest of several repetitions counts, since what else runs on the machine can only
slow one down. `CPU` counts seconds of the processor that a rank and its threads use, the median of the repetitions:
waiting for the other rank is not in it, so the sum over ranks is what a run costs, however many share a core.

A GPU whose name `cluster.CLUSTERS` knows keeps its peaks and gets measured shares; any other device has what was
measured as its peak. The links of GPUs are not measured, they stay those of the data sheet; nor is what the host takes
to ask for an operation (`Cluster.call`), it stays that of the hosts it was fitted to.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import all_gather, all_reduce, reduce_scatter
from minimegatron.comm.ring import SHIFT, Shift
from minimegatron.errors import RankError
from minimegatron.launch.procs import RUN_DIR
from minimegatron.launch.rank import init, report, run_rank
from minimegatron.planner.cluster import CALL, CLUSTERS, Cluster
from minimegatron.planner.operations import Run, Timed, Trial, fits, trials
from minimegatron.trace import Event


@dataclasses.dataclass(frozen=True)
class Clock:
    """What counts as time.

    Attributes:
        now: seconds.
        of: the repetitions, the time that counts.
    """

    now: Callable[[], float]
    of: Callable[[Sequence[float]], float]

    def __call__(self, call: Run, device: torch.device, repeats: int) -> float:
        """Seconds of a call, after one that is not counted."""
        found, others = [], torch.zeros(BETWEEN[device.type] // 4, device=device)
        for _ in range(repeats + 1):
            others.add_(1)  # what the caches hold in a step is not what this operation wants
            _wait(device)
            begun = self.now()
            call()
            _wait(device)
            found.append(self.now() - begun)
        return self.of(found[1:])


WALL, CPU = Clock(time.perf_counter, min), Clock(time.process_time, statistics.median)
REPEATS = 7
SIZES = {"cpu": (1024, 2**25), "cuda": (8192, 2**30)}  # of a product's sides, bytes of a copied tensor
MESSAGES = (2**14, 2**18, 2**20, 2**23)  # bytes
RANKS = 2  # at least; messages need them
SECONDS = 600.0  # longest measurement
BETWEEN = {"cpu": 2**24, "cuda": 2**28}  # bytes that are touched between two repetitions


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(device: torch.device, clock: Clock = WALL, repeats: int = REPEATS, ranks: int = RANKS) -> Cluster:
    """Time this device: a CPU, whose products are in fp32, with so many ranks at once; or a GPU, in bf16."""
    if device.type == "cuda":
        return _of_gpu(device, *_rates(device, clock, repeats))
    found = _on_ranks(max(ranks, RANKS), clock, repeats)
    computed, copied = map(statistics.mean, zip(*(rates for rates, _ in found), strict=True))
    operations = fits(row for _, rows in found for row in rows)
    step, _, byte = operations["all_reduce"]
    return Cluster(
        gpu=platform.processor() or platform.machine(), gpus_per_node=1024, memory=float(_host_memory()), reserve=0.0,
        matmul=computed, copy=copied, inside=1 / byte, between=1 / byte, latency_inside=step, latency_between=step,
        matmul_share=1.0, copy_share=1.0, link_share=1.0, device="cpu", overlaps=False, operations=operations,
    )  # fmt: skip


def _on_ranks(ranks: int, clock: Clock, repeats: int) -> list[tuple[tuple[float, float], list[Timed]]]:
    """What `on_rank` returns on each of several ranks on CPUs; torchrun starts them on this file."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["--log-dir", folder, "-m", __name__, "cpu" if clock is CPU else "wall", str(repeats)]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", RUN_DIR: folder}
        try:
            subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=True)
        except subprocess.SubprocessError as error:
            written = str(getattr(error, "stderr", None) or "")
            raise RankError(f"the ranks that measure failed: {error}", where=written[-2000:]) from None
        reports = [json.loads(Path(folder, f"report.{rank}.json").read_text()) for rank in range(ranks)]
    return [(rates, [Timed(kind, tuple(asked), seconds) for kind, asked, seconds in rows]) for rates, rows in reports]


def on_rank(clock: Clock, repeats: int) -> tuple[tuple[float, float], list[Timed]]:
    """(Rates of products and copies, times of operations and messages) of one of several ranks on a CPU."""
    device = torch.device("cpu")
    tried = [*trials(), *messages(Axis.world("world"))]
    times = [Timed(one.kind, one.asked, clock(one.run, device, repeats)) for one in tried]
    return _rates(device, clock, repeats), times


def _rates(device: torch.device, clock: Clock, repeats: int) -> tuple[float, float]:
    """FLOP/s of a product, bytes/s of a copy."""
    side, nbytes = SIZES[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.zeros(nbytes // 4, device=device) for _ in range(2))
    copied = 2 * nbytes / clock(lambda: b.copy_(a), device, repeats)
    x, y, out = (torch.rand(side, side, device=device, dtype=dtype) for _ in range(3))
    touched = 3 * side * side * dtype.itemsize / copied
    seconds = clock(lambda: torch.mm(x, y, out=out), device, repeats)
    return 2 * side**3 / max(seconds - touched, seconds / 10), copied


def messages(axis: Axis) -> Iterator[Trial]:
    """Collectives of several ranks, in several sizes."""
    for nbytes in MESSAGES:
        x, part = torch.zeros(nbytes // 4), torch.zeros(nbytes // 4 // axis.size)
        for name, run in (
            ("all_reduce", lambda x=x: all_reduce(x, axis)),
            ("all_gather", lambda x=part: all_gather(x, axis)),
            ("reduce_scatter", lambda x=x: reduce_scatter(x, axis)),
            (SHIFT, lambda x=x: Shift(x, axis).wait()),
        ):
            sent = Event(name, "comm", 0, 0.0, 0.0, nbytes=nbytes, size=axis.size).wire_bytes
            yield Trial(name, (float(Cluster.steps(name, axis.size)), 0.0, sent), run)


def _of_gpu(device: torch.device, computed: float, copied: float) -> Cluster:
    name, memory = torch.cuda.get_device_name(device), float(torch.cuda.get_device_properties(device).total_memory)
    known = next((cluster for cluster in CLUSTERS.values() if cluster.gpu in name.split()[1:]), None)
    if known is None:
        peaks = {"matmul": computed, "copy": copied, "matmul_share": 1.0, "copy_share": 1.0}
        nodes = {"gpus_per_node": torch.cuda.device_count(), "call": CALL}
        return Cluster(gpu=name, memory=memory, **nodes, **peaks)  # type: ignore[arg-type]
    return known.replace(memory=memory, matmul_share=computed / known.matmul, copy_share=copied / known.copy)


def _host_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _main() -> None:
    """One rank: `measure.py CLOCK REPEATS`."""
    init()
    rates, times = on_rank({"cpu": CPU, "wall": WALL}[sys.argv[1]], int(sys.argv[2]))
    report([rates, [dataclasses.astuple(one) for one in times]])


if __name__ == "__main__":
    run_rank(_main)
