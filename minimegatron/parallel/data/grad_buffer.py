"""Gradients in flat buffers, whose buckets are summed over the replicas.

The problem in a sentence: D replicas have D different gradients, the step needs their sum, and how much of that sum a
rank keeps decides how much memory a model costs.

| bucket            | message                     | gradient memory of a rank  | a rank ends with     | used by        |
|-------------------|-----------------------------|----------------------------|----------------------|----------------|
| `Bucket`          | all-reduce, once a step     | all of it                  | the whole sum        | plain DDP      |
| `ShardedBucket`   | reduce-scatter, once a step | all of it                  | its shard of the sum | ZeRO-1         |
| `TemporaryBucket` | reduce-scatter, each pass   | its shard, and two buckets | its shard of the sum | ZeRO-2, ZeRO-3 |

    Bucket, ShardedBucket  microbatch 1 + microbatch 2 + ... -> bucket -> sum over ranks
    TemporaryBucket        microbatch 1 -> bucket -> sum over ranks -> shard       the bucket's memory is freed
                           microbatch 2 -> bucket -> sum over ranks -> + shard

A bucket may be reduced in every pass, because a sum of sums is the same sum; that costs a reduce-scatter for each
microbatch instead of one a step.

With several *instances* (`num_distributed_optimizer_instances`, HSDP) the shards are divided over the ranks of one
instance, and an all-reduce sums each shard over the instances:

    4 ranks, 2 instances     reduce-scatter of a bucket over {0, 1} and {2, 3}     then
                             all-reduce of its first half over {0, 2}, of its second over {1, 3}

This costs more memory than one instance and keeps most of the traffic among neighbours. Shards of temporary buckets
are summed over instances once a step; those of other buckets as soon as the next bucket has started.

Buckets start strictly in order. If a parameter got no gradient on one rank only, the ranks would otherwise start their
buckets in different orders, and mismatched collectives return wrong numbers or hang.

Gradients are accumulated in fp32: 1000 ones added in bf16 stop at 256. `--main-grads-dtype bf16` halves memory and
traffic at this price.

Rajbhandari et al. 2020 (arXiv 1910.02054), section 5. Megatron-LM:
`megatron/core/distributed/param_and_grad_buffer.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from minimegatron.comm.axis import ALONE, Axis
from minimegatron.comm.collectives import Work, all_gather, all_reduce, all_reduce_start, reduce_scatter_start
from minimegatron.memory import owned
from minimegatron.parallel.data.buckets import BucketSpan, BufferLayout, Span, gaps

IN_FLIGHT = 2  # temporary buckets that exist at a time


class Bucket:
    """Gradients that are reduced by one message: an all-reduce, after which every rank has the whole sum.

    Args:
        memory: the tensor that lasts from step to step: here all of the bucket.
        span: its place in the buffer.
        members: {name: (span in the buffer, shape)} of its parameters.
        axis: ranks that hold replicas of the parameters.
        instances: ranks that own the same shard.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        span: BucketSpan,
        members: dict[str, tuple[Span, torch.Size]],
        axis: Axis,
        instances: Axis = ALONE,
    ) -> None:
        self._memory = memory
        self.span, self.members, self.axis, self.instances = span.span, members, axis, instances
        self.shard = span.shard(axis.rank, axis.size).shifted(-span.span.start)
        self.missing = set(members)
        self.pending: Work | None = None
        self._views: dict[str, torch.Tensor] = {}  # of `memory`, asked for in every pass

    def view(self, data: torch.Tensor, name: str) -> torch.Tensor:
        """A parameter's part of the bucket `data`, in its shape."""
        place, shape = self.members[name]
        return data[place.shifted(-self.span.start).slice].view(shape)

    def place(self, name: str) -> tuple[torch.Tensor, bool]:
        """Where this parameter's next gradient is written, and whether it is added to the values there or replaces
        them."""
        if name not in self._views:
            self._views[name] = self.view(self._memory, name)
        return self._views[name], True

    @property
    def owned(self) -> torch.Tensor:
        """The part of the sum that this rank has after `finish`, flat."""
        return self._memory

    def whole(self) -> torch.Tensor:
        """After `finish`: the whole sum, flat, from the shards of all ranks."""
        return self.owned

    def start(self) -> None:
        """Begin the sum over the axis."""
        assert self.pending is None, "a bucket travels once at a time"
        self.pending = self._begin()

    def cross(self) -> None:
        """After `start`: begin to sum over the instances."""
        if self.instances.size > 1:
            assert self.pending is not None, "cross() before start()"
            self.pending.wait()
            self.pending = all_reduce_start(self.owned, self.instances)

    def finish(self) -> None:
        """Wait for the sum, and be ready for more gradients."""
        assert self.pending is not None, "finish() before start()"
        self._end(self.pending.wait())
        self.pending, self.missing = None, set(self.members)

    def _begin(self) -> Work:
        return all_reduce_start(self._memory, self.axis)

    def _end(self, result: torch.Tensor) -> None:
        """Take the result of the message."""


