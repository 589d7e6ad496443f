"""A victim on a backend like NCCL: a work's `wait()` returns at once, no error ever comes, and the host blocks later.

lazy.py STEPS [RANK STEP WHAT]

Under the ranks is gloo. What NCCL does to a host is `synchronise`: it returns when everything has arrived, and never
when something does not.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.p2p import PointToPoint
from minimegatron.config import ParallelConfig
from minimegatron.launch import rank as launch

sys.path.insert(0, str(Path(__file__).parents[2]))  # an installed package does not bring its tests
from tests.faults.victim import happen  # noqa: E402


class LazyWork:
    """A work of gloo that never blocks and never fails."""

    under_way: list[LazyWork] = []

    def __init__(self, work: Any) -> None:
        self.arrived = threading.Event()
        self.under_way.append(self)
        threading.Thread(target=self._travel, args=(work,), daemon=True).start()

    def _travel(self, work: Any) -> None:
        """gloo's messages are complete when somebody waits for them."""
        with contextlib.suppress(RuntimeError):
            work.wait(datetime.timedelta(hours=1))
            self.arrived.set()

    def wait(self) -> bool:
        return True

    def is_completed(self) -> bool:
        return self.arrived.is_set()


class LazyGroup(dist.ProcessGroup):
    """A process group that hands over to gloo what this victim calls."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: datetime.timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, datetime.timedelta(hours=1))

    def getBackendName(self) -> str:
        return "lazy"

    def allreduce(self, tensors: Any, opts: Any = None) -> LazyWork:
        return LazyWork(self.gloo.allreduce(tensors, opts))

    def send(self, tensors: Any, destination: int, tag: int = 0) -> LazyWork:
        return LazyWork(self.gloo.send(tensors, destination, tag))

    def recv(self, tensors: Any, source: int, tag: int = 0) -> LazyWork:
        return LazyWork(self.gloo.recv(tensors, source, tag))


def synchronise() -> None:
    """What `.tolist()` does on a GPU."""
    while LazyWork.under_way:
        while not LazyWork.under_way[0].is_completed():
            time.sleep(0.001)
        LazyWork.under_way.pop(0)


def main() -> None:
    steps, victim, when, what = (*sys.argv[1:], "-1", "0", "")[:4]
    dist.Backend.register_backend("lazy", LazyGroup, devices=["cpu"])
    seconds = float(os.environ.get("TIMEOUT", "20"))
    rank, world = launch.init(timeout_seconds=seconds, backend="lazy")
    if what.startswith("pp-"):
        mesh = Mesh.build(ParallelConfig(pipeline_model_parallel_size=world, distributed_timeout_seconds=seconds))
        p2p = PointToPoint(mesh)
    else:
        mesh = Mesh.build(ParallelConfig(distributed_timeout_seconds=seconds))
    x = torch.ones(1000)
    for step in range(int(steps)):
        if (rank, step) == (int(victim), int(when)):
            happen(what.removeprefix("pp-"))
        if what == "idle" and step == int(when):
            time.sleep(2 * seconds)
        if what.startswith("pp-"):
            if rank:
                p2p.irecv(rank - 1, f"F{step}", x.shape, x.dtype).wait()
            if rank < world - 1:
                p2p.isend(x, rank + 1, f"F{step}")
            p2p.wait_sends()
        else:
            all_reduce(x.fill_(step), mesh.dp)
        synchronise()
        time.sleep(0.01)
    print(f"done {x[0].item():g}")
    launch.finish()


if __name__ == "__main__":
    launch.run_rank(main)
