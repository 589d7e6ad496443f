"""Gradients in flat buffers whose buckets are summed over the replicas: all of each bucket, or each rank its shard.

The problem in a sentence: D replicas have D different gradients, the step needs their sum, and how much of that sum a
rank keeps decides how much memory a model costs.

| bucket       | what travels            | gradient memory of a rank | every rank ends with | known as        |
|--------------|-------------------------|---------------------------|----------------------|-----------------|
| `Replicated` | all-reduce, once a step | all of it                 | the whole sum        | plain DDP       |
| `Sharded`    | reduce-scatter, once    | all of it                 | its shard of the sum | ZeRO-1          |
| `Fleeting`   | reduce-scatter, a pass  | its shard, and two buckets| its shard of the sum | ZeRO-2, ZeRO-3  |

    Replicated, Sharded    microbatch 1  + microbatch 2 + ... -> bucket -> sum over ranks
    Fleeting               microbatch 1 -> bucket -> sum over ranks -> shard     then the bucket is given back
                           microbatch 2 -> bucket -> sum over ranks -> + shard

With several *instances* (`num_distributed_optimizer_instances`, HSDP) shards are dealt out among the ranks of an
instance, and each shard's sum still has to be added up over the instances, which an all-reduce of the shard does:

    4 ranks, 2 instances     reduce-scatter of a bucket over {0, 1} and {2, 3}     then
                             all-reduce of its first half over {0, 2}, of its second over {1, 3}

More memory than one instance needs, and in exchange most of the traffic stays among neighbours. Shards that last cross
once a step; the others as soon as the next bucket has started.

A sum of sums is the same sum, so a `Fleeting` bucket may be reduced as often as one likes; it costs a reduce-scatter a
microbatch where the others pay one a step.

Buckets start strictly in order. A parameter that gets no gradient on one rank only would otherwise make the ranks start
them in different orders, and mismatched collectives return wrong numbers or hang.

fp32 for a reason: adding 1000 ones in bf16 stops at 256. `--main-grads-dtype bf16` halves memory and traffic for it.

Rajbhandari et al. 2020 (arXiv 1910.02054), section 5. Megatron-LM:
`megatron/core/distributed/param_and_grad_buffer.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from minimegatron.comm.axis import ALONE, Axis
from minimegatron.comm.collectives import Work, all_reduce, all_reduce_start, reduce_scatter_start
from minimegatron.memory import owned
from minimegatron.parallel.data.buckets import BucketSpan, BufferLayout, Span, gaps

IN_FLIGHT = 2  # fleeting buckets that exist at a time


class Bucket:
    """What all kinds share: which gradients it waits for, and the message under way.

    Args:
        span: its place in the buffer.
        members: {name: (span in the buffer, shape)} of its parameters.
        axis: ranks that hold replicas, or share them out.
        instances: ranks that own the same shard.
    """

    def __init__(
        self, span: BucketSpan, members: dict[str, tuple[Span, torch.Size]], axis: Axis, instances: Axis = ALONE
    ) -> None:
        self.span, self.members, self.axis, self.instances = span.span, members, axis, instances
        self.shard = span.shard(axis.rank, axis.size).shifted(-span.span.start)
        self.missing = set(members)
        self.pending: Work | None = None

    def view(self, data: torch.Tensor, name: str) -> torch.Tensor:
        """A parameter's part of the bucket's memory, in its shape."""
        place, shape = self.members[name]
        return data[place.shifted(-self.span.start).slice].view(shape)

    def grad(self, name: str) -> torch.Tensor:
        """Where this parameter's gradient is added up."""
        raise NotImplementedError

    def place(self, name: str) -> tuple[torch.Tensor, bool]:
        """Where this parameter's next gradient goes, and whether it is added to what is there or replaces it."""
        return self.grad(name), True

    @property
    def owned(self) -> torch.Tensor:
        """The part of the sum that this rank has after `finish`, flat."""
        raise NotImplementedError

    def start(self) -> None:
        """Begin the sum over the axis."""
        assert self.pending is None, "a bucket travels once at a time"
        self.pending = self._begin()

    def cross(self) -> None:
        """After `start`: begin the sum over the instances."""
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
        raise NotImplementedError

    def _end(self, result: torch.Tensor) -> None:
        """Take the result of the message."""


