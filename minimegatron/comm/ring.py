"""Passing a tensor round a ring, the next one in flight while this one is worked on.

The problem in a sentence: C ranks hold one block each and every rank must see all C blocks, without holding more than
two of them and without waiting for any.

    step 0    rank 0: block 0    rank 1: block 1    rank 2: block 2        each sends to the next rank
    step 1    rank 0: block 2    rank 1: block 0    rank 2: block 1
    step 2    rank 0: block 1    rank 1: block 2    rank 2: block 0        no message: all have seen all

A step's transfer begins *before* its work and is waited for *after* it, so it costs time only where it takes longer
than the work. Bytes sent by each rank: (C - 1) times the block.

In Megatron-LM this is inside Transformer Engine (`attn_forward_func_with_cp`); Liu et al. 2023 (arXiv 2310.01889).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from minimegatron import trace
from minimegatron.comm import calls
from minimegatron.comm.axis import Axis
from minimegatron.comm.pending import carried

SHIFT = "ring_shift"


class Shift:
    """A tensor on its way to the next rank, and another on its way here. `wait()` returns the latter."""

    def __init__(self, x: torch.Tensor, axis: Axis, tag: int = 0) -> None:
        assert x.is_contiguous(), "what travels is one piece of memory"
        calls.announce(SHIFT, axis, x)
        self._sent = x
        self._received = torch.empty_like(x)
        self._axis = axis
        self._start = time.monotonic()
        to, source = axis.ranks[(axis.rank + 1) % axis.size], axis.ranks[axis.rank - 1]
        self._then: Callable[[], object] | None = None
        if started := carried(SHIFT, axis, x, self._received, tag):
            self._works, self._then = started
        elif dist.get_backend(axis.group) == "nccl":  # one kernel for both directions, or two ranks wait for each other
            ops = [
                dist.P2POp(dist.isend, x, to, axis.group),
                dist.P2POp(dist.irecv, self._received, source, axis.group),
            ]
            self._works = calls.begin(SHIFT, axis, lambda: dist.batch_isend_irecv(ops))
        else:
            works = [
                dist.isend(x, to, group=axis.group, tag=tag),
                dist.irecv(self._received, source, group=axis.group, tag=tag),
            ]
            self._works = [work for work in works if work is not None]

    def wait(self) -> torch.Tensor:
        """Block until the tensor is here and ours has left (on a GPU: until the current stream may use it)."""
        for work in self._works:
            work.wait()
        if self._then is not None:
            self._then()
        nbytes = self._sent.numel() * self._sent.element_size()
        axis = self._axis
        trace.emit(SHIFT, "comm", self._start, time.monotonic(), axis=axis.name, nbytes=nbytes, size=axis.size)
        return self._received


def circulate(block: torch.Tensor, axis: Axis, visit: Callable[[int, torch.Tensor], None]) -> None:
    """Show every rank's block to every rank.

    Args:
        block: this rank's, contiguous; equal shapes on all ranks.
        axis: the ring.
        visit: called with (position of the owner on the axis, its block), this rank's own first, then the one before
            it, and so on; it must not change the block, which is being sent meanwhile.
    """
    for step in range(axis.size):
        shift = Shift(block, axis) if step < axis.size - 1 else None
        with trace.span("ring step", note=str(step)):
            visit((axis.rank - step) % axis.size, block)
        if shift is not None:
            block = shift.wait()
