"""Collectives that autograd understands, each beside its conjugate.

A collective inside a model has a backward pass, which is a collective as well, and which one is not a choice. If every
rank computes the same loss from a replicated tensor, the gradient of *copy* is a *sum*, and the gradient of a *sum* is
a *copy*; cut and concatenate are each other's gradient in the same way.
Megatron's first paper calls the first pair f and g, its third paper adds the sequence-parallel pair, g-bar.

| function                            | forward             | backward                | where                       |
|-------------------------------------|---------------------|-------------------------|-----------------------------|
| `copy_to_region` (f)                | nothing             | all-reduce              | before a column-split matrix|
| `reduce_from_region` (g)            | all-reduce          | nothing                 | after a row-split matrix    |
| `scatter_to_region`                 | cut a dim (last)    | all-gather              | before a row-split matrix   |
| `gather_from_region`                | gather a dim (last) | cut                     | after a column-split matrix |
| `scatter_to_sequence_region`        | cut dim 0           | all-gather              | after the embedding         |
| `gather_from_sequence_region`       | gather dim 0        | reduce-scatter (or cut) | before a column-split matrix|
| `reduce_scatter_to_sequence_region` | reduce-scatter      | all-gather              | after a row-split matrix    |
| `all_to_all_region`                 | all-to-all, dim 0   | the same, splits swapped| experts, Ulysses            |

`gather_from_region` cuts in its backward because what follows it is computed identically on all ranks, so each already
has the whole gradient. Where the ranks go on to do *different* work with the gathered tensor, their gradients are
partial and must be summed: say `reduce_gradient=True`. Getting this wrong trains, silently, on a wrong gradient.

Of a tensor of n bytes a ring of N ranks sends, from each rank, `n (N-1)/N` for a gather or a reduce-scatter and twice
that for an all-reduce, which *is* a reduce-scatter followed by an all-gather. So sequence parallelism sends no more in
the forward pass. An all-to-all sends `n (N-1)/N` of the n bytes that this rank has.

On a group of one every function returns its argument. How a collective is issued and waited for: `comm/async_ops`.
`..._start` begins one and gives its `Work`.

Papers: Shoeybi et al. 2019 (arXiv 1909.08053, figure 3); Korthikanti et al. 2022 (arXiv 2205.05198, figure 5).
Megatron-LM: `megatron/core/tensor_parallel/mappings.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.comm.async_ops import Work, current_transport, issue
from minimegatron.comm.axis import Axis
from minimegatron.comm.transport import Splits, Started, Transport  # Splits: rows for each rank, or None
from minimegatron.errors import ConfigError

__all__ = [
    "Work", "all_gather", "all_gather_start", "all_reduce", "all_reduce_start", "all_to_all", "all_to_all_region",
    "all_to_all_region_start", "all_to_all_start", "await_readers", "barrier", "broadcast", "broadcast_start",
    "copy_to_region", "gather_from_region", "gather_from_sequence_region", "local_part", "outgoing",
    "reduce_from_region", "reduce_scatter", "reduce_scatter_start", "reduce_scatter_to_sequence_region",
    "scatter_to_region", "scatter_to_sequence_region",
]  # fmt: skip

Way = Callable[[torch.Tensor], torch.Tensor]

# -------------------------------------------------------------------------------------------------- under way


def _begin(
    name: str,
    x: torch.Tensor,
    output: torch.Tensor,
    axis: Axis,
    start: Callable[[Transport], Started],
    *,
    comparable: bool = True,
    extra: str = "",
) -> Work:
    """Issue a collective; the dtype and shape of `x` must agree over the axis."""
    nbytes = max(x.numel() * x.element_size(), output.numel() * output.element_size())
    event = {"name": name, "axis": axis.name, "nbytes": nbytes, "size": axis.size}
    return issue(Work(output, name, axis, x=x, extra=extra, comparable=comparable, event=event), start)


def all_reduce_start(x: torch.Tensor, axis: Axis, op: str = "sum") -> Work:
    """Begin an in-place all-reduce of `x`."""
    if axis.size == 1:
        return Work(x)
    assert x.is_contiguous(), "an in-place all-reduce needs a contiguous tensor"
    extra = "" if op == "sum" else op
    return _begin("all_reduce", x, x, axis, lambda t: t.all_reduce(x, x, axis, op), extra=extra)


def all_gather_start(x: torch.Tensor, axis: Axis, output: torch.Tensor | None = None) -> Work:
    """Begin an all-gather along dim 0: `[n, ...] -> [n * size, ...]`, rank 0's part first.

    Args:
        x: this rank's part.
        axis: the ranks that take part.
        output: where the result is written; `x` may be this rank's part of it. Default a new tensor.
    """
    if axis.size == 1:
        return Work(x)
    x = x.contiguous()
    result = output if output is not None else x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    return _begin("all_gather", x, result, axis, lambda t: t.all_gather(x, result, axis))


def reduce_scatter_start(x: torch.Tensor, axis: Axis, output: torch.Tensor | None = None) -> Work:
    """Begin a summing reduce-scatter along dim 0: `[n * size, ...] -> [n, ...]`, this rank's part of the sum.

    Args:
        x: this rank's terms of the sum.
        axis: the ranks that take part.
        output: where the result is written; may be this rank's part of `x`. Default a new tensor.
    """
    if axis.size == 1:
        return Work(x)
    _require_equal_parts(x, axis, 0)
    x = x.contiguous()
    result = output if output is not None else x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    return _begin("reduce_scatter", x, result, axis, lambda t: t.reduce_scatter(x, result, axis))


def outgoing(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """A copy of `x` in memory from which the transport sends without a further copy; for what is gathered often.

    Call `await_readers` before its values change.
    """
    return current_transport().outgoing(x, axis)


def await_readers(x: torch.Tensor, axis: Axis) -> None:
    """Block until the other ranks have read what was gathered of `x`, a tensor from `outgoing`."""
    current_transport().await_readers(x, axis)


def all_to_all_start(x: torch.Tensor, axis: Axis, output_splits: Splits = None, input_splits: Splits = None) -> Work:
    """Begin `all_to_all`."""
    if axis.size == 1:
        return Work(x)
    x = x.contiguous()
    output = x.new_empty((x.shape[0] if output_splits is None else sum(output_splits), *x.shape[1:]))

    def start(transport: Transport) -> Started:
        return transport.all_to_all(x, output, axis, output_splits, input_splits)

    return _begin("all_to_all", x, output, axis, start, comparable=input_splits is None)


def broadcast_start(x: torch.Tensor, axis: Axis, src: int = 0) -> Work:
    """Begin a broadcast: rank `src` of the axis (a position, not a global rank) overwrites the `x` of all."""
    if axis.size == 1:
        return Work(x)
    return _begin("broadcast", x, x, axis, lambda t: t.broadcast(x, axis, src))


# ------------------------------------------------------------------------------------------- without autograd


def all_reduce(x: torch.Tensor, axis: Axis, op: str = "sum") -> torch.Tensor:
    """Sum (or "max", "min") of `x` over the axis, written into `x`."""
    return all_reduce_start(x, axis, op).wait()


def all_gather(x: torch.Tensor, axis: Axis, dim: int = 0) -> torch.Tensor:
    """Concatenation of every rank's `x` along `dim`, in rank order. All shapes must be equal."""
    if axis.size == 1:
        return x
    gathered = all_gather_start(x, axis).wait()
    return gathered if dim % x.dim() == 0 else torch.cat(gathered.chunk(axis.size), dim)


