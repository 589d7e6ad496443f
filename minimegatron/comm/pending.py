"""Collectives under way: each `..._start` begins one and gives a `Pending`, whose `wait()` gives the result.

What a rank computes between the two is hidden communication: ZeRO gathers the next layer's parameters while this one
computes (`parallel/gather_on_use`), a bucket of gradients is summed while backward fills the next one
(`parallel/grad_buffer`). On a GPU `wait()` blocks the stream and not the program.

NCCL and gloo take the same calls. A carrier may start any of them in place of the backend (`carry_with`): `comm/gloo`
does for gloo, whose own gather and reduce-scatter are slow ones and whose messages take TCP inside of a machine.

Every call is counted in `minimegatron.trace` when it has been waited for, and in tests and labs compared by
`minimegatron.comm.fingerprints` with what the other ranks call. Over an axis of one nothing travels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from minimegatron import trace
from minimegatron.comm import calls
from minimegatron.comm.axis import Axis
from minimegatron.errors import ConfigError

# torch 2.13 renamed the two and warns about the old names; torch 2.11 has only those.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Pending:
    """A collective under way. `wait()` returns its result; until then neither input nor output may be touched."""

    def __init__(self, output: torch.Tensor, **event: Any) -> None:
        self.output, self._event = output, event
        self._works: list[Any] = []
        self._then: Callable[[], object] | None = None  # done with what has come
        self._start = time.monotonic()

    def wait(self) -> torch.Tensor:
        """Block until the result is there (on a GPU: until the current stream may use it)."""
        if self._works:
            for work in self._works:
                work.wait()
            if self._then is not None:
                self._then()
            trace.emit(start=self._start, end=time.monotonic(), kind="comm", **self._event)
            self._works, self._then = [], None
        return self.output


Started = tuple[list[Any], Callable[[], object] | None]  # works to wait for, and what is to be done after that
_carriers: list[Callable[..., Started | None]] = []


def carry_with(carrier: Callable[..., Started | None]) -> None:
    """From now on `carrier(name, axis, x, output, ...)` may start a collective; where it gives None, torch does."""
    _carriers[:] = [carrier]


def carried(*call: Any) -> Started | None:
    """What the carrier has started, or None."""
    return _carriers[0](*call) if _carriers else None


def _issue(
    name: str, axis: Axis, x: torch.Tensor, output: torch.Tensor, call: Any, *how: Any, compare: bool = True
) -> Pending:
    """Start `call(async_op=True)` and wrap it; `x` is what the other ranks must agree about."""
    calls.announce(name, axis, x, comparable=compare)
    nbytes = max(x.numel() * x.element_size(), output.numel() * output.element_size())
    pending = Pending(output, name=name, axis=axis.name, nbytes=nbytes, size=axis.size)

    def begin() -> list[Any]:
        works, pending._then = carried(name, axis, x, output, *how) or ([call(async_op=True)], None)
        return works

    works = calls.begin(name, axis, begin)
    pending._works = works if isinstance(works, list) else [works]
    return pending


def all_reduce_start(x: torch.Tensor, axis: Axis, op: str = "sum") -> Pending:
    """Begin an in-place all-reduce of `x`."""
    if axis.size == 1:
        return Pending(x)
    assert x.is_contiguous(), "an in-place all-reduce needs a contiguous tensor"
    return _issue("all_reduce", axis, x, x, lambda **k: dist.all_reduce(x, op=_OPS[op], group=axis.group, **k), op)


def all_gather_start(x: torch.Tensor, axis: Axis, output: torch.Tensor | None = None) -> Pending:
    """Begin an all-gather along dim 0: `[n, ...] -> [n * size, ...]`, rank 0's part first.

    Args:
        x: this rank's part.
        axis: over which.
        output: where the result is written; `x` may be this rank's part of it. Default a new tensor.
    """
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    result = output if output is not None else x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    return _issue("all_gather", axis, x, result, lambda **k: _all_gather_single(result, x, group=axis.group, **k))


def reduce_scatter_start(x: torch.Tensor, axis: Axis, output: torch.Tensor | None = None) -> Pending:
    """Begin a summing reduce-scatter along dim 0: `[n * size, ...] -> [n, ...]`, this rank's part of the sum.

    Args:
        x: the terms of this rank.
        axis: over which.
        output: where the result is written; may be this rank's part of `x`. Default a new tensor.
    """
    if axis.size == 1:
        return Pending(x)
    if x.shape[0] % axis.size:
        raise ConfigError(
            f"cannot cut {x.shape[0]} rows into {axis.size} equal parts over axis {axis.name}",
            fix=f"make the first dim a multiple of {axis.size}",
        )
    x = x.contiguous()
    result = output if output is not None else x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))

    def call(**k: Any) -> Any:
        return _reduce_scatter_single(result, x, group=axis.group, **k)

    return _issue("reduce_scatter", axis, x, result, call)


def all_to_all_start(
    x: torch.Tensor, axis: Axis, output_splits: list[int] | None = None, input_splits: list[int] | None = None
) -> Pending:
    """Begin `all_to_all`."""
    if axis.size == 1:
        return Pending(x)
    x = x.contiguous()
    output = x.new_empty((x.shape[0] if output_splits is None else sum(output_splits), *x.shape[1:]))

    def call(**k: Any) -> Any:
        return dist.all_to_all_single(output, x, output_splits, input_splits, group=axis.group, **k)

    return _issue("all_to_all", axis, x, output, call, output_splits, input_splits, compare=input_splits is None)


def broadcast_start(x: torch.Tensor, axis: Axis, src: int = 0) -> Pending:
    """Begin a broadcast: rank `src` of the axis (a position, not a global rank) overwrites the `x` of all."""
    if axis.size == 1:
        return Pending(x)

    def call(**k: Any) -> Any:
        return dist.broadcast(x, src=axis.ranks[src], group=axis.group, **k)

    return _issue("broadcast", axis, x, x, call)