class ShardedBucket(Bucket):
    """A reduce-scatter writes the sum of this rank's shard in its place; the rest of the bucket is garbage after it."""

    @property
    def owned(self) -> torch.Tensor:
        return self._memory[self.shard.slice]

    def whole(self) -> torch.Tensor:
        return all_gather(self.owned, self.axis)

    def _begin(self) -> Work:
        return reduce_scatter_start(self._memory, self.axis, self.owned)


class TemporaryBucket(ShardedBucket):
    """Only the shard lasts; the bucket has memory from its first gradient of a pass until it has been reduced.

    Args:
        memory: the shard.

    Attributes:
        data: the whole bucket, during a pass; else None.
        empty: the shard has no sum of this step yet, so the next one overwrites it.
    """

    def __init__(self, memory: torch.Tensor, *args: Any) -> None:
        super().__init__(memory, *args)
        self.data: torch.Tensor | None = None
        self.empty = True
        self._written: dict[str, Span] = {}

    def place(self, name: str) -> tuple[torch.Tensor, bool]:
        again = name in self._written
        self._written[name] = self.members[name][0]
        return self.view(self._allocated(), name), again

    @property
    def owned(self) -> torch.Tensor:
        return self._memory

    def cross(self) -> None:
        """Nothing: shards are summed over instances once a step (`TemporaryGradBuffer.finish`)."""

    def _allocated(self) -> torch.Tensor:
        """The whole bucket; uninitialised if no gradient has been written in this pass."""
        if self.data is None:
            self.data = owned(self._memory.new_empty(self.span.size), "communication")
        return self.data

    def _begin(self) -> Work:
        data = self._allocated()
        for gap in gaps(self._written.values(), self.span):
            data[gap.shifted(-self.span.start).slice].zero_()
        return reduce_scatter_start(data, self.axis, self._memory if self.empty else data[self.shard.slice])

    def _end(self, result: torch.Tensor) -> None:
        if not self.empty:
            self._memory += result
        elif result is not self._memory:  # an axis of one rank
            self._memory.copy_(result)
        self.data, self._written, self.empty = None, {}, False


