"""What a block of code really sends, whichever function of `torch.distributed` it calls.

`trace` counts what this package's collectives are asked for. Code that calls `torch.distributed` itself, a learner's
ring for example, is seen one level lower, at the process group: `dist.send`, `dist.isend` and a batch of both end in
the same `ProcessGroup.send`, an all-reduce of any group in `ProcessGroup.allreduce`::

    with wire.watched() as calls:
        ring_all_reduce(x)
    sum(call.nbytes for call in calls if call.name == "send")

Only these two are watched: they are all that a ring and a bucket need.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


@dataclasses.dataclass
class Call:
    """One send, or one all-reduce, of this process.

    Attributes:
        name: `send` or `all_reduce`.
        nbytes: of the tensor.
        to: of a send, the receiver's place in the group; else -1.
        first: the tensor's first number when it was sent; nan of an empty one.
        start: seconds on this machine's monotonic clock.
        end: the same, when an all-reduce was done; of a send, when it had been handed over.
    """

    name: str
    nbytes: int
    to: int
    first: float
    start: float
    end: float


@contextlib.contextmanager
def watched() -> Iterator[list[Call]]:
    """Collect the sends and all-reduces of this process, in the order of their start, while the block runs."""
    calls: list[Call] = []
    group: Any = dist.ProcessGroup
    send, all_reduce = group.send, group.allreduce
    as_they_were = {name: vars(group)[name] for name in ("send", "allreduce")}  # `group.send` is one that takes no self

    def watched_send(self: Any, tensors: list[torch.Tensor], to: int, tag: int) -> Any:
        call = _call("send", tensors[0], to)
        calls.append(call)
        work = send(self, tensors, to, tag)
        call.end = time.monotonic()
        return work

    def watched_all_reduce(self: Any, tensors: list[torch.Tensor], *options: Any) -> Any:
        call = _call("all_reduce", tensors[0], -1)
        calls.append(call)
        work = all_reduce(self, tensors, *options)
        work.get_future().then(lambda _: setattr(call, "end", time.monotonic()))
        return work

    group.send, group.allreduce = watched_send, watched_all_reduce
    try:
        yield calls
    finally:
        for name, method in as_they_were.items():
            setattr(group, name, method)


def _call(name: str, tensor: torch.Tensor, to: int) -> Call:
    first = float(tensor.flatten()[0]) if tensor.numel() else float("nan")
    now = time.monotonic()
    return Call(name, tensor.nbytes, to, first, now, now)
