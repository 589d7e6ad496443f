"""Data parallelism: the same weights everywhere, other samples, one sum.

The problem in a sentence: D replicas see different samples and must take the same step, without waiting for the
network any longer than they must.

Each replica adds its gradients into the buffer of `parallel/buckets`. In the backward pass of the *last* microbatch
of a step a bucket is all-reduced as soon as its last gradient arrives, while the layers before it are still being
computed:

    backward   |  layer 3  |  layer 2  |  layer 1  |  layer 0  |
    network                | bucket 0  |    bucket 1   |  bucket 2 |      only the last one is waited for

| what                  | when                                   | payload                       |
|-----------------------|----------------------------------------|-------------------------------|
| all-reduce per bucket | last microbatch (`no_sync` for others) | 4 bytes per parameter, over dp_cp |

Where weights have the buffer's dtype, a linear layer's backward adds its dW to the buffer in the very product that
computes it (`layers/products.py`; Megatron's `gradient_accumulation_fusion`): the gradient itself never exists, and one
pass over it is saved.

Every gradient enters through the sink of its parameter (`BufferSink`, which is `param.gradient_sink`): that of a
product as just said, any other when autograd has put it into `param.grad`, and one that a pipeline has put off when it
is computed.

Gradients are *summed*, never averaged here. A replica does not know how many tokens the others counted, so it cannot
know the divisor; the mean of per-rank means is a different number as soon as the counts differ. The one division, by
the global token count, is in `parallel/finalize.py`.

Experts have a buffer of their own, because other ranks hold copies of them: edp, which is what expert parallelism
leaves of tp x cp x dp. Tokens of the other ranks have reached an expert by then, and with them their gradients.

Li et al. 2020 (arXiv 2006.15704). Megatron-LM: `megatron/core/distributed/distributed_data_parallel.py`.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from minimegatron.comm.mesh import Mesh
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.parallel.balance import ExpertLoad
from minimegatron.parallel.buckets import DEFAULT_BUCKET_SIZE, GradBuffer


class BufferSink:
    """Adds a parameter's gradients to the buffer (`layers.products.GradientSink`).

    Args:
        ddp: the wrapper, which is told when a gradient is complete.
        name: the parameter's logical name.
        param: the parameter, which has its view of the buffer as `main_grad`.

    Attributes:
        fuses: a product may be added to the buffer as it is computed: the weight has the buffer's dtype.
    """

    def __init__(self, ddp: DistributedDataParallel, name: str, param: nn.Parameter) -> None:
        # Weakly: a parameter keeps its hooks where the garbage collector does not look, so a hook that held the wrapper
        # would keep the model, the buffer and every process group alive for ever.
        self._wrapper = weakref.ref(ddp)
        self._name = name
        self._main_grad: torch.Tensor = param.main_grad  # type: ignore[attr-defined]
        self._added = False  # in this backward pass, by a product
        self.fuses = param.dtype == self._main_grad.dtype

    def add_product(self, dy: torch.Tensor, x: torch.Tensor) -> None:
        """In a backward pass: add dy^T x; `collect` follows."""
        self._main_grad.addmm_(dy.reshape(-1, dy.shape[-1]).t(), x.reshape(-1, x.shape[-1]))
        self._added = True

    def add(self, grad: torch.Tensor) -> None:
        """In a backward pass: add a gradient that autograd is not given; `collect` follows."""
        self._main_grad.add_(grad)
        self._added = True

    def accumulate(self, grad: torch.Tensor) -> None:
        """Add a gradient, which is complete with it: that of autograd, or one that was put off (a pipeline's W)."""
        self._main_grad.add_(grad)
        self._ddp.complete(self._name)

    def collect(self, param: torch.Tensor) -> None:
        """Autograd is done with the parameter: take `param.grad`, or learn that a product has been added."""
        added, self._added = self._added, False
        if param.grad is not None:
            self.accumulate(param.grad)
            param.grad = None
        elif added:  # else it was put off, and comes through `accumulate`
            self._ddp.complete(self._name)

    @property
    def _ddp(self) -> DistributedDataParallel:
        ddp = self._wrapper()
        assert ddp is not None, "the wrapper that owns the gradient buffer is gone; keep it while training"
        return ddp


class DistributedDataParallel(nn.Module):
    """Wrap a model so that its gradients are summed over the ranks that hold the same weights.

    Args:
        module: the model; every trainable parameter gets `main_grad`, an fp32 view into the buffer.
        mesh: gradients are summed over `mesh.dp_cp`, those of experts over `mesh.edp`.
        bucket_size: elements of a bucket; default max(40e6, 1e6 * dp_cp). Without `overlap` there is one bucket.
        overlap: reduce buckets while the backward pass runs.
        grad_dtype: of the buffer.

    Attributes:
        buffer: of all parameters but experts.
        grad_buffers: (buffer, axis over which it is summed), experts last where there are some.
        expert_load: what the routers did in the last finished step (`parallel/balance.py`); None without experts.
        loss_names: of the losses that the last pipeline stage reports (`training/reports.py`): in an evaluation and in
            a step; empty until it has said them.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        bucket_size: int | None = None,
        overlap: bool = False,
        grad_dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.module = module
        self.mesh = mesh
        self.overlap = overlap
        self._sync: Collection[str] | None = None  # parameters whose gradient is now complete; None means all
        size = (bucket_size or max(DEFAULT_BUCKET_SIZE, 1_000_000 * mesh.dp_cp.size)) if overlap else None
        trainable = [(n, p) for n, p in logical_parameters(module) if p.requires_grad]
        dense = [(n, p) for n, p in trainable if layout_of(p).experts is None]
        experts = [(n, p) for n, p in trainable if layout_of(p).experts is not None]
        self.buffer = GradBuffer(dense, size, grad_dtype)
        self.grad_buffers = [(self.buffer, mesh.dp_cp)]
        self.expert_load: ExpertLoad | None = None
        self.loss_names: tuple[list[str], list[str]] = ([], [])
        if experts:
            self.grad_buffers.append((GradBuffer(experts, size, grad_dtype), mesh.edp))
        self._names = {param: name for name, param in trainable}
        for name, param in trainable:
            sink = BufferSink(self, name, param)
            param.gradient_sink = sink  # type: ignore[attr-defined]
            param.register_post_accumulate_grad_hook(sink.collect)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def complete(self, name: str) -> None:
        """This gradient of a microbatch is there; the last one of a step may travel."""
        if self._sync is None or name in self._sync:
            self.ready((name,))

    def ready(self, names: Iterable[str]) -> None:
        """These gradients are complete: with `overlap` their buckets may travel."""
        if self.overlap:
            for name in names:
                for buffer, axis in self.grad_buffers:
                    if name in buffer.params:
                        buffer.ready(name, axis)

    def name_of(self, param: torch.Tensor) -> str:
        """The logical name of one of the trainable parameters."""
        return self._names[param]  # type: ignore[index]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate; for every microbatch of a step but the last."""
        with self.sync_only(()):
            yield

    @contextlib.contextmanager
    def sync_only(self, names: Collection[str]) -> Iterator[None]:
        """Only accumulate, but for these parameters, whose last gradient of the step is computed in the block."""
        self._sync, before = names, self._sync
        try:
            yield
        finally:
            self._sync = before

    def finish_grad_sync(self) -> None:
        """After this every `main_grad` is the sum over its axis. Call once a step, after the last backward pass."""
        for buffer, axis in self.grad_buffers:
            buffer.finish(axis)

    def zero_grad_buffer(self) -> None:
        """Forget the gradients; call at the start of every step."""
        for buffer, _ in self.grad_buffers:
            buffer.data.zero_()

    def scale_gradients(self, factor: torch.Tensor | float) -> None:
        """Multiply every gradient."""
        for buffer, _ in self.grad_buffers:
            buffer.data.mul_(factor)

    @property
    def params(self) -> dict[str, nn.Parameter]:
        """Every trainable parameter by its logical name."""
        return {name: param for buffer, _ in self.grad_buffers for name, param in buffer.params.items()}
