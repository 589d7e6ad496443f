"""What moves the bytes of a communication: torch's backend, shared memory, or nothing.

| transport                       | for                               | moves bytes through                        |
|---------------------------------|-----------------------------------|--------------------------------------------|
| `Transport`                     | NCCL, and groups over the network | torch's backend                            |
| `comm/gloo.GlooTransport`       | gloo                              | memory that ranks of one machine share     |
| `FakeTransport`                 | layers that run on fake tensors   | nothing: results keep their values         |

`comm/async_ops` issues a communication by calling one of these methods, and waits for what it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minimegatron.comm.axis import Axis

# torch 2.13 renamed the two and warns about the old names; torch 2.11 has only those.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Splits = list[int] | None  # rows for, or of, each rank; None: as many for each
_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class Started(NamedTuple):
    """A communication that a transport has begun.

    Attributes:
        handles: waited for, all of them: torch's works, or objects with `wait()` (and `is_completed()`, for
            `comm/watchdog`).
        finish: called after the wait, to write the received data into the output.
    """

    handles: Sequence[Any] = ()
    finish: Callable[[], object] | None = None


class Transport:
    """Moves bytes through torch's backend, whichever that is. Every method begins and does not wait.

    Tensors are contiguous; `output` is where the result goes, and the axis has more than one rank. The layouts of
    results are those of the functions of the same name in `comm/collectives`.
    """

    def all_reduce(self, x: torch.Tensor, output: torch.Tensor, axis: Axis, op: str) -> Started:
        """Sum, "max" or "min"; `output` may be `x`."""
        if output is not x:
            output.copy_(x.detach())
        return Started([dist.all_reduce(output, op=_OPS[op], group=axis.group, async_op=True)])

    def all_gather(self, x: torch.Tensor, output: torch.Tensor, axis: Axis) -> Started:
        """`[n, ...] -> [n * size, ...]`; `x` may be this rank's part of `output`."""
        return Started([_all_gather_single(output, x, group=axis.group, async_op=True)])

    def reduce_scatter(self, x: torch.Tensor, output: torch.Tensor, axis: Axis) -> Started:
        """`[n * size, ...] -> [n, ...]`, a sum; `output` may be this rank's part of `x`."""
        return Started([_reduce_scatter_single(output, x, group=axis.group, async_op=True)])

    def all_to_all(
        self, x: torch.Tensor, output: torch.Tensor, axis: Axis, output_splits: Splits, input_splits: Splits
    ) -> Started:
        """Exchange rows; without splits they are cut evenly."""
        work = dist.all_to_all_single(output, x, output_splits, input_splits, group=axis.group, async_op=True)
        return Started([work])

    def broadcast(self, x: torch.Tensor, axis: Axis, src: int) -> Started:
        """The rank at position `src` of the axis overwrites the `x` of all."""
        return Started([dist.broadcast(x, src=axis.ranks[src], group=axis.group, async_op=True)])

    def ring_shift(self, x: torch.Tensor, output: torch.Tensor, axis: Axis, tag: int) -> Started:
        """Send `x` to the next rank of the axis, and receive the tensor of the rank before into `output`."""
        to, source = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[axis.rank - 1]
        if dist.get_backend(axis.group) == "nccl":  # one kernel for both directions, or two ranks wait for each other
            ops = [dist.P2POp(dist.isend, x, to, axis.group), dist.P2POp(dist.irecv, output, source, axis.group)]
            return Started(dist.batch_isend_irecv(ops))
        sent = dist.isend(x, to, group=axis.group, tag=tag)
        return Started([sent, dist.irecv(output, source, group=axis.group, tag=tag)])

    def send(self, x: torch.Tensor, axis: Axis, to: int) -> Started:
        """Send to one position of the axis."""
        return Started([dist.isend(x, dst=axis.ranks[to], group=axis.group)])

    def recv(self, output: torch.Tensor, axis: Axis, source: int) -> Started:
        """Receive from one position of the axis."""
        return Started([dist.irecv(output, src=axis.ranks[source], group=axis.group)])

    def outgoing(self, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        """A copy of `x`, in memory from which it can be sent over the axis at the least cost."""
        return x.clone()

    def await_readers(self, x: torch.Tensor, axis: Axis) -> None:
        """Block until what was sent of `x`, a tensor from `outgoing`, has been read, so that it may be changed."""


class FakeTransport(Transport):
    """Moves nothing: outputs keep their shapes and values. For layers that run on fake tensors.

    Observers are called as always, so `trace.record` counts what would have been sent. An axis needs no process group.
    """

    def _nothing(self, *_: Any) -> Started:
        return Started()

    def all_reduce(self, x: torch.Tensor, output: torch.Tensor, axis: Axis, op: str) -> Started:
        if output is not x:
            output.copy_(x.detach())
        return Started()

    all_gather = reduce_scatter = all_to_all = _nothing  # type: ignore[assignment]
    broadcast = ring_shift = send = recv = _nothing  # type: ignore[assignment]
