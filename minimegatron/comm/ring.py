"""A ring: every rank sees every rank's block, and the next block travels while the rank works on this one.

    step 0    rank 0: block 0    rank 1: block 1    rank 2: block 2        each sends to the next rank
    step 1    rank 0: block 2    rank 1: block 0    rank 2: block 1
    step 2    rank 0: block 1    rank 1: block 2    rank 2: block 0        no message: all have seen all

No rank holds more than two blocks. A step's transfer begins *before* its work and is waited for *after* it, so it costs
time only where it takes longer than the work. Bytes sent by each rank: (C - 1) times the block.

In Megatron-LM this is inside Transformer Engine (`attn_forward_func_with_cp`); Liu et al. 2023 (arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from minimegatron import trace
from minimegatron.comm.async_ops import Work, issue
from minimegatron.comm.axis import Axis

SHIFT = "ring_shift"


class Shift(Work):
    """Sends a tensor to the next rank and receives another from the rank before. `wait()` returns the received tensor.

    Args:
        x: contiguous; equal shapes on all ranks. It must not be changed before `wait()`.
        axis: the ring.
        tag: distinguishes shifts that are under way at the same time.
    """

    def __init__(self, x: torch.Tensor, axis: Axis, tag: int = 0) -> None:
        assert x.is_contiguous(), "a message is one piece of memory"
        event = {"name": SHIFT, "axis": axis.name, "nbytes": x.numel() * x.element_size(), "size": axis.size}
        received = torch.empty_like(x)
        super().__init__(received, SHIFT, axis, x=x, event=event)
        self._sent = x
        issue(self, lambda transport: transport.ring_shift(x, received, axis, tag))


def circulate(block: torch.Tensor, axis: Axis, visit: Callable[[int, torch.Tensor], None]) -> None:
    """Show every rank's block to every rank.

    Args:
        block: this rank's block, contiguous; equal shapes on all ranks.
        axis: the ring.
        visit: called with (position of the owner on the axis, its block), this rank's own first, then that of the rank
            before it, and so on; it must not change the block, which is being sent meanwhile.
    """
    for step in range(axis.size):
        shift = Shift(block, axis) if step < axis.size - 1 else None
        with trace.span("ring step", note=str(step)):
            visit((axis.rank - step) % axis.size, block)
        if shift is not None:
            block = shift.wait()