class GradBuffer:
    """The gradients of a list of parameters, accumulated over the microbatches of a step and then summed over ranks.

    Args:
        params: (name, parameter) in the order of registration.
        layout: their places; sharded if `bucket` is a sharded class.
        axis: ranks that hold replicas of the parameters.
        instances: ranks that own the same shards.
        dtype: dtype of the sums.
        overlap: reduce a bucket while gradients of other buckets are computed.
        bucket: class of the buckets.

    Attributes:
        data: the memory of all buckets that lasts from step to step.
        buckets: in the order in which they are reduced.
        temporary: buckets are reduced in every pass, and only their shards last.
    """

    temporary = False

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        layout: BufferLayout,
        axis: Axis,
        instances: Axis,
        dtype: torch.dtype,
        overlap: bool = False,
        bucket: type[Bucket] = Bucket,
    ) -> None:
        self.params, self.layout, self.overlap = dict(params), layout, overlap
        self.axis, self.instances = axis, instances
        share = axis.size if self.temporary else 1
        self.data = torch.zeros(layout.total // share, dtype=dtype, device=params[0][1].device)
        self.buckets: list[Bucket] = []
        for span in layout.buckets:
            members = {params[i][0]: (layout.params[i], params[i][1].shape) for i in span.members}
            memory = self.data[span.span.start // share : span.span.stop // share]
            self.buckets.append(bucket(memory, span, members, axis, instances))
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.members}
        self._waiting: list[Bucket] = []  # they start in this order
        self._started: list[Bucket] = []
        self._set_up()

    def _set_up(self) -> None:
        self._waiting = list(self.buckets)
        for name, param in self.params.items():
            param.main_grad, _ = self.bucket_of[name].place(name)  # type: ignore[attr-defined]

    def begin_pass(self, names: Collection[str]) -> None:
        """Begin a backward pass that computes gradients of these parameters."""

    def ready(self, name: str) -> None:
        """This parameter's gradient is complete; start every bucket that may now be reduced."""
        self.bucket_of[name].missing.discard(name)
        while self._waiting and not self._waiting[0].missing:
            self._start_next()

    def end_pass(self) -> None:
        """The gradients of a microbatch are complete."""

    def finish(self) -> None:
        """At the end of a step: start the buckets that have not been reduced yet, then wait for all."""
        self._flush()
        self._waiting = list(self.buckets)

    def zero(self) -> None:
        """Zero every gradient, at the start of a step."""
        self.data.zero_()

    def divide(self, divisor: torch.Tensor) -> None:
        """Divide the sums that this rank owns."""
        for part in self._owned:
            exact = torch.promote_types(part.dtype, torch.float32)  # bf16 rounds most counts of tokens
            part.div_(divisor.to(exact).view(1))

    def multiply(self, factor: torch.Tensor | float) -> None:
        """Multiply the sums that this rank owns."""
        for part in self._owned:
            part.mul_(factor)

    @property
    def _owned(self) -> list[torch.Tensor]:
        """The sums that this rank owns: its whole buffer in one piece, or a shard of each bucket."""
        return [bucket.owned for bucket in self.buckets] if self.layout.shards else [self.data]

    def _flush(self) -> None:
        while self._waiting:
            self._start_next()
        if self._started:
            self._started[-1].cross()
        while self._started:
            self._started.pop(0).finish()

    def _start_next(self) -> None:
        bucket = self._waiting.pop(0)
        bucket.start()
        self._started.append(bucket)
        if len(self._started) > 1:
            self._started[-2].cross()


class TemporaryGradBuffer(GradBuffer):
    """Gradients that are reduced in every pass; this rank's shards of the sums are accumulated."""

    temporary = True

    def _set_up(self) -> None:
        """No bucket waits outside of a pass, and no parameter has a `main_grad`."""

    def begin_pass(self, names: Collection[str]) -> None:
        """Buckets without any of these parameters are not reduced in this pass."""
        self._waiting = [bucket for bucket in self.buckets if not bucket.members.keys().isdisjoint(names)]

    def end_pass(self) -> None:
        self._flush()

    def finish(self) -> None:
        """Sum the shards over the instances.

        Raises:
            RuntimeError: gradients were added outside of a pass.
        """
        for bucket in self._temporary:
            if bucket.data is not None:
                raise RuntimeError(
                    f"gradients of {', '.join(sorted(bucket.members)[:3])} were computed outside of a pass; "
                    "put `with ddp.backward_pass():` around `backward()`"
                )
        for bucket in self._temporary:
            if bucket.empty:  # no pass had gradients of it
                bucket.owned.zero_()
        all_reduce(self.data, self.instances)

    def zero(self) -> None:
        for bucket in self._temporary:
            bucket.empty = True

    @property
    def _temporary(self) -> list[TemporaryBucket]:
        return self.buckets  # type: ignore[return-value]

    @property
    def _owned(self) -> list[torch.Tensor]:
        return [self.data]

    def _start_next(self) -> None:
        super()._start_next()
        while len(self._started) >= (IN_FLIGHT if self.overlap else 1):
            self._started.pop(0).finish()
