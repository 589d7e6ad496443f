"""Weights in flat buffers of the gradients' layout: each rank updates its shards, an all-gather spreads them.

The problem in a sentence: when each of D ranks has updated 1/D of every bucket, all ranks need all of it before the
next forward pass, in as few messages as there are buckets.

So the parameters of one dtype become views of one buffer, laid out as their gradients are (`parallel/buckets`); a
rank's shard of a bucket is a plain slice of it, and the message writes the other slices in place:

    before    rank 0 [ new | old ]     rank 1 [ old | new ]
    after     rank 0 [ new | new ]     rank 1 [ new | new ]

Bytes: 2 (D-1)/D per bf16 parameter, once a step.

**Overlap** (`overlap_param_gather`). The weights of the first layers are needed first, and they lie in the last bucket.
So nothing is waited for after the step: the last bucket's message starts at once, and before a module runs for the
first time, the buckets of its own parameters are waited for and the next one starts. What reads weights outside of a
forward pass (a checkpoint, a check of replicas) must call `finish`.

Megatron-LM: `start_param_sync`, `finish_param_sync` in `megatron/core/distributed/param_and_grad_buffer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import Pending, all_gather_start
from minimegatron.parallel.buckets import BufferLayout


class ParamBuffer:
    """The memory of parameters of one dtype; afterwards each is a view of `data`.

    Args:
        params: (name, parameter) in the order of registration.
        layout: where they lie, cut into shards.
        axis: ranks that own a shard each.
    """

    def __init__(self, params: Sequence[tuple[str, nn.Parameter]], layout: BufferLayout, axis: Axis) -> None:
        self.layout, self.axis = layout, axis
        dtype, device = params[0][1].dtype, params[0][1].device
        self.data = torch.zeros(layout.total, dtype=dtype, device=device)
        with torch.no_grad():
            for (_, param), place in zip(params, layout.params, strict=True):
                view = self.data[place.slice].view(param.shape)
                view.copy_(param)
                param.data = view
        self.bucket_of = {params[i][0]: n for n, bucket in enumerate(layout.buckets) for i in bucket.members}
        self._left = 0  # buckets before this one have not started; they start from the last to the first
        self._pending: dict[int, Pending] = {}

    def start(self) -> None:
        """The shards are new: begin to gather the bucket that the forward pass needs first."""
        self._left = len(self.layout.buckets)
        self._start_next()

    def require(self, name: str) -> None:
        """Wait until this parameter is complete, and begin the bucket after it."""
        bucket = self.bucket_of[name]
        while self._left > bucket:
            self._start_next()
        if bucket in self._pending:
            self._pending.pop(bucket).wait()
            self._start_next()

    def finish(self) -> None:
        """Wait until everything is complete."""
        while self._left:
            self._start_next()
        while self._pending:
            self._pending.pop(next(iter(self._pending))).wait()

    def _start_next(self) -> None:
        if self._left:
            self._left -= 1
            bucket = self.layout.buckets[self._left]
            mine = bucket.shard(self.axis.rank, self.axis.size)
            self._pending[self._left] = all_gather_start(
                self.data[mine.slice], self.axis, self.data[bucket.span.slice]
            )
