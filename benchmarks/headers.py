"""How long a safetensors file with a header that lies is looked at before it is refused.

    python -m benchmarks.headers [--number 10000]

The files are those of `tests/checkpoint/test_headers.py`: small ones, each with one lie of a kind drawn at random, and
three at the limits of what is read at all. What counts is wall time, since that is what a run waits (goal: 50 ms
for each of the small ones); a file that took longer is looked at twice more, because the machine has other work, and
its best time counts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from pathlib import Path

from minimegatron.checkpoint.shard_file import read_header
from minimegatron.errors import CheckpointError
from tests.checkpoint.test_headers import largest, lie

GOAL = 0.050


def refusal(path: Path, content: bytes) -> float | None:
    """Seconds until the file was refused; None where it was taken."""
    path.write_bytes(content)
    begun = time.perf_counter()
    try:
        read_header(path)
    except CheckpointError:
        return time.perf_counter() - begun
    return None


def best(path: Path, content: bytes) -> float | None:
    """Of three where the first took longer than it may."""
    took = refusal(path, content)
    again = [refusal(path, content) for _ in range(2 if took is not None and took > GOAL else 0)]
    return None if took is None else min([took, *(t for t in again if t is not None)])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--number", type=int, default=10_000)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        took = [best(path, lie(random.Random(seed))) for seed in range(args.number)]
        refused = sorted(t for t in took if t is not None)
        slow = sum(t > GOAL for t in refused)
        print(f"{len(refused)} of {args.number} refused, {slow} of them after more than {1000 * GOAL:.0f} ms")
        for what, t in (("median", statistics.median(refused)), ("slowest", refused[-1])):
            print(f"{what}: {1000 * t:.2f} ms")
        for name, content in largest().items():
            seconds = best(path, content)
            print(f"{name}: " + ("taken" if seconds is None else f"{1000 * seconds:.0f} ms"))


if __name__ == "__main__":
    main()
