"""The judge's own process beside a learner's: it has the memory, the disk and the emulator of a check, and counts
there.

The problem in a sentence: what a learner's process says about itself can be forged; evidence of a launch or of a loaded
tile must come from a process without the learner's code.

    learner's process                        judge's process
      kernel(x, y, n, grid=.., block=..) --->  kernels   launches, counts, keeps   (`kernel_service`)
      memory.load("k", 0, 64)            --->  memory    copies rows, counts       (`hbm`)
      disk.rename(".new", "step-20")     --->  disk      changes, notes, kills     (`disk_service`)
                                              -- evidence ------------------------------> decide

The nursery starts `run` (`Nursery.call(beside=...)`). It gives up files, network and programs before the first native
code of a learner's runs in it. If it dies, the judge says how it ended.
"""

from __future__ import annotations

import resource
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from labkit import sandbox
from labkit.broker import Service, serve
from labkit.disk_service import DiskService
from labkit.hbm import MemoryService
from labkit.kernel_service import KernelService

MEMORY = 4 << 30  # bytes of address space above what it starts with


def run(lines: Sequence[socket.socket], control: socket.socket, job: Mapping[str, Any]) -> dict[str, Any]:
    """Serve one learner's process until the judge has its answer.

    Args:
        job: `libraries`, {digest: what `cuda.compile_cell` made of a text}, or None; `memory`, the tensors of each
            trial by name, or None; `disk`, {path: text} of each trial, or None; `hidden`, a folder that stays closed;
            `seconds`.

    Returns:
        {"kernels": the launches of each trial, "memory": what was moved in each, "disk": the runs of each}, those that
        were asked for.
    """
    torch.set_num_threads(1)
    services: dict[str, Service] = {}
    if job["libraries"] is not None:
        _limit(job["seconds"])
        sandbox.enter(Path.cwd(), hidden=(Path(job["hidden"]),))
        folder = Path.cwd() / "kernels"
        folder.mkdir()
        services["kernels"] = KernelService(job["libraries"], folder)
    if job["memory"] is not None:
        services["memory"] = MemoryService(job["memory"])
    if job["disk"] is not None:
        services["disk"] = DiskService(job["disk"])
    return serve(lines, control, services)


def _limit(seconds: float) -> None:
    soft = int(2 * seconds) + 5
    resource.setrlimit(resource.RLIMIT_CPU, (soft, soft))
    statm = Path("/proc/self/statm")
    if statm.exists():
        size = int(statm.read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY,) * 2)
