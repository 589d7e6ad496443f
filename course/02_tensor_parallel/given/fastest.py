"""What autograd keeps of a layer, and how the products of a backward pass lie beside its messages.

| function     | records                                                                                    |
|--------------|--------------------------------------------------------------------------------------------|
| `kept_sizes` | bytes of each tensor that autograd keeps for the backward pass, without parameters         |
| `best_of`    | the events of each way's fastest run, for several ways to do one thing                     |

The machine has other work, so the fastest of several runs counts; runs of different ways alternate, so that a slow
moment affects all of them.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.watched import Run, travels
from minimegatron import trace


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
    """Makes every matrix product an event, named by the number of elements of its result: `{1024: "dx"}`."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        start = time.monotonic()
        out = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::mm", "aten::bmm"):
            trace.emit(self.names.get(out.numel(), "product"), "compute", start, time.monotonic())
        return out


def watched(
    way: Callable[..., Any], inputs: Sequence[Any], rank: int, names: Mapping[int, str], messages: Mapping[str, str]
) -> Run:
    """The products of one call, and its messages, each until it has been waited for.

    Args:
        names: {elements of a product's result: its name}.
        messages: {`all_gather` or `reduce_scatter`: the name of its events}.
    """
    dist.barrier()
    with trace.record(rank) as log, Products(names), travels(rank, "") as under_way:
        way(*inputs)
    sent = [dataclasses.replace(event, name=messages[event.name]) for event in under_way]
    return [e for e in log.events if e.kind == "compute"] + sent


def best_of(
    ways: Mapping[str, Callable[..., Any]],
    inputs: Sequence[Any],
    rank: int,
    *,
    names: Mapping[int, str],
    messages: Mapping[str, str],
    runs: int = 5,
) -> dict[str, Run]:
    """Each way's fastest run, the same run on all ranks: the one that ends first on the rank where it ends last.

    Every rank of the world calls this. The ways alternate, and each has run once before it is timed.
    """
    for way in ways.values():
        watched(way, inputs, rank, names, messages)
    tried = [{name: watched(way, inputs, rank, names, messages) for name, way in ways.items()} for _ in range(runs)]
    best: dict[str, Run] = {}
    for name in ways:
        lasted = torch.tensor([_length(one[name]) for one in tried], dtype=torch.float64)
        dist.all_reduce(lasted, op=dist.ReduceOp.MAX)
        best[name] = tried[int(lasted.argmin())][name]
    return best


def _length(run: Run) -> float:
    return max(e.end for e in run) - min(e.start for e in run) if run else math.inf
