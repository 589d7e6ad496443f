"""What the package costs where it does nothing: layers on a group of one rank, the import, the start of ranks.

    OMP_NUM_THREADS=1 python -m benchmarks.overhead            about two minutes
    OMP_NUM_THREADS=1 python -m benchmarks.overhead --smoke    the same code on tiny sizes, seconds

| comparison | A                                              | B                            | reported             |
|------------|------------------------------------------------|------------------------------|----------------------|
| `mlp h`    | torch's two `nn.Linear` with SiLU between them | our column and row layer     | cost of B over A     |
| `import`   | `import torch`                                 | the trainer and all it needs | CPU-seconds, B - A   |
| `ranks`    | -                                              | an empty job on 4 warm ranks | wall time            |

The layers run forward and backward on one microbatch of 256 tokens, in fp32. The cost is CPU-seconds
(`labkit/paired.py`); only the start of ranks, which is waiting, is wall time.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.contenders import cpu_seconds, nothing
from labkit.paired import paired
from labkit.ranks.pool import WarmPool
from minimegatron.comm.mesh import Mesh
from minimegatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from minimegatron.layers.logical import initialize
from minimegatron.layers.param import Init

IMPORTS = {"torch": "import torch", "minimegatron": "import torch, minimegatron.training.build"}


def plain_mlp(h: int) -> nn.Sequential:
    """torch's own: h -> 4h -> h."""
    return nn.Sequential(nn.Linear(h, 4 * h), nn.SiLU(), nn.Linear(4 * h, h))


def our_mlp(h: int) -> nn.Sequential:
    """The same with layers that would be cut over tp, on a group of one."""
    tp, init = Mesh.serial().tp, Init(std=0.02)
    model = nn.Sequential(
        ColumnParallelLinear(h, 4 * h, tp, init=init), nn.SiLU(), RowParallelLinear(4 * h, h, tp, init=init)
    )
    initialize(model, 0)
    return model


def there_and_back(model: nn.Module, h: int, tokens: int) -> Callable[[], None]:
    """One forward and backward pass."""
    x = torch.randn(tokens, 1, h, requires_grad=True)

    def step() -> None:
        model(x).sum().backward()

    return step


def import_seconds(statement: str) -> float:
    """CPU-seconds of a fresh interpreter that runs one statement."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], check=True, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def empty_job_seconds(nranks: int, times: int) -> float:
    """Wall time of a job that does nothing, its process group included."""
    with WarmPool(nranks) as pool:
        pool.run(nothing)
        begun = time.monotonic()
        for _ in range(times):
            pool.run(nothing)
        return (time.monotonic() - begun) / times


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--pairs", type=int, default=11)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sizes, tokens, pairs = ((16,), 8, 2) if args.smoke else ((64, 256, 512), 256, args.pairs)
    for h in sizes:
        steps = 2 if args.smoke else max(20, 40_000 // h)
        ours, theirs = there_and_back(our_mlp(h), h, tokens), there_and_back(plain_mlp(h), h, tokens)
        ratio = paired(lambda f=theirs, n=steps: cpu_seconds(f, n), lambda f=ours, n=steps: cpu_seconds(f, n), pairs)  # type: ignore[misc]
        print(f"mlp h={h}, {tokens} tokens: column and row on a group of one cost {ratio} of nn.Linear", flush=True)
    seconds = {name: [import_seconds(s) for _ in range(1 if args.smoke else 5)] for name, s in IMPORTS.items()}
    alone, ours_too = (statistics.median(seconds[name]) for name in IMPORTS)
    print(f"import: torch {alone:.2f} CPU-s, the trainer on top of it {ours_too - alone:+.2f} CPU-s")
    print(f"ranks: an empty job on 4 warm ranks takes {1000 * empty_job_seconds(4, 3 if args.smoke else 20):.0f} ms")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
