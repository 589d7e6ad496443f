"""The weights' half of a backward pass, put off until later.

The problem in a sentence: the stage before waits for dx and for nothing else, but backward computes dW as well before
it lets go.

The backward of a linear layer `y = x A^T + b` is two matrix products of equal size:

    dx = dy A             the stage before waits for it                B of a schedule
    dA = dy^T x           only the optimizer needs it                  W of a schedule

With a `DeferredGradients` at hand (`Products.deferred`) a linear layer computes dx and puts (A, x, dy) in the queue
(`layers.products.WeightProduct`); `compute` does the other product whenever the schedule says. The price is memory: x
and dy of every linear layer stay until then. With sequence parallelism x is kept cut over the sequence and gathered
when dA is computed; under recompute it is the recomputed x. Norms, embeddings and biases are cheap and stay in B.

The queue is an object that the owner of the layers passes to them; nothing is global.

Qi et al. 2023 (arXiv 2401.10241). Not in Megatron-LM, whose `delay_wgrad_compute` puts dA off within one microbatch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from minimegatron.layers.products import WeightProduct, sink_of


class DeferredGradients:
    """A queue of products."""

    def __init__(self) -> None:
        self._queue: list[WeightProduct] = []

    def put(self, product: WeightProduct) -> None:
        self._queue.append(product)

    def take(self) -> list[WeightProduct]:
        """Everything queued so far, in order; the queue is empty afterwards."""
        queue, self._queue = self._queue, []
        return queue


@contextlib.contextmanager
def deferring(model: nn.Module, queue: DeferredGradients | None) -> Iterator[None]:
    """Linear layers of the model that run in the block put their products into `queue`; with None, nothing changes."""
    each: list[Any] = []  # `Products`
    if queue is not None:
        each = [module.products for module in model.modules() if hasattr(module, "products")]
    for products in each:
        products.deferred = queue
    try:
        yield
    finally:
        for products in each:
            products.deferred = None


def compute(products: list[WeightProduct]) -> None:
    """Compute the products in order; the list is emptied on the way.

    A gradient enters the buffer of data parallelism where the weight has a gradient sink, else `weight.grad`.
    """
    products.reverse()
    while products:
        product = products.pop()
        with torch.no_grad():
            deliver(product.weight, product.compute())


def deliver(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    """A gradient that autograd has not computed goes where that would have gone."""
    sink = sink_of(weight)
    if sink is not None:
        sink.accumulate(gradient)
    else:
        add_to_grad(weight, gradient)


def add_to_grad(weight: torch.Tensor, gradient: torch.Tensor) -> None:
    """What autograd does with the gradient of a leaf."""
    weight.grad = gradient if weight.grad is None else weight.grad + gradient
