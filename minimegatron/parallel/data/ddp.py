"""Data parallelism for training: buckets are reduced while gradients are computed; states may be sharded (ZeRO).

The problem in a sentence: D replicas see different samples and must take the same step, without waiting for the network
any longer than they must. (`parallel/data/plain` is the same idea in one short file, to be read first.)

Each replica adds its gradients into a flat buffer, cut into buckets (`parallel/data/buckets`,
`parallel/data/grad_buffer`). In the backward pass of the *last* microbatch of a step a bucket is summed over the
replicas as soon as its last gradient arrives, while the layers before it are still being computed:

    backward   |  layer 3  |  layer 2  |  layer 1  |  layer 0  |
    network                | bucket 0  |    bucket 1   |  bucket 2 |      only the last one is waited for

The sharding strategy (`parallel/data/zero`) decides which part of gradients, optimizer state and weights a rank keeps.

**How a gradient enters its buffer.** Each parameter has a `grad_accumulator` (`GradAccumulator`), which adds to the
buffer and tells this wrapper when a gradient is complete. There are three sources: a linear layer's wgrad product,
which is added to the buffer as it is computed, so that the gradient itself never exists (`layers/wgrad`, Megatron's
`gradient_accumulation_fusion`; where the weight has the buffer's dtype); autograd, which puts a gradient into
`param.grad`; and a pipeline that has deferred a wgrad.

**Sums, not means.** A replica does not know how many tokens the others counted, so it cannot know the divisor; the mean
of per-rank means is a different number as soon as the counts differ. The one division, by the global token count, is in
`parallel/data/finalize`.

**Experts** have buffers of their own, because their replicas are other ranks: those of `edp`, the ranks of tp x cp x dp
with the same experts. The dispatcher has brought tokens of other ranks to the expert, so its gradient includes theirs.

Li et al. 2020 (arXiv 2006.15704). Megatron-LM: `megatron/core/distributed/distributed_data_parallel.py`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.parallel.data.buckets import DEFAULT_BUCKET_SIZE
from minimegatron.parallel.data.data_parallel import DataParallel, Shard
from minimegatron.parallel.data.grad_buffer import Bucket
from minimegatron.parallel.data.zero import STRATEGIES


def data_parallel(module: nn.Module, mesh: Mesh, grad_dtype: torch.dtype = torch.float32) -> DataParallel:
    """Wrap the model as `mesh.parallel` says.

    Args:
        module: the model of this rank, on its device.
        mesh: its layout.
        grad_dtype: dtype in which gradients are accumulated.
    """
    parallel = mesh.parallel
    if parallel.use_torch_fsdp2:
        from minimegatron.parallel.data.torch_fsdp import TorchFSDP2  # its import takes half a second

        return TorchFSDP2(module, mesh)
    return DistributedDataParallel(
        module,
        mesh,
        parallel.ddp_bucket_size,
        parallel.overlap_grad_reduce,
        grad_dtype,
        parallel.data_parallel_sharding_strategy,
        parallel.overlap_param_gather,
    )


class DistributedDataParallel(DataParallel):
    """Wrap a model so that its gradients are summed over the ranks that hold the same weights.

    Args:
        module: the model; every trainable parameter gets a place in a gradient buffer, and a view of it as `main_grad`
            if the buffer lasts from step to step.
        mesh: gradients are summed over `mesh.dp_cp`, those of experts over `mesh.edp`; shards are divided over
            `mesh.dp_shard`, `mesh.edp_shard`.
        bucket_size: elements of a bucket; default max(40e6, 1e6 * dp_cp). There is one bucket if none is reduced
            before the last gradient is complete.
        overlap: reduce buckets while the backward pass runs.
        grad_dtype: dtype of the buffers.
        sharding: what is sharded over replicas: a key of `zero.STRATEGIES`.
        overlap_param_gather: wait for updated weights when they are used, not after the step.

    Attributes:
        strategy: owns the buffers, and decides when they are reduced and gathered.
        grad_buffers: those of experts last; if weights are sharded, one for each dtype of weights.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        bucket_size: int | None = None,
        overlap: bool = False,
        grad_dtype: torch.dtype = torch.float32,
        sharding: str = "no_shard",
        overlap_param_gather: bool = False,
    ) -> None:
        super().__init__(module, mesh)
        self.sharding, self.overlap = sharding, overlap
        bucket_size = bucket_size or max(DEFAULT_BUCKET_SIZE, 1_000_000 * mesh.dp_cp.size)
        self.strategy = STRATEGIES[sharding](module, mesh, bucket_size, overlap, grad_dtype, overlap_param_gather)
        trainable = [(n, p) for n, p in logical_parameters(module) if p.requires_grad]
        dense = [(n, p) for n, p in trainable if layout_of(p).experts is None]
        experts = [(n, p) for n, p in trainable if layout_of(p).experts is not None]
        self.strategy.add_params(dense, mesh.dp_shard, mesh.dp_instances)
        self.strategy.add_params(experts, mesh.edp_shard, mesh.edp_instances)
        self.strategy.register_hooks()
        self.grad_buffers = self.strategy.grad_buffers
        self._last: Collection[str] = frozenset(self.names.values())  # their last gradient of the step comes next
        for name, param in trainable:
            bucket = self.strategy.buffer_of[name].bucket_of[name]
            accumulator = GradAccumulator(self, name, bucket, fuses=param.dtype == grad_dtype)
            param.grad_accumulator = accumulator  # type: ignore[attr-defined]
            param.register_post_accumulate_grad_hook(accumulator.collect)

    def complete(self, name: str) -> None:
        """A parameter's gradient of a microbatch is complete."""
        self.strategy.complete(name, last=name in self._last)

    def ready(self, names: Iterable[str]) -> None:
        for name in names:
            self.strategy.complete(name, last=True)

    @contextlib.contextmanager
    def sync_only(self, names: Collection[str]) -> Iterator[None]:
        self._last, before = names, self._last
        try:
            yield
        finally:
            self._last = before

    @contextlib.contextmanager
    def backward_pass(self, module: nn.Module | None = None) -> Iterator[None]:
        self.strategy.begin_pass(module or self.module)
        yield
        self.strategy.end_pass()

    def release_weights(self) -> None:
        self.strategy.release_weights()

    def finish_grad_sync(self) -> None:
        self.strategy.finish()

    def zero_grad_buffer(self) -> None:
        for buffer in self.grad_buffers:
            buffer.zero()

    def divide_gradients(self, divisor: torch.Tensor) -> None:
        for buffer in self.grad_buffers:
            buffer.divide(divisor)

    def scale_gradients(self, factor: torch.Tensor | float) -> None:
        for buffer in self.grad_buffers:
            buffer.multiply(factor)

    def shards(self) -> dict[str, Shard]:
        return self.strategy.shards()

    def whole_gradients(self) -> dict[str, torch.Tensor]:
        gradients: dict[str, torch.Tensor] = {}
        for bucket in (bucket for buffer in self.grad_buffers for bucket in buffer.buckets):
            whole = bucket.whole()
            gradients |= {name: bucket.view(whole, name) for name in bucket.members}
        return {name: gradients[name] for name in self.params}

    def held(self) -> dict[str, list[torch.Tensor]]:
        return self.strategy.held()

    def start_param_gather(self) -> None:
        self.strategy.start_param_gather()

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[None]:
        with self.strategy.whole_weights():
            yield


