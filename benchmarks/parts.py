"""Where the CPU-seconds of two ranks go, beside those of one process: products, kernels, messages, what is left.

    OMP_NUM_THREADS=1 python -m benchmarks.parts                       a table of CPU-ms a step, both ranks added
    OMP_NUM_THREADS=1 python -m benchmarks.parts --only one tp2 silent --rounds 3

`apart` are two processes that send nothing and have half of the samples each: what sharing a machine costs. `silent` is
tp2 whose large sums move nothing: what is left of its loss is work that both ranks do (norms, residuals, Python) and
products of half the width; no transport gets below it. (Its numbers are wrong, and of the right size.)

Model, step and layouts are those of `benchmarks/train.py`. A part is the time of a thread in the functions of its row,
without that in functions of other rows; reading the clock costs about 1 % of a step. Of several rounds the cheapest is
shown. `rest` is Python, autograd and torch's own operators.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.contenders import FULL, SMOKE, Workload, our_step
from benchmarks.train import LAYOUTS
from labkit.ranks.pool import WarmPool
from minimegatron.comm import async_ops, gloo, shared_memory
from minimegatron.comm.axis import Axis
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.transport import FakeTransport, Started
from minimegatron.config import ParallelConfig
from minimegatron.kernels import operators, products
from minimegatron.launch import procs
from minimegatron.layers import linear
from minimegatron.optim import main_params, optimizer

CASES = ["one", "apart", "tp2", "silent", "tp2 sp", "dp2", "dp2 zero3", "dp2 fsdp2", "pp2"]
ROWS = [
    "product y", "product dx", "product dw", "attention", "norms", "other kernels", "messages: copies",
    "messages: sums", "messages: start and wait", "other threads", "optimizer", "rest", "all",
]  # fmt: skip


class Clock:
    """CPU-seconds of this thread by row; of nested calls each has its own."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self._inner: list[float] = []

    def timed(self, function: Callable[..., Any], row: str | Callable[..., str]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.thread_time()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                spent = time.thread_time() - begun
                self.seconds[row if isinstance(row, str) else row(*args)] += spent - self._inner.pop()
                if self._inner:
                    self._inner[-1] += spent

        return call

    def watch(self) -> None:
        """Time what belongs to a row; a rank does it once."""
        for owner, name, row in (
            (products, "linear", "product y"),
            (products, "dgrad", "product dx"),
            (linear, "accumulate_wgrad", "product dw"),
            (operators.Library, "call", _kind),
            (async_ops.Work, "wait", "messages: start and wait"),
            (shared_memory._Slot, "fill", "messages: copies"),
            (shared_memory.Message, "copy_to", "messages: copies"),
            (gloo, "_add_up", "messages: sums"),
            (optimizer.MixedPrecisionOptimizer, "step", "optimizer"),
            (main_params.TorchUpdate, "step", "optimizer"),
        ):
            setattr(owner, name, self.timed(getattr(owner, name), row))
        f_linear = self.timed(torch.nn.functional.linear, "product y")
        linear.F = type("F", (), {"linear": staticmethod(f_linear)})  # type: ignore[attr-defined]
        issue = async_ops.issue
        timed = self.timed(issue, "messages: start and wait")
        for module in list(sys.modules.values()):
            if getattr(module, "issue", None) is issue:
                module.issue = timed  # type: ignore[attr-defined]


def _kind(library: Any, launcher: str, *_: Any) -> str:
    return "attention" if "flash" in launcher else "norms" if "norm" in launcher else "other kernels"


class Silent(gloo.GlooTransport):
    """Moves small messages, such as those of the loss, and no large sum."""

    def all_reduce(self, x: torch.Tensor, output: torch.Tensor, axis: Axis, op: str) -> Started:
        small = x.nbytes < shared_memory.MIN_BYTES
        return super().all_reduce(x, output, axis, op) if small else FakeTransport().all_reduce(x, output, axis, op)


def parts(rank: int, world: int, work: Workload, case: str, steps: int) -> dict[str, float]:
    """CPU-ms a step of this rank by row."""
    procs.keep_memory()
    silent = case == "silent"
    layout = {} if case == "one" else LAYOUTS["tp2" if silent else case]
    if layout is None:
        work = dataclasses.replace(work, batch=work.batch // world)
    step = our_step(work, Mesh.serial() if layout is None else Mesh.build(ParallelConfig.from_dict(layout)))
    step()
    if silent:
        async_ops.set_transport(Silent())
    clock = Clock()
    clock.watch()
    step()
    clock.seconds.clear()
    of_process, of_thread = time.process_time(), time.thread_time()
    for _ in range(steps):
        step()
    of_process, of_thread = time.process_time() - of_process, time.thread_time() - of_thread
    rest = of_thread - sum(clock.seconds.values())
    found = {**clock.seconds, "rest": rest, "other threads": of_process - of_thread, "all": of_process}
    return {row: 1000 * found.get(row, 0.0) / steps for row in ROWS}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes: does it run?")
    parser.add_argument("--only", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--batch", type=int, help="samples of a step, in microbatches of 2")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2, help="of a round, after two")
    args = parser.parse_args()
    torch.set_num_threads(1)
    work, table = SMOKE if args.smoke else FULL, dict[str, dict[str, float]]()
    work = dataclasses.replace(work, batch=args.batch or work.batch)
    with WarmPool(1) as one, WarmPool(2) as two:
        for case in args.only * args.rounds:
            of_ranks = (one if case == "one" else two).run(parts, work, case, args.steps, timeout=300)
            both = {row: sum(of_rank[row] for of_rank in of_ranks) for row in ROWS}
            if case not in table or both["all"] < table[case]["all"]:
                table[case] = both
    print(f"CPU-ms of a step of {work.batch} x {work.seq_length} tokens; load {os.getloadavg()[0]:.1f}")
    print(f"{'':26}" + "".join(f"{case:>11}" for case in table))
    for row in ROWS:
        print(f"{row:26}" + "".join(f"{table[case][row]:11.1f}" for case in table))


if __name__ == "__main__":
    from benchmarks.parts import main  # ranks import `parts` by this name  # noqa: PLC0415

    main()
