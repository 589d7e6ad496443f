"""Records the messages of a notebook's own ranks, for pictures.

| function      | records                                                                                 |
|---------------|-----------------------------------------------------------------------------------------|
| `group_calls` | sends and all-reduces, by any function of `torch.distributed`                           |
| `travels`     | each gather and reduce-scatter, from its start to the end of the wait for it            |
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode

from minimegatron import trace

Run = list[trace.Event]


@dataclasses.dataclass
class Call:
    """One send, or one all-reduce, of this process.

    Attributes:
        name: `send` or `all_reduce`.
        nbytes: bytes of the tensor.
        to: for a send, the receiver's place in the group; else -1.
        first: the tensor's first number when it was sent; nan for an empty one.
        start: seconds on this machine's monotonic clock.
        end: end of an all-reduce; for a send, the time at which it had been handed over.
    """

    name: str
    nbytes: int
    to: int
    first: float
    start: float
    end: float


@contextlib.contextmanager
def group_calls() -> Iterator[list[Call]]:
    """Collect the sends and all-reduces of this process, in the order of their start, while the block runs.

    They are seen at the process group: `dist.send`, `dist.isend` and a batch of both end in `ProcessGroup.send`, an
    all-reduce of any group in `ProcessGroup.allreduce`. (`trace` has the calls of this package alone.)
    """
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


# Methods of a process group, which all functions of `torch.distributed` end in; operators of the functional ones.
_STARTS = {
    "allgather": "all_gather", "_allgather_base": "all_gather", "all_gather_single": "all_gather",
    "reduce_scatter": "reduce_scatter", "_reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
}  # fmt: skip
_OPERATORS = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}


@contextlib.contextmanager
def travels(rank: int, axis: str, waits: bool = False) -> Iterator[Run]:
    """In the block every gather and reduce-scatter becomes an event when it has been waited for, however it was called.

    Args:
        rank: this process's rank.
        axis: axis of the events.
        waits: also make the time that the rank waits an event, of kind `wait`.
    """
    events: Run = []

    def arrived(name: str, start: float, waited: float) -> None:
        end = time.monotonic()
        events.append(trace.Event(name, "comm", rank, start, end, axis))
        if waits:
            events.append(trace.Event("wait", "wait", rank, waited, end, axis))

    def timed(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def begin(group: Any, *args: Any, **kwargs: Any) -> _Travelling:
            start = time.monotonic()
            return _Travelling(real(group, *args, **kwargs), lambda waited: arrived(name, start, waited))

        return begin

    group = dist.ProcessGroup
    as_they_were = {method: vars(group)[method] for method in _STARTS if hasattr(group, method)}
    for method in as_they_were:  # `getattr(group, method)` takes the group as an argument; put back, it would not bind
        setattr(group, method, timed(_STARTS[method], getattr(group, method)))
    try:
        with _Functional(arrived):
            yield events
    finally:
        for method, function in as_they_were.items():
            setattr(group, method, function)


class _Travelling(Work):
    """A communication under way; `arrived(when the wait began)` is called when it has been waited for.

    It is a `Work`, because FSDP2 waits for nothing else.
    """

    def __init__(self, work: Any, arrived: Callable[[float], None]) -> None:
        super().__init__()
        self._work, self._arrived = work, arrived

    def wait(self, *timeout: Any) -> Any:
        began = time.monotonic()
        result = self._work.wait(*timeout)
        self._arrived(began)
        self._arrived = lambda waited: None
        return result

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def result(self) -> list[torch.Tensor]:
        return list(self._work.result())  # no deadline: it does not wait

    def get_future(self) -> Any:
        return self._work.get_future()

    def synchronize(self) -> None:
        self.wait()  # no deadline: the group's timeout


class _Functional(TorchDispatchMode):
    """Sees functional collectives by their operators: they call no method of a process group."""

    def __init__(self, arrived: Callable[[str, float, float], None]) -> None:
        super().__init__()
        self._arrived, self._begun = arrived, dict[int, tuple[str, float]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        start = time.monotonic()
        out = func(*args, **(kwargs or {}))
        if space == "_c10d_functional" and name in _OPERATORS:
            self._begun[out.data_ptr()] = _OPERATORS[name], start
        elif space == "_c10d_functional" and name == "wait_tensor":
            begun = self._begun.pop(getattr(args[0], "elem", args[0]).data_ptr(), None)
            if begun:
                self._arrived(*begun, start)
        return out