class GradAccumulator:
    """Adds the gradients of one parameter to its buffer (the protocol of `layers/wgrad`).

    Args:
        ddp: the wrapper, which is told when a gradient is complete.
        name: the parameter's logical name.
        bucket: the bucket in which its gradient is accumulated.
        fuses: whether wgrad may be added to the buffer as it is computed: the weight has the buffer's dtype.
    """

    def __init__(self, ddp: DistributedDataParallel, name: str, bucket: Bucket, fuses: bool) -> None:
        # Weakly: the garbage collector does not see what the hooks of a parameter refer to, so a hook that held the
        # wrapper would keep the model, the buffers and every process group alive for ever.
        self._wrapper = weakref.ref(ddp)
        self._name, self._bucket = name, bucket
        self._added = False  # in this backward pass, not through `param.grad`
        self.fuses = fuses

    def add_wgrad(self, dy: torch.Tensor, x: torch.Tensor) -> None:
        """In a backward pass: add the wgrad dy^T x; autograd calls `collect` afterwards."""
        place, again = self._bucket.place(self._name)
        place.addmm_(dy.reshape(-1, dy.shape[-1]).t(), x.reshape(-1, x.shape[-1]), beta=int(again))
        self._added = True

    def add(self, grad: torch.Tensor) -> None:
        """In a backward pass: add a gradient that autograd does not get; autograd calls `collect` afterwards."""
        self._add(grad)
        self._added = True

    def add_rows(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """In a backward pass: add rows of a table; autograd calls `collect` afterwards."""
        place, again = self._bucket.place(self._name)
        if not again:
            place.zero_()
        place.index_add_(0, ids, rows)
        self._added = True

    def accumulate(self, grad: torch.Tensor) -> None:
        """Add a complete gradient: from autograd, or a deferred wgrad."""
        self._add(grad)
        self._ddp.complete(self._name)

    def collect(self, param: torch.Tensor) -> None:
        """A hook, called when autograd has accumulated: take `param.grad`; if it is None, wgrad was added or
        deferred."""
        added, self._added = self._added, False
        if param.grad is not None:
            self.accumulate(param.grad)
            param.grad = None
        elif added:  # else it is deferred, and comes through `accumulate`
            self._ddp.complete(self._name)

    def _add(self, grad: torch.Tensor) -> None:
        place, again = self._bucket.place(self._name)
        if again:
            place.add_(grad)
        else:
            place.copy_(grad)

    @property
    def _ddp(self) -> DistributedDataParallel:
        ddp = self._wrapper()
        assert ddp is not None, "the wrapper that owns the gradient buffer is gone; keep it while training"
        return ddp