def reduce_scatter(x: torch.Tensor, axis: Axis, dim: int = 0) -> torch.Tensor:
    """This rank's part, along `dim`, of the sum of every rank's `x`."""
    if axis.size == 1:
        return x
    if dim % x.dim():
        _require_equal_parts(x, axis, dim)
        return reduce_scatter_start(torch.cat(x.chunk(axis.size, dim)), axis).wait()
    return reduce_scatter_start(x, axis).wait()


def all_to_all(x: torch.Tensor, axis: Axis, output_splits: Splits = None, input_splits: Splits = None) -> torch.Tensor:
    """Send rows `input_splits[j]` of `x` to rank j, receive `output_splits[i]` rows from rank i, along dim 0.

    Without splits the rows are cut evenly.
    """
    return all_to_all_start(x, axis, output_splits, input_splits).wait()


def broadcast(x: torch.Tensor, axis: Axis, src: int = 0) -> torch.Tensor:
    """Rank `src` of the axis (a position, not a global rank) overwrites the `x` of all."""
    return broadcast_start(x, axis, src).wait()


def barrier(axis: Axis) -> None:
    """Return when every rank of the axis has come here."""
    if axis.size > 1:
        all_reduce(torch.zeros(1, device="cuda" if dist.get_backend(axis.group) == "nccl" else "cpu"), axis).item()


def local_part(x: torch.Tensor, axis: Axis, dim: int) -> torch.Tensor:
    """This rank's equal share of `x` along `dim`.

    Raises:
        ConfigError: the dim is not a multiple of the axis.
    """
    if axis.size == 1:
        return x
    _require_equal_parts(x, axis, dim)
    return x.chunk(axis.size, dim)[axis.rank].contiguous()