class Replicated(Bucket):
    """Every rank gets the whole sum."""

    def __init__(self, data: torch.Tensor, *where: object) -> None:
        super().__init__(*where)  # type: ignore[arg-type]
        self.data = data

    def grad(self, name: str) -> torch.Tensor:
        return self.view(self.data, name)

    @property
    def owned(self) -> torch.Tensor:
        return self.data

    def _begin(self) -> Work:
        return all_reduce_start(self.data, self.axis)


class Sharded(Replicated):
    """The sum of this rank's shard replaces its own gradients there; the rest of the bucket is of no use then."""

    @property
    def owned(self) -> torch.Tensor:
        return self.data[self.shard.slice]

    def _begin(self) -> Work:
        return reduce_scatter_start(self.data, self.axis, self.owned)


class Fleeting(Bucket):
    """Only the shard lasts; the bucket exists from its first gradient of a pass to the end of its message.

    Attributes:
        empty: nothing has come since `GradBuffer.zero`, so the first sum is written to the shard and not added to it.
    """

    def __init__(self, shard: torch.Tensor, *where: object) -> None:
        super().__init__(*where)  # type: ignore[arg-type]
        self._owned = shard
        self.empty = True
        self.data: torch.Tensor | None = None
        self._written: dict[str, Span] = {}

    def grad(self, name: str) -> torch.Tensor:
        assert name in self._written, "no gradient of this parameter has come in this pass"
        return self.view(self._opened(), name)

    def place(self, name: str) -> tuple[torch.Tensor, bool]:
        there = name in self._written
        self._written[name] = self.members[name][0]
        return self.grad(name), there

    @property
    def owned(self) -> torch.Tensor:
        return self._owned

    def _opened(self) -> torch.Tensor:
        """The bucket's memory; what has not been written yet is anything."""
        if self.data is None:
            self.data = owned(self._owned.new_empty(self.span.size), "communication")
        return self.data

    def _begin(self) -> Work:
        data = self._opened()
        for gap in gaps(self._written.values(), self.span):
            data[gap.shifted(-self.span.start).slice].zero_()
        return reduce_scatter_start(data, self.axis, self._owned if self.empty else data[self.shard.slice])

    def _end(self, result: torch.Tensor) -> None:
        if not self.empty:
            self._owned += result
        elif result is not self._owned:  # an axis of one rank
            self._owned.copy_(result)
        self.data, self._written, self.empty = None, {}, False


