"""The destination of a linear layer's wgrad: autograd, a gradient buffer, or a queue, to be computed later.

    wgrad = dy^T x        x [..., i], dy [..., o] -> [o, i]

| destination               | chosen when                                | what happens                                |
|---------------------------|--------------------------------------------|---------------------------------------------|
| autograd                  | none of the following applies              | it is returned, and becomes `param.grad`    |
| `weight.grad_accumulator` | data parallelism has a buffer of the       | one GEMM adds it to the buffer (Megatron's  |
|                           | weight's dtype                             | `gradient_accumulation_fusion`)             |
| a `WeightGradStore`       | a schedule that splits the backward pass   | `compute_wgrads` computes it later          |

**Zero bubble.** The backward pass of a linear layer is two products of equal size, and the previous stage waits for
one:

    dgrad = dy A          the previous stage waits for it              B of a schedule
    wgrad = dy^T x        only the optimizer needs it                  W of a schedule

With a store the layer computes dgrad and stores how wgrad is computed. The price is memory: x and dy of every linear
layer stay until then. With sequence parallelism x is kept cut over the sequence and gathered when wgrad is computed;
under recompute it is the recomputed x. Norms, embeddings and biases are cheap and stay in B.

Qi et al. 2023 (arXiv 2401.10241), whose code has a `WeightGradStore` as well. Megatron-LM's `delay_wgrad_compute` puts
wgrad off within one microbatch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn


class GradAccumulator(Protocol):
    """Adds a parameter's gradients to a buffer: `param.grad_accumulator`, where data parallelism has set one.

    Attributes:
        fuses: wgrad may be added to the buffer as it is computed.
    """

    fuses: bool

    def add_wgrad(self, dy: torch.Tensor, x: torch.Tensor) -> None:
        """In a backward pass: add dy^T x. The autograd function then returns None for the weight."""
        ...

    def add(self, grad: torch.Tensor) -> None:
        """In a backward pass: add a gradient. The autograd function then returns None for the weight."""
        ...

    def add_rows(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """In a backward pass: add rows [n, h] to those of the ids [n]. The autograd function then returns None."""
        ...

    def accumulate(self, grad: torch.Tensor) -> None:
        """After a backward pass: add a gradient, as autograd would have done."""
        ...


def grad_accumulator(weight: torch.Tensor) -> GradAccumulator | None:
    """The parameter's accumulator, or None: then its gradient is `weight.grad`."""
    return getattr(weight, "grad_accumulator", None)


def fused_accumulator(weight: torch.Tensor) -> GradAccumulator | None:
    """The accumulator to which a backward pass adds wgrad itself; None where the gradient must go through autograd.

    That is so without an accumulator that fuses, and where the weight has hooks, which see gradients and may change
    them.
    """
    accumulator = grad_accumulator(weight)
    fuses = accumulator is not None and accumulator.fuses and not weight._backward_hooks
    return accumulator if fuses else None


def wgrad(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dy [..., o], x [..., i] -> dy^T x [o, i]."""
    return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def accumulate_wgrad(weight: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """In a backward pass: dy^T x for autograd; None where it has been added to the buffer of `weight` instead."""
    accumulator = fused_accumulator(weight)
    if accumulator is None:
        return wgrad(dy, x)
    accumulator.add_wgrad(dy, x)
    return None


class DeferredWgrad(NamedTuple):
    """The gradient of `weight`, which `compute` gives later."""

    weight: torch.Tensor
    compute: Callable[[], torch.Tensor]


class WeightGradStore:
    """A queue of weight gradients that are computed later."""

    def __init__(self) -> None:
        self._queue: list[DeferredWgrad] = []

    def put(self, weight: torch.Tensor, compute: Callable[[], torch.Tensor]) -> None:
        self._queue.append(DeferredWgrad(weight, compute))

    def take(self) -> list[DeferredWgrad]:
        """Everything queued so far, in order; the queue is empty afterwards."""
        queue, self._queue = self._queue, []
        return queue


@contextlib.contextmanager
def deferring_wgrad(model: nn.Module, store: WeightGradStore | None) -> Iterator[None]:
    """Linear layers of the model that run in the block put wgrad into `store`; with None, nothing changes."""
    layers: list[Any] = []
    if store is not None:
        layers = [module for module in model.modules() if hasattr(module, "wgrad_store")]
    for layer in layers:
        layer.wgrad_store = store
    try:
        yield
    finally:
        for layer in layers:
            layer.wgrad_store = None


@torch.no_grad()
def compute_wgrads(deferred: list[DeferredWgrad]) -> None:
    """Compute the gradients in order; the list is emptied on the way, so that their factors are released.

    A gradient goes to the weight's accumulator, or else to `weight.grad`, as autograd would have done.
    """
    deferred.reverse()
    while deferred:
        weight, compute = deferred.pop()
        accumulator = grad_accumulator(weight)
        if accumulator is not None:
            accumulator.accumulate(compute())
        else:
            add_to_grad(weight, compute())


def add_to_grad(weight: torch.Tensor, grad: torch.Tensor) -> None:
    """Add to `weight.grad`, as autograd does for a leaf."""
    weight.grad = grad if weight.grad is None else weight.grad + grad
