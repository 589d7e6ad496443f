"""Sharded weights in flat buffers of the gradients' layout: each rank updates its shards, all-gathers complete them.

The problem in a sentence: when each of D ranks has updated 1/D of every bucket, all ranks need all of it, in one
message a bucket; the question is when, and for how long.

| class           | a rank keeps | a bucket is gathered                     | bytes a step, of bf16   | used by        |
|-----------------|--------------|------------------------------------------|-------------------------|----------------|
| `WholeParams`   | every weight | once, after the step                     | 2 (D-1)/D a parameter   | ZeRO-1, ZeRO-2 |
| `ShardedParams` | its shards   | when its unit runs, forward and backward | twice that a microbatch | ZeRO-3         |

`WholeParams`: a rank's shard is a slice of the bucket, and the message writes the other slices in place:

    before    rank 0 [ new | old ]     rank 1 [ old | new ]
    after     rank 0 [ new | new ]     rank 1 [ new | new ]

With `overlap_param_gather` nothing is waited for after the step. The weights of the first layers are needed first, and
they lie in the last bucket: its message starts at once. Before a part of the model runs for the first time, the buckets
of its parameters are waited for and the next one starts.

`ShardedParams`: a bucket is a unit of the model (`parallel/data/units`). Its memory is allocated when it is gathered
and freed when the unit has run. What autograd has saved stays valid: it refers to the same storage, which is filled
again with the same numbers before the backward pass reads it. `GatherOnUse` gathers the next unit while one runs:

    forward     gather 0 | layer 0        | layer 1        | layer 2
                         | gather 1       | gather 2       |
                                       free 0           free 1
    backward    output layer  | layer 2       | layer 1       | layer 0
                gather 2      | gather 1      | gather 0      |
                                         free 2 + reduce-scatter

| moment                                     | what happens                                                    |
|--------------------------------------------|-----------------------------------------------------------------|
| before a unit's forward                    | wait for its weights, start to gather those of the next unit    |
| after it                                   | free them, unless a backward pass runs: recomputed layers stay  |
| before its backward (a hook on its output) | wait for its weights, start to gather those of the unit before  |
| its last gradient of the pass is complete  | free them                                                       |
| the end of a microbatch's backward         | free everything                                                 |

Embedding and output layer, which are outside of lists, are used at the ends of a forward pass; without a pipeline they
stay gathered until the backward pass has ended, as the root of torch's FSDP does.

Rajbhandari et al. 2020 (arXiv 1910.02054); Zhao et al. 2023 (arXiv 2304.11277) for the storage that is freed.
Megatron-LM: `start_param_sync`, `finish_param_sync` in `megatron/core/distributed/param_and_grad_buffer.py`;
`param_and_grad_buffer.py` and (hooks of the same kinds) `megatron_fsdp.py` in
`megatron/core/distributed/fsdp/src/megatron_fsdp/`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import Work, all_gather_start, await_readers, outgoing
from minimegatron.parallel.data.buckets import BucketSpan, BufferLayout
from minimegatron.parallel.data.units import Unit


class WholeParams:
    """A buffer for all parameters of one dtype; each of them becomes a view of `data`.

    Args:
        params: (name, parameter) in the order of registration.
        layout: their places, cut into shards.
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
        """Begin to gather the bucket that the forward pass needs first: the shards are new."""
        self._left = len(self.layout.buckets)
        self._start_next()

    def require(self, bucket: int) -> None:
        """Wait until this bucket is complete, and begin to gather the next one."""
        while self._left > bucket:
            self._start_next()
        if bucket in self._pending:
            self._pending.pop(bucket).wait()
            self._start_next()

    def finish(self) -> None:
        """Wait until all buckets are complete."""
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
        layout: their places.
        bucket: number of the bucket.
        axis: ranks that own a shard each.

    Attributes:
        shard: this rank's part, flat.
        whole: all of the bucket; its storage is empty unless the bucket is gathered.
    """

    def __init__(
        self, params: Sequence[tuple[str, nn.Parameter]], layout: BufferLayout, bucket: BucketSpan, axis: Axis
    ) -> None:
        self.axis = axis
        members = [params[i] for i in bucket.members]
        places = tuple(layout.params[i].shifted(-bucket.span.start) for i in bucket.members)
        self.whole = _laid_out(members, BufferLayout(places, (bucket,)), bucket.span.size)
        own = self.whole[bucket.shard(axis.rank, axis.size).shifted(-bucket.span.start).slice]
        self.shard = outgoing(own, axis)
        self._bytes = self.whole.untyped_storage().nbytes()
        self._pending: Work | None = None
        self._gathered = True
        self.release()

    def start(self) -> None:
        """Begin to gather, unless the bucket is gathered or under way."""
        if not self._gathered and self._pending is None:
            self.whole.untyped_storage().resize_(self._bytes)
            if self.axis.size == 1:
                self.whole.copy_(self.shard)
            self._pending = all_gather_start(self.shard, self.axis, self.whole)

    def require(self) -> None:
        """Wait until the parameters have their values."""
        self.start()
        if self._pending is not None:
            self._pending.wait()
            self._pending, self._gathered = None, True

    def settle(self) -> None:
        """Wait until the other ranks have read the shard: it is about to change."""
        await_readers(self.shard, self.axis)

    def release(self) -> None:
        """Free the memory of `whole`."""
        if self._pending is not None:
            self.require()
        if self._gathered:
            self.whole.untyped_storage().resize_(0)
            self._gathered = False


class GatherOnUse:
    """Hooks that gather the weights of units when they run.

    Args:
        units: (unit, its buckets, names of its own parameters), in the order in which they run forward.
        keep_outside: weights outside of lists stay gathered from forward to backward.
    """

    def __init__(self, units: Sequence[tuple[Unit, list[ShardedParams], Collection[str]]], keep_outside: bool) -> None:
        self.units = list(units)
        self._keep = keep_outside
        self._all_stay = False
        self._missing = [set(names) for _, _, names in units]
        self._unit_of = {name: i for i, (_, _, names) in enumerate(units) for name in names}
        for index, (unit, _, _) in enumerate(units):
            unit.module.register_forward_pre_hook(partial(_before_forward, self, index))
            unit.module.register_forward_hook(partial(_after_forward, self, index))

    def need(self, index: int, backward: bool) -> None:
        """Wait for a unit's weights, and start to gather those of the unit that runs after it."""
        for bucket in self.units[index][1]:
            bucket.require()
        after = self._after(index, backward)
        for bucket in self.units[after][1] if after is not None else ():
            bucket.start()

    def _after(self, index: int, backward: bool) -> int | None:
        """The layer that runs after this unit; after parameters outside of lists the first layer, in backward the
        last."""
        unit = self.units[index][0]
        if backward and not unit.in_list:
            layers = [i for i, (other, _, _) in enumerate(self.units) if other.stage == unit.stage and other.in_list]
            return layers[-1] if layers else None
        after = index - 1 if backward else index + 1
        if not 0 <= after < len(self.units):
            return None
        other = self.units[after][0]
        return after if other.in_list and other.stage == unit.stage else None

    def ran(self, index: int) -> None:
        """A unit's forward pass has ended: free its weights, unless a backward pass runs or they stay for other
        reasons."""
        stays = self._keep and torch.is_grad_enabled() and not self.units[index][0].in_list
        if not (stays or self._all_stay or _in_backward()):
            self.release(index)

    def complete(self, name: str) -> None:
        """A parameter's gradient of this pass is complete."""
        index = self._unit_of[name]
        self._missing[index].discard(name)
        if not self._missing[index]:
            self.release(index)

    def end_pass(self) -> None:
        """A backward pass has ended: free all weights."""
        for index in range(len(self.units)):
            self.release(index)

    def release(self, index: int) -> None:
        """Free a unit's weights."""
        _, buckets, names = self.units[index]
        self._missing[index] = set(names)
        for bucket in buckets:
            bucket.release()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """In the block the weights of all units are gathered, and stay."""
        for _, buckets, _ in self.units:
            for bucket in buckets:
                bucket.require()
        self._all_stay = True
        try:
            yield
        finally:
            self._all_stay = False
            self.end_pass()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _before_forward(units: GatherOnUse, index: int, module: nn.Module, args: Any) -> None:
    units.need(index, _in_backward())  # a layer is computed again on the way back


def _after_forward(units: GatherOnUse, index: int, module: nn.Module, args: Any, output: Any) -> None:
    units.ran(index)
    for tensor in tree_leaves(output):  # a stage gives named tensors
        if torch.is_tensor(tensor) and tensor.requires_grad:
            tensor.register_hook(partial(_before_backward, units, index))


def _before_backward(units: GatherOnUse, index: int, grad: torch.Tensor) -> None:
    units.need(index, backward=True)


@torch.no_grad()
def _laid_out(
    params: Sequence[tuple[str, nn.Parameter]], layout: BufferLayout, total: int | None = None
) -> torch.Tensor:
    """A new buffer; the parameters become views of it."""
    dtype, device = params[0][1].dtype, params[0][1].device
    data = torch.zeros(layout.total if total is None else total, dtype=dtype, device=device)
    for (_, param), place in zip(params, layout.params, strict=True):
        view = data[place.slice].view(param.shape)
        view.copy_(param)
        param.data = view
    return data
