"""Weights in flat buffers of their gradients' layout: each rank updates its shards, all-gathers put them together.

The problem in a sentence: when each of D ranks has updated 1/D of every bucket, all ranks need all of it, in as few
messages as there are buckets; the question is when, and for how long.

| class           | a rank keeps | a bucket is gathered                     | bytes a step, of bf16       | known as   |
|-----------------|--------------|------------------------------------------|-----------------------------|------------|
| `WholeParams`   | every weight | once, after the step                     | 2 (D-1)/D a parameter       | ZeRO-1, -2 |
| `ShardedParams` | its shards   | when its unit runs, forward and backward | twice that a microbatch     | ZeRO-3     |

`WholeParams`: a rank's shard is a slice of the bucket, and the message writes the other slices in place:

    before    rank 0 [ new | old ]     rank 1 [ old | new ]
    after     rank 0 [ new | new ]     rank 1 [ new | new ]

With `overlap_param_gather` nothing is waited for after the step. The weights of the first layers are needed first, and
they lie in the last bucket: its message starts at once, and before a part of the model runs for the first time the
buckets of its parameters are waited for, and the next one starts.

`ShardedParams`: a bucket is a unit of the model (`parallel/data/units`). It has memory from the moment it is gathered
until the unit has run; then the memory is given back. What autograd has saved stays valid: it refers to the same
storage, which is filled again, with the same numbers, before the backward pass reads it. While a unit runs the next one
is gathered already.

Rajbhandari et al. 2020 (arXiv 1910.02054); Zhao et al. 2023 (arXiv 2304.11277) for the storage that comes and goes.
Megatron-LM: `start_param_sync`, `finish_param_sync` in `megatron/core/distributed/param_and_grad_buffer.py`;
`megatron/core/distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import Work, all_gather_start
from minimegatron.parallel.data.buckets import BucketSpan, BufferLayout


class WholeParams:
    """The memory of parameters of one dtype; afterwards each is a view of `data`.

    Args:
        params: (name, parameter) in the order of registration.
        layout: where they lie, cut into shards.
        axis: ranks that own a shard each.
    """

    def __init__(self, params: Sequence[tuple[str, nn.Parameter]], layout: BufferLayout, axis: Axis) -> None:
        self.layout, self.axis = layout, axis
        self.data = _laid_out(params, layout)
        self.bucket_of = {params[i][0]: n for n, bucket in enumerate(layout.buckets) for i in bucket.members}
        self._left = 0  # buckets before this one have not started; they start from the last to the first
        self._pending: dict[int, Work] = {}

    def shard(self, bucket: int) -> torch.Tensor:
        """This rank's part of a bucket."""
        return self.data[self.layout.buckets[bucket].shard(self.axis.rank, self.axis.size).slice]

    def start(self) -> None:
        """The shards are new: begin to gather the bucket that the forward pass needs first."""
        self._left = len(self.layout.buckets)
        self._start_next()

    def require(self, bucket: int) -> None:
        """Wait until this bucket is complete, and begin the one after it."""
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
            whole = self.data[self.layout.buckets[self._left].span.slice]
            self._pending[self._left] = all_gather_start(self.shard(self._left), self.axis, whole)


class ShardedParams:
    """The parameters of one bucket, of which this rank keeps its shard.

    Args:
        params: (name, parameter) of the whole buffer in the order of registration.
        layout: where they lie.
        bucket: the one of these parameters.
        axis: ranks that own a shard each.

    Attributes:
        shard: this rank's part, flat.
    """

    def __init__(
        self, params: Sequence[tuple[str, nn.Parameter]], layout: BufferLayout, bucket: BucketSpan, axis: Axis
    ) -> None:
        self.axis = axis
        members = [params[i] for i in bucket.members]
        places = tuple(layout.params[i].shifted(-bucket.span.start) for i in bucket.members)
        self._whole = _laid_out(members, BufferLayout(places, (bucket,)), bucket.span.size)
        self.shard = self._whole[bucket.shard(axis.rank, axis.size).shifted(-bucket.span.start).slice].clone()
        self._bytes = self._whole.untyped_storage().nbytes()
        self._pending: Work | None = None
        self._here = True
        self.release()

    @property
    def memory(self) -> list[torch.Tensor]:
        """What comes and goes."""
        return [self._whole]

    def start(self) -> None:
        """Begin to gather, unless it is here or under way."""
        if not self._here and self._pending is None:
            self._whole.untyped_storage().resize_(self._bytes)
            if self.axis.size == 1:
                self._whole.copy_(self.shard)
            self._pending = all_gather_start(self.shard, self.axis, self._whole)

    def require(self) -> None:
        """After this the parameters have their numbers."""
        self.start()
        if self._pending is not None:
            self._pending.wait()
            self._pending, self._here = None, True

    def release(self) -> None:
        """Give the memory back."""
        if self._pending is not None:
            self.require()
        if self._here:
            self._whole.untyped_storage().resize_(0)
            self._here = False


@torch.no_grad()
def _laid_out(
    params: Sequence[tuple[str, nn.Parameter]], layout: BufferLayout, total: int | None = None
) -> torch.Tensor:
    """A new buffer of which the parameters are views from now on."""
    dtype, device = params[0][1].dtype, params[0][1].device
    data = torch.zeros(layout.total if total is None else total, dtype=dtype, device=device)
    for (_, param), place in zip(params, layout.params, strict=True):
        view = data[place.slice].view(param.shape)
        view.copy_(param)
        param.data = view
    return data
