"""The way of a gradient into the flat buffer, and the word that it is complete.

A parameter has one sink (`param.gradient_sink`). A linear layer gives it the factors of dW, which one product adds to
the buffer; autograd's own gradient is taken from `param.grad`; a pipeline hands in one that it had
put off.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from minimegatron.parallel.data.grad_buffer import Bucket


class Wrapper(Protocol):
    """What is told of a complete gradient: `parallel.ddp.DistributedDataParallel`."""

    def complete(self, name: str) -> None: ...


class BufferSink:
    """Adds a parameter's gradients to the buffer (`layers.wgrad.GradientSink`).

    Args:
        ddp: the wrapper, which is told when a gradient is complete.
        name: the parameter's logical name.
        bucket: where its gradient is added up.
        fuses: a product may be added to the buffer as it is computed: the weight has the buffer's dtype.
    """

    def __init__(self, ddp: Wrapper, name: str, bucket: Bucket, fuses: bool) -> None:
        # Weakly: a parameter keeps its hooks where the garbage collector does not look, so a hook that held the wrapper
        # would keep the model, the buffer and every process group alive for ever.
        self._wrapper = weakref.ref(ddp)
        self._name, self._bucket = name, bucket
        self._added = False  # in this backward pass, by a product
        self.fuses = fuses

    def add_product(self, dy: torch.Tensor, x: torch.Tensor) -> None:
        """In a backward pass: add dy^T x; `collect` follows."""
        place, there = self._bucket.place(self._name)
        place.addmm_(dy.reshape(-1, dy.shape[-1]).t(), x.reshape(-1, x.shape[-1]), beta=int(there))
        self._added = True

    def add(self, grad: torch.Tensor) -> None:
        """In a backward pass: add a gradient that autograd is not given; `collect` follows."""
        self._put(grad)
        self._added = True

    def accumulate(self, grad: torch.Tensor) -> None:
        """Add a gradient, which is complete with it: that of autograd, or one that was put off (a pipeline's W)."""
        self._put(grad)
        self._ddp.complete(self._name)

    def collect(self, param: torch.Tensor) -> None:
        """Autograd is done with the parameter: take `param.grad`, or learn that a product has been added."""
        added, self._added = self._added, False
        if param.grad is not None:
            self.accumulate(param.grad)
            param.grad = None
        elif added:  # else it was put off, and comes through `accumulate`
            self._ddp.complete(self._name)

    def _put(self, grad: torch.Tensor) -> None:
        place, there = self._bucket.place(self._name)
        if there:
            place.add_(grad)
        else:
            place.copy_(grad)

    @property
    def _ddp(self) -> Wrapper:
        ddp = self._wrapper()
        assert ddp is not None, "the wrapper that owns the gradient buffer is gone; keep it while training"
        return ddp