class GradBuffer:
    """The gradients of a list of parameters.

    Args:
        params: (name, parameter) in the order of registration.
        layout: where they lie; cut into shards unless buckets are `Replicated`.
        kind: class of the buckets.
        axis: ranks that hold replicas of the parameters, or share them out.
        instances: ranks that own the same shards.
        dtype: of the sums.
        overlap: a bucket's message travels while gradients of other buckets are computed.

    Attributes:
        data: all buckets, one after the other; of `Fleeting` ones their shards.
        buckets: in the order in which they travel.
    """

    def __init__(
        self,
        params: Sequence[tuple[str, nn.Parameter]],
        layout: BufferLayout,
        kind: type[Replicated] | type[Fleeting],
        axis: Axis,
        instances: Axis,
        dtype: torch.dtype,
        overlap: bool = False,
    ) -> None:
        self.params, self.layout, self.overlap = dict(params), layout, overlap
        self.axis, self.instances = axis, instances
        self.fleeting = issubclass(kind, Fleeting)
        device = params[0][1].device if params else torch.device("cpu")
        share = axis.size if self.fleeting else 1
        self.data = torch.zeros(layout.total // share, dtype=dtype, device=device)
        self.buckets = [
            kind(self.data[b.span.start // share : b.span.stop // share], b, self._members(b, params), axis, instances)
            for b in layout.buckets
        ]
        self.bucket_of = {name: bucket for bucket in self.buckets for name in bucket.members}
        self._turn: list[Bucket] = [] if self.fleeting else list(self.buckets)  # still to be started, in this order
        self._started: list[Bucket] = []
        if not self.fleeting:
            for name, param in params:
                param.main_grad = self.bucket_of[name].grad(name)  # type: ignore[attr-defined]

    def _members(
        self, bucket: BucketSpan, params: Sequence[tuple[str, nn.Parameter]]
    ) -> dict[str, tuple[Span, torch.Size]]:
        return {params[i][0]: (self.layout.params[i], params[i][1].shape) for i in bucket.members}

    def begin_pass(self, names: Collection[str]) -> None:
        """The next gradients are of these parameters; `Fleeting` buckets of others do not travel in this pass."""
        if self.fleeting:
            self._turn = [bucket for bucket in self.buckets if not bucket.members.keys().isdisjoint(names)]

    def ready(self, name: str) -> None:
        """This parameter's gradient is complete; start every bucket that now may travel."""
        self.bucket_of[name].missing.discard(name)
        while self._turn and not self._turn[0].missing:
            self._start_next()

    def end_pass(self) -> None:
        """The gradients of a microbatch are complete: `Fleeting` buckets have their sums after this."""
        if self.fleeting:
            self._flush()

    def finish(self) -> None:
        """Start what has not travelled yet, then wait for all.

        Raises:
            RuntimeError: gradients came to `Fleeting` buckets outside of a pass.
        """
        lost = [b for b in self.buckets if isinstance(b, Fleeting) and b.data is not None]
        if lost:
            raise RuntimeError(
                f"gradients of {', '.join(sorted(lost[0].members)[:3])} were computed outside of a pass; "
                "put `with ddp.backward_pass():` around `backward()`"
            )
        self._flush()
        if self.fleeting:
            for bucket in self.buckets:
                if isinstance(bucket, Fleeting) and bucket.empty:  # no pass had gradients of it
                    bucket.owned.zero_()
            all_reduce(self.data, self.instances)
        self._turn = [] if self.fleeting else list(self.buckets)

    def _flush(self) -> None:
        while self._turn:
            self._start_next()
        if self._started and not self.fleeting:
            self._started[-1].cross()
        while self._started:
            self._started.pop(0).finish()

    def _start_next(self) -> None:
        bucket = self._turn.pop(0)
        bucket.start()
        self._started.append(bucket)
        if self.fleeting:
            while len(self._started) >= (IN_FLIGHT if self.overlap else 1):
                self._started.pop(0).finish()
        elif len(self._started) > 1:
            self._started[-2].cross()

    def zero(self) -> None:
        """Forget every gradient; for the start of a step."""
        if not self.fleeting:
            self.data.zero_()
        for bucket in self.buckets:
            if isinstance(bucket, Fleeting):
                bucket.empty = True

    def divide(self, divisor: torch.Tensor) -> None:
        """Divide what this rank owns."""
        for part in self._owned:
            exact = torch.promote_types(part.dtype, torch.float32)  # a count of tokens is seldom a number of bf16
            part.div_(divisor.to(exact).view(1))

    def multiply(self, factor: torch.Tensor | float) -> None:
        """Multiply what this rank owns."""
        for part in self._owned:
            part.mul_(factor)

    @property
    def _owned(self) -> list[torch.Tensor]:
        """What this rank has of the sums: all of its buffer in one piece, or a shard of each bucket."""
        whole = self.fleeting or not self.layout.shards
        return [self.data] if whole else [bucket.owned for bucket in self.buckets]
