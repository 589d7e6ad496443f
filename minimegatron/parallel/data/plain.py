"""Data parallelism in its plainest form: the same weights everywhere, other samples, one sum.

The problem in a sentence: D replicas see different samples and must take the same step, and communication should
overlap with the backward pass.

Each replica adds up the gradients of its microbatches. In the backward pass of the *last* one, autograd calls a hook as
soon as the gradient of a parameter is complete. Parameters are grouped in buckets of about `bucket_size` elements, one
message each; the last layer's gradients come first, so the first bucket is full first, and travels while the layers
before it are still being computed:

    forward order    embedding  layer 0  layer 1  layer 2  layer 3  output
    backward         | output  |  layer 3  |  layer 2  |  layer 1  |  layer 0  |
    network                        | bucket 0  |    bucket 1   |   bucket 2    |   only the last is waited for

| communication of a step | bytes a rank sends, n parameters in fp32 |
|-------------------------|------------------------------------------|
| all-reduce of buckets   | 2 (D-1)/D 4n                             |

Three rules make it right:

- Gradients are *summed*, not averaged. A replica does not know how many tokens the others counted; the mean of per-rank
  means is a different number as soon as the counts differ. `parallel/data/finalize` divides once, by the count of all.
- Buckets start in one order on all ranks. If a parameter got no gradient on one rank only, the ranks would otherwise
  start different messages, which gives wrong numbers or hangs.
- Gradients of microbatches are added up in fp32 by default: 1000 ones added in bf16 stop at 256.

Replicas of a weight are the ranks of dp and of cp; those of an expert are the ranks of `edp`.

This is the simplified version. Training uses `parallel/data/ddp`, and a test compares the two; `ddp` also adds wgrad
to the buffer as it is computed, and shards state, gradients and weights over the replicas (ZeRO).

Li et al. 2020 (arXiv 2006.15704). Megatron-LM: `megatron/core/distributed/distributed_data_parallel.py`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterator

import torch
from torch import nn

from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import Work, all_reduce_start
from minimegatron.comm.mesh import Mesh
from minimegatron.layers.param import layout_of
from minimegatron.parallel.data.data_parallel import DataParallel, Shard


class Bucket:
    """The gradients of some parameters, one after the other in `data`; `param.main_grad` is a parameter's place."""

    def __init__(self, params: list[nn.Parameter], axis: Axis, dtype: torch.dtype) -> None:
        self.params, self.axis = params, axis
        self.data = torch.zeros(sum(p.numel() for p in params), dtype=dtype, device=params[0].device)
        for param, place in zip(params, self.data.split([p.numel() for p in params]), strict=True):
            param.main_grad = place.view(param.shape)  # type: ignore[attr-defined]
        self.missing = set(params)  # parameters whose final gradient of this step is still to come
        self.work: Work | None = None  # the message under way


class PlainDataParallel(DataParallel):
    """Wrap a model so that its gradients are summed over the ranks that hold the same weights.

    Args:
        module: the model.
        mesh: gradients are summed over `mesh.dp_cp`, those of experts over `mesh.edp`.
        bucket_size: a bucket is closed when it has at least this many elements.
        grad_dtype: dtype of the sums.
    """

    def __init__(
        self, module: nn.Module, mesh: Mesh, bucket_size: int = 40_000_000, grad_dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(module, mesh)
        self.last_microbatch = True
        self.buckets: list[Bucket] = []
        params = list(reversed(self.params.values()))  # in the order in which backward reaches them
        dense = [p for p in params if layout_of(p).experts is None]
        experts = [p for p in params if layout_of(p).experts is not None]
        for group, axis in ((dense, mesh.dp_cp), (experts, mesh.edp)):
            bucket: list[nn.Parameter] = []
            for param in group:
                bucket.append(param)
                if param is group[-1] or sum(p.numel() for p in bucket) >= bucket_size:
                    self.buckets.append(Bucket(bucket, axis, grad_dtype))
                    bucket = []
        self._bucket_of = {param: bucket for bucket in self.buckets for param in bucket.params}
        wrapper = weakref.proxy(self)  # a hook that held the wrapper would keep it alive for ever
        for param in params:
            param.register_post_accumulate_grad_hook(lambda p: wrapper.collect(p))

    def collect(self, param: nn.Parameter) -> None:
        """Add `param.grad` to its bucket; on the last microbatch start the complete buckets, in order."""
        if param.grad is None:  # a schedule computes this wgrad later (`layers/wgrad`): `finish_grad_sync` finds it
            return
        param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
        param.grad = None
        if self.last_microbatch:
            self._bucket_of[param].missing.discard(param)
            for bucket in self.buckets:
                if bucket.missing:
                    break
                if bucket.work is None:
                    bucket.work = all_reduce_start(bucket.data, bucket.axis)

    def finish_grad_sync(self) -> None:
        """After the last backward pass of a step: start the buckets that have not started, and wait for all."""
        for param in self.params.values():
            if param.grad is not None:
                self.collect(param)
        messages = [bucket.work or all_reduce_start(bucket.data, bucket.axis) for bucket in self.buckets]
        for bucket, work in zip(self.buckets, messages, strict=True):
            work.wait()
            bucket.work, bucket.missing = None, set(bucket.params)

    @contextlib.contextmanager
    def sync_only(self, names: Collection[str]) -> Iterator[None]:
        """In the block gradients are only accumulated (`no_sync`)."""
        self.last_microbatch = False
        yield
        self.last_microbatch = True

    def zero_grad_buffer(self) -> None:
        for bucket in self.buckets:
            bucket.data.zero_()

    def divide_gradients(self, divisor: torch.Tensor) -> None:
        for bucket in self.buckets:
            bucket.data.div_(divisor)

    def shards(self) -> dict[str, Shard]:
        """Every rank updates all of every parameter."""
        return {
            name: Shard(piece=None, grad=p.main_grad, data=p.detach())  # type: ignore[attr-defined]
            for name, p in self.params.items()
        }

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        return {name: shard.grad for name, shard in self.shards().items()}
