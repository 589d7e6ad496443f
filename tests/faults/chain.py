"""A chain of ranks each of which waits for the next, every one in another way; the last does not come.

chain.py WAYS: under torchrun, with the names of so many ways as there are links.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.comm import collectives as c
from minimegatron.comm import shared_memory
from minimegatron.comm.agree import gather_objects
from minimegatron.comm.async_ops import waiting
from minimegatron.comm.axis import Axis
from minimegatron.comm.p2p import PointToPoint
from minimegatron.comm.ring import Shift
from minimegatron.config import ParallelConfig
from minimegatron.launch import rank as launch

SMALL, LARGE = torch.ones(8), torch.ones(2 * shared_memory.MIN_BYTES)


def by_message(axis: Axis, seconds: float) -> None:
    parallel = ParallelConfig(pipeline_model_parallel_size=2, distributed_timeout_seconds=seconds)
    mesh: Any = SimpleNamespace(pp=axis, pp_up=axis, pp_down=axis, device=torch.device("cpu"), parallel=parallel)
    p2p = PointToPoint(mesh)
    if axis.is_first:
        p2p.irecv(1, "F0", SMALL.shape, SMALL.dtype).wait()
    else:
        p2p.isend(SMALL, 0, "F0")
        p2p.wait_sends()


# What a rank does, and what it is then said to be in. None is called by way of a function that waits itself, as a
# bucket of gradients, a ring of attention and a matrix product are not.
WAYS: dict[str, tuple[Callable[[Axis, float], object], str]] = {
    "all_reduce": (lambda axis, _: c.all_reduce_start(SMALL.clone(), axis).wait(), "all_reduce"),
    "all_gather": (lambda axis, _: c.all_gather_start(SMALL, axis).wait(), "all_gather"),
    "reduce_scatter": (lambda axis, _: c.reduce_scatter_start(SMALL, axis).wait(), "reduce_scatter"),
    "all_to_all": (lambda axis, _: c.all_to_all_start(SMALL, axis).wait(), "all_to_all"),
    "ring": (lambda axis, _: Shift(SMALL, axis).wait(), "ring_shift"),
    "shared memory": (lambda axis, _: c.all_reduce_start(LARGE.clone(), axis).wait(), "all_reduce"),
    "p2p": (by_message, "receive F0 from rank {next}"),
    "objects": (lambda axis, _: gather_objects("x", axis), "all_gather_object"),
}


def said(way: str, rank: int) -> str:
    """What a rank is said to be in that waits for the next one in this way."""
    axis = "pp" if way == "p2p" else f"link{rank}"
    return f"{WAYS[way][1].format(next=rank + 1)} over {axis} (ranks {rank}-{rank + 1})"


def links(rank: int, world: int, seconds: float = 60.0) -> list[Axis]:
    """The axes of this rank with the one before it and with the next; those at the ends have one of them."""
    found = []
    for first in range(world - 1):
        group = dist.new_group([first, first + 1], timeout=timedelta(seconds=seconds))
        if rank in (first, first + 1):
            found.append(Axis(f"link{first}", (first, first + 1), rank - first, group))
    for axis in sorted(found, key=lambda axis: axis.ranks[0] % 2):
        assert shared_memory.agreed(axis), "before their first message ranks try each other's memory, all together"
    return found


def wait_for_the_next(rank: int, world: int, ways: list[str], seconds: float = 60.0) -> None:
    own = [axis for axis in links(rank, world, seconds) if axis.is_first]
    if own:
        WAYS[ways[rank]][0](own[0], seconds)
    time.sleep(seconds)


def seen_by_a_thread(rank: int, world: int, ways: list[str], folder: str) -> str:
    """What another thread sees this rank wait in; the last rank comes when all others have been seen."""
    axes, seen = links(rank, world), list[str]()

    def look() -> None:
        while not seen:
            time.sleep(0.01)
            if (blocked := waiting()) is not None:
                seen.append(str(blocked))
        Path(folder, str(rank)).touch()

    thread = threading.Thread(target=look)
    if rank < world - 1:
        thread.start()
        WAYS[ways[rank]][0](axes[-1], 60.0)
        thread.join(60)
    while len(list(Path(folder).iterdir())) < world - 1:
        time.sleep(0.01)
    if rank:
        WAYS[ways[rank - 1]][0](axes[0], 60.0)
    assert waiting() is None
    return seen[0] if seen else ""


def main() -> None:
    seconds = float(os.environ["TIMEOUT"])
    rank, world = launch.init(timeout_seconds=seconds)
    wait_for_the_next(rank, world, sys.argv[1:], 10 * seconds if rank == world - 1 else seconds)


if __name__ == "__main__":
    launch.run_rank(main)
