"""The weights' half of a backward pass, put off until later.

The problem in a sentence: the stage before waits for dx and for nothing else, but backward computes dW as well before
it lets go.

The backward of a linear layer `y = x A^T + b` is two matrix products of equal size:

    dx = dy A             the stage before waits for it                B of a schedule
    dA = dy^T x           nobody waits for it, but the optimizer       W of a schedule

With a `DeferredGradients` at hand (`ColumnParallelLinear.deferred`) a linear layer computes dx and puts (A, x, dy) in
the queue; `compute` does the other product whenever the schedule says. The price is memory: x and dy of every linear
layer stay until then. With sequence parallelism x is kept cut over the sequence and gathered when dA is computed; under
recompute it is the recomputed x. Norms, embeddings and biases are cheap and stay in B.

The queue is an object that the owner of the layers passes to them; nothing is global.

Qi et al. 2023 (arXiv 2401.10241). Not in Megatron-LM, whose `delay_wgrad_compute` puts dA off within one microbatch.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator

import torch
from torch import nn

from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import all_gather


@dataclasses.dataclass(frozen=True)
class Product:
    """A product dA = dy^T x that is still to be computed.

    Attributes:
        weight: A [o, i].
        x: [..., i]; a rank's own tokens where `gather` is an axis.
        dy: [..., o].
        gather: axis over which x must first be gathered along its first dim, or None.
    """

    weight: torch.Tensor
    x: torch.Tensor
    dy: torch.Tensor
    gather: Axis | None = None

    def compute(self) -> torch.Tensor:
        """dA [o, i]."""
        x = self.x if self.gather is None else all_gather(self.x, self.gather)
        return weight_gradient(x, self.dy)


class DeferredGradients:
    """A queue of products."""

    def __init__(self) -> None:
        self._queue: list[Product] = []

    def put(self, product: Product) -> None:
        self._queue.append(product)

    def take(self) -> list[Product]:
        """Everything queued so far, in order; the queue is empty afterwards."""
        queue, self._queue = self._queue, []
        return queue


def weight_gradient(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """x [..., i], dy [..., o] -> dy^T x [o, i]."""
    return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


@contextlib.contextmanager
def deferring(model: nn.Module, queue: DeferredGradients | None) -> Iterator[None]:
    """Linear layers of the model that run in the block put their products into `queue`; with None, nothing changes."""
    layers = [module for module in model.modules() if hasattr(module, "deferred")] if queue is not None else []
    for layer in layers:
        layer.deferred = queue  # type: ignore[assignment]
    try:
        yield
    finally:
        for layer in layers:
            layer.deferred = None  # type: ignore[assignment]


def compute(products: list[Product], accumulate: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
    """Compute the products in order, handing each to `accumulate(weight, dA)`; the list is emptied on the way."""
    products.reverse()
    while products:
        product = products.pop()
        with torch.no_grad():
            accumulate(product.weight, product.compute())


def add_to_grad(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    """What autograd does with the gradient of a leaf."""
    weight.grad = gradient if weight.grad is None else weight.grad + gradient
