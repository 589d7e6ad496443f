"""What code does in a notebook's own ranks, for its pictures: memory that autograd keeps, products and sums on a clock.

| function      | says                                                                                    |
|---------------|-----------------------------------------------------------------------------------------|
| `kept_sizes`  | bytes of each tensor that autograd keeps for the backward pass, parameters not counted  |
| `best_of`     | of several ways to do one thing the events of each one's fastest run                    |

Times come from a machine that has other work: the fastest of several runs is what the machine can do, and runs of
different ways alternate, so that a slow moment meets all of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from minimegatron import trace

Run = list[trace.Event]


def kept_sizes(module: nn.Module, *inputs: Any) -> list[int]:
    """Call the module; bytes of each piece of memory that autograd keeps, in the order in which it is first kept."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(*inputs)
    return [storage.nbytes() for storage in kept.values()]


class Products(TorchDispatchMode):
    """Every matrix product is an event, called by the number of elements of its result: `{1024: "dx"}`."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.monotonic()
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mm", "aten::bmm"):
            trace.emit(self.names.get(out.numel(), "product"), "compute", start, time.monotonic())
        return out


def watched(way: Callable[..., Any], inputs: Sequence[Any], rank: int, names: Mapping[int, str], travels: str) -> Run:
    """The products of one call, and how long each of its all-reduces was under way, called `travels`."""
    real, under_way = dist.all_reduce, list[tuple[float, float]]()

    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        asked = kwargs.get("async_op", False)
        start, handle = time.monotonic(), real(tensor, *args, **{**kwargs, "async_op": True})
        handle.get_future().then(lambda _: under_way.append((start, time.monotonic())))
        return handle if asked else handle.wait()

    dist.barrier()
    dist.all_reduce = all_reduce
    try:
        with trace.record(rank) as log, Products(names):
            way(*inputs)
    finally:
        dist.all_reduce = real
    sums = [trace.Event(travels, "comm", rank, start, end) for start, end in under_way]
    return [e for e in log.events if e.kind == "compute"] + sums


def best_of(
    ways: Mapping[str, Callable[..., Any]],
    inputs: Sequence[Any],
    rank: int,
    *,
    names: Mapping[int, str],
    travels: str,
    runs: int = 5,
) -> dict[str, Run]:
    """Each way's fastest run, the same run on all ranks: fast is what ends early on the rank where it ends last.

    Every rank of the world calls this. The ways alternate, and what is timed has been run once before.
    """
    for way in ways.values():
        watched(way, inputs, rank, names, travels)
    tried = [{name: watched(way, inputs, rank, names, travels) for name, way in ways.items()} for _ in range(runs)]
    best: dict[str, Run] = {}
    for name in ways:
        lasted = torch.tensor([_length(one[name]) for one in tried], dtype=torch.float64)
        dist.all_reduce(lasted, op=dist.ReduceOp.MAX)
        best[name] = tried[int(lasted.argmin())][name]
    return best


def _length(run: Run) -> float:
    return max(e.end for e in run) - min(e.start for e in run) if run else math.inf
