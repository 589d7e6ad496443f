"""How much of a ring's time is work: ranks that sleep for as long as their share of a causal mask would take.

    OMP_NUM_THREADS=1 python -m benchmarks.ring            2 and 4 ranks, half a minute
    OMP_NUM_THREADS=1 python -m benchmarks.ring --smoke    seconds

Every step a rank passes its block of keys and values on, and sleeps in proportion to the pairs of a query and a key
that it would compute: what remains of the ideal, the mean work of a rank, is what balance and overlap are worth.

| contender      | cut of the sequence | the next block travels...       |
|----------------|---------------------|---------------------------------|
| `zigzag`       | chunks r and 2C-1-r | while this one is worked on     |
| `no overlap`   | chunks r and 2C-1-r | before the work, waited for     |
| `consecutive`  | the r-th C-th       | while this one is worked on     |

The fraction is taken over the slowest rank, of the best of several rounds: other work on the machine only adds.
"""

from __future__ import annotations

import argparse
import time

import torch

from labkit.ranks.pool import WarmPool
from minimegatron.comm.collectives import barrier
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.ring import Shift, circulate
from minimegatron.comm.sequence import spans_of
from minimegatron.config import ParallelConfig
from minimegatron.layers.attention.mask import AttentionMask


def seconds_of(rank: int, world: int, contender: str, ideal: float, elements: int, rounds: int) -> list[float]:
    """Wall seconds of each round on this rank; `ideal` is the mean work of a rank."""
    axis, mask, s = Mesh.build(ParallelConfig(context_parallel_size=world)).cp, AttentionMask(), 64 * world
    if contender == "consecutive":
        spans = [((r * 64, (r + 1) * 64),) for r in range(world)]
    else:
        spans = [spans_of(s, (r, world)) for r in range(world)]
    pair = ideal * world / (s * (s + 1) / 2)  # seconds

    def work(owner: int, block: torch.Tensor) -> None:
        time.sleep(pair * mask.pairs(mask.tiles(spans[rank], spans[owner])))

    found, block = [], torch.zeros(elements)
    for _ in range(rounds):
        barrier(axis)
        begun = time.perf_counter()
        if contender == "no overlap":
            travelling = block
            for step in range(world):
                work((rank - step) % world, travelling)
                if step < world - 1:
                    travelling = Shift(travelling, axis).wait()
        else:
            circulate(block, axis, work)
        found.append(time.perf_counter() - begun)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="short: does it run?")
    smoke = parser.parse_args().smoke
    from benchmarks.ring import seconds_of as timed  # ranks import a function by the name of its module

    ideal, elements, rounds = (0.02, 1000, 2) if smoke else (0.4, 1_000_000, 9)
    print(f"fraction of the ideal; {ideal} s of work a rank, blocks of {4 * elements / 1e6:.1f} MB, best of {rounds}")
    for world in (2, 4):
        with WarmPool(world) as pool:
            for contender in ("zigzag", "no overlap", "consecutive"):
                per_rank = pool.run(timed, contender, ideal, elements, rounds)
                slowest = min(max(times) for times in zip(*per_rank, strict=True))
                print(f"{world} ranks  {contender:12} {ideal / slowest:.3f}")


if __name__ == "__main__":
    main()
