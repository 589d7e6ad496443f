"""What NCCL moves between the GPUs of one machine; a script of one rank each, started by `benchmarks/gpu.py`.

Bus bandwidth: the bytes that a ring sends over the time, which for a good library is the bandwidth of the links.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.gpu_parts import Row, Yielded
from labkit.ranks.torchrun import launch
from minimegatron.launch.rank import finish, init, report

SIZES = {"1 MiB": 1 << 20, "32 MiB": 1 << 25, "1 GiB": 1 << 30}  # bytes of the whole message, in bf16
REPEATS = 10


def measure(gpus: int, folder: Path, sizes: dict[str, int]) -> Iterator[Yielded]:
    """Rows of every collective and size, and how long the launch of all ranks takes.

    Raises:
        RuntimeError: a rank failed; says which and why.
    """
    run = launch(__file__, gpus, folder, timeout=60, args=[str(size) for size in sizes.values()], gpus=True)
    if run.returncode:
        raise RuntimeError(run.explain())
    said = run.reports[0]
    yield f"{run.where()}; {run.seconds:.1f} s from start to end"
    for name, times in said.items():
        for (size, nbytes), took in zip(sizes.items(), times, strict=True):
            passes = 2 if name == "all-reduce" else 1
            rate = passes * nbytes * (gpus - 1) / gpus / took / 1e6
            yield Row(f"{name} over {gpus} GPUs, {size}", took, rate, "GB/s")


def main(sizes: list[int]) -> None:
    """One rank: milliseconds of each collective and size."""
    import torch
    import torch.distributed as dist

    _, world = init()
    said: dict[str, list[float]] = {"all-reduce": [], "all-gather": [], "reduce-scatter": []}
    for nbytes in sizes:
        whole = torch.ones(nbytes // 2 // world * world, dtype=torch.bfloat16, device="cuda")
        part = torch.ones(whole.numel() // world, dtype=torch.bfloat16, device="cuda")
        runs = {
            "all-reduce": lambda whole=whole: dist.all_reduce(whole),
            "all-gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),
            "reduce-scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole),
        }
        for name, run in runs.items():
            for _ in range(3):
                run()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            for _ in range(REPEATS):
                run()
            end.record()
            end.synchronize()
            said[name].append(begin.elapsed_time(end) / REPEATS)
    report(said)
    finish()


if __name__ == "__main__":
    import sys

    main([int(size) for size in sys.argv[1:]])
