"""This machine as a `Cluster`: a product, a copy and an all-reduce timed, and what they say of the rates.

| rate   | what is timed                                     | fitted                                             |
|--------|---------------------------------------------------|----------------------------------------------------|
| copy   | a tensor onto another, larger than any cache      | read and written bytes a second                    |
| matmul | a square product in the dtype of training         | its time, less that of the bytes that it touches   |
| link   | an all-reduce of two ranks, on a CPU              | sent bytes a second                                |

The fastest of several repetitions counts: what else runs on the machine can only slow one down. A GPU whose name
`cluster.CLUSTERS` knows keeps its peaks and gets measured shares; any other device has what was measured as its peak.
The links of GPUs are not measured, they stay those of the data sheet.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.planner.cluster import CLUSTERS, Cluster

REPEATS = 7
SIZES = {"cpu": (1024, 2**25), "cuda": (8192, 2**30)}  # of a product's sides, bytes of a copied tensor
MESSAGE = 2**23  # bytes of the all-reduce


def fastest(call: Callable[[], object], device: torch.device, repeats: int = REPEATS) -> float:
    """Seconds of the fastest of several calls, after one that is not counted."""
    found = []
    for _ in range(repeats + 1):
        _wait(device)
        begun = time.perf_counter()
        call()
        _wait(device)
        found.append(time.perf_counter() - begun)
    return min(found[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure(device: torch.device, link: Callable[[], float] | None = None, repeats: int = REPEATS) -> Cluster:
    """Time this device.

    Args:
        device: a CPU, whose products are in fp32, or a GPU, in bf16.
        link: measures the bytes/s that a rank sends; default two ranks of this machine.
        repeats: of each call.
    """
    side, nbytes = SIZES[device.type]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    a, b = (torch.zeros(nbytes // 4, device=device) for _ in range(2))
    copied = 2 * nbytes / fastest(lambda: b.copy_(a), device, repeats)
    x, y, out = (torch.rand(side, side, device=device, dtype=dtype) for _ in range(3))
    touched = 3 * side * side * dtype.itemsize / copied
    seconds = fastest(lambda: torch.mm(x, y, out=out), device, repeats)
    computed = 2 * side**3 / max(seconds - touched, seconds / 10)
    if device.type == "cuda":
        return _of_gpu(device, computed, copied)
    sent = (link or _link_of_ranks)()
    return Cluster(
        gpu=platform.processor() or platform.machine(), gpus_per_node=1024, memory=float(_host_memory()), reserve=0.0,
        matmul=computed, copy=copied, inside=sent, between=sent, latency_inside=1e-4, latency_between=1e-4,
        matmul_share=1.0, copy_share=1.0, link_share=1.0,
    )  # fmt: skip


def _of_gpu(device: torch.device, computed: float, copied: float) -> Cluster:
    name, memory = torch.cuda.get_device_name(device), float(torch.cuda.get_device_properties(device).total_memory)
    known = next((cluster for cluster in CLUSTERS.values() if cluster.gpu in name.split()[1:]), None)
    if known is None:
        peaks = {"matmul": computed, "copy": copied, "matmul_share": 1.0, "copy_share": 1.0}
        return Cluster(gpu=name, gpus_per_node=torch.cuda.device_count(), memory=memory, **peaks)  # type: ignore[arg-type]
    return known.replace(memory=memory, matmul_share=computed / known.matmul, copy_share=copied / known.copy)


def _host_memory() -> int:
    import os

    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _link_of_ranks() -> float:
    """Bytes/s that each of two ranks of this machine sends."""
    from minimegatron.launch.workers import shared_pool

    return float(min(shared_pool(2).run(_timed_sum)))


def _timed_sum(rank: int, world: int) -> float:
    x: Any = torch.zeros(MESSAGE // 4)
    return MESSAGE / fastest(lambda: dist.all_reduce(x), torch.device("cpu"))