def _require_equal_parts(x: torch.Tensor, axis: Axis, dim: int) -> None:
    if x.shape[dim] % axis.size:
        raise ConfigError(
            f"cannot cut dim {dim} of size {x.shape[dim]} into {axis.size} equal parts over axis {axis.name}",
            fix=f"make it a multiple of {axis.size}",
        )


# ---------------------------------------------------------------------------------------------- with autograd
# The functions of the table above: what is done to `x`, and what to its gradient. No tensor is saved by any of them.


class _Conjugates(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: Way, backward: Way) -> torch.Tensor:
        ctx.way_back = backward
        return forward(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.way_back(grads[0]), None, None


def _pair(x: torch.Tensor, axis: Axis, forward: Way, backward: Way) -> torch.Tensor:
    return x if axis.size == 1 else _Conjugates.apply(x, forward, backward)  # type: ignore[no-any-return]


def _sum_of_copies(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """An all-reduce that leaves `x` as it is: autograd may still need it."""
    return all_reduce(x.clone(memory_format=torch.contiguous_format), axis)


def copy_to_region(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """f: the same `x` enters different work on each rank; its gradients are summed on the way back."""
    return _pair(x, axis, lambda y: y.view_as(y), lambda grad: _sum_of_copies(grad, axis))


def reduce_from_region(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """g: partial results are summed; the gradient is the same for every part."""
    return _pair(x, axis, lambda y: _sum_of_copies(y, axis), lambda grad: grad)


def scatter_to_region(x: torch.Tensor, axis: Axis, dim: int = -1) -> torch.Tensor:
    """Keep this rank's part of `dim`; `[..., n] -> [..., n / size]`."""
    return _pair(x, axis, lambda y: local_part(y, axis, dim), lambda grad: all_gather(grad, axis, dim))


def gather_from_region(x: torch.Tensor, axis: Axis, dim: int = -1, *, reduce_gradient: bool = False) -> torch.Tensor:
    """Concatenate the parts along `dim`; `[..., n / size] -> [..., n]`; for the gradient see the module."""
    back = reduce_scatter if reduce_gradient else local_part
    return _pair(x, axis, lambda y: all_gather(y, axis, dim), lambda grad: back(grad, axis, dim))


def scatter_to_sequence_region(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Keep this rank's tokens; `[s, ...] -> [s / size, ...]`."""
    return scatter_to_region(x, axis, 0)


def gather_from_sequence_region(x: torch.Tensor, axis: Axis, *, reduce_gradient: bool = True) -> torch.Tensor:
    """All tokens, `[s / size, ...] -> [s, ...]`; by default what follows differs per rank, so gradients are summed."""
    return gather_from_region(x, axis, 0, reduce_gradient=reduce_gradient)


def reduce_scatter_to_sequence_region(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """g-bar: sum the partial results and keep this rank's tokens; `[s, ...] -> [s / size, ...]`."""
    return _pair(x, axis, lambda y: reduce_scatter(y, axis), lambda grad: all_gather(grad, axis))


def all_to_all_region(
    x: torch.Tensor, axis: Axis, output_splits: Splits = None, input_splits: Splits = None
) -> torch.Tensor:
    """An all-to-all; the gradient is sent back by an all-to-all with swapped splits."""
    return _pair(
        x,
        axis,
        lambda y: all_to_all(y, axis, output_splits, input_splits),
        lambda grad: all_to_all(grad, axis, input_splits, output_splits),
    )


def all_to_all_region_start(
    x: torch.Tensor, axis: Axis, output_splits: Splits = None, input_splits: Splits = None
) -> Callable[[], torch.Tensor]:
    """Start `all_to_all_region`; call the returned function to wait for the rows.

    What is computed between the two calls overlaps with the message. In the backward pass it overlaps with the
    gradient's message, because autograd runs the three in the opposite order.
    """
    if axis.size == 1:
        return lambda: x
    under_way: list[Work] = []

    def start(y: torch.Tensor, out: Splits, inp: Splits) -> torch.Tensor:
        under_way.append(all_to_all_start(y, axis, out, inp))
        return under_way[0].output  # type: ignore[no-any-return]

    def arrived(y: torch.Tensor) -> torch.Tensor:
        under_way.pop().wait()
        return y.view_as(y)

    def start_back(grad: torch.Tensor) -> torch.Tensor:
        start(grad, input_splits, output_splits)
        return grad  # which the node before does not read: it waits

    rows = _Conjugates.apply(x, lambda y: start(y, output_splits, input_splits), lambda _: under_way.pop().wait())
    return lambda: _Conjugates.apply(rows, arrived, start_back)  # type: ignore[no-any-return]
