"""The three products of a linear layer, and what travels while they are computed.

    y  = f(x) A^T + b          forward
    dx = sum_r dy A            backward; the ranks of tp each have a part of it
    dA = dy^T f(x)             backward; each rank has its own

f is how x comes into a product whose A is cut over tp (`Entry`; the name is that of the papers). Its conjugate is what
becomes of dx:

| f                          | x                  | f(x)        | dx                     |
|----------------------------|--------------------|-------------|------------------------|
| nothing is cut             | [..., i]           | x           | as it is               |
| A is cut                   | equal on all ranks | x           | all-reduce             |
| with sequence parallelism  | cut along dim 0    | all-gather  | reduce-scatter         |

**Order of a backward pass** (`both_gradients`). dx must be summed over ranks, dA need not: the sum is started first and
travels while dA is computed. With sequence parallelism x is gathered once more for dA; that travels while dx is
computed.

**Where dA goes.** To autograd, which puts it into `param.grad`; or to the `GradientSink` of the parameter, which adds
the very product to `main_grad` (`parallel/data/ddp.py`), so that dA itself never exists; or to a queue, to be
computed later (`layers/deferred.py`).

A layer asks its `Products` for y. `PlainProducts` computes in the parameters' own precision, `ParallelFp8`
(`layers/fp8_linear.py`) in FP8.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from minimegatron.comm import collectives as c
from minimegatron.comm.axis import ALONE, Axis


@dataclasses.dataclass(frozen=True)
class Entry:
    """f: how x comes into a product.

    Attributes:
        tp: the axis over which A is cut by its output features.
        gathers: x is cut along dim 0 over tp, as with sequence parallelism.
    """

    tp: Axis = ALONE
    gathers: bool = False

    def start(self, x: torch.Tensor) -> c.Work:
        """Begin f(x)."""
        return c.all_gather_start(x, self.tp) if self.gathers else c.Work(x)

    def start_backward(self, dx: torch.Tensor) -> c.Work:
        """Begin the conjugate of f: the sum of the ranks' dx, or this rank's rows of it."""
        return c.reduce_scatter_start(dx, self.tp) if self.gathers else c.all_reduce_start(dx, self.tp)


UNCUT = Entry()  # f(x) = x, and dx is complete


class ProductQueue(Protocol):
    """Where products of gradients are put that are computed later (`layers/deferred.DeferredGradients`)."""

    def put(self, product: WeightProduct) -> None: ...


class Products(Protocol):
    """What computes the products of a linear layer.

    Attributes:
        deferred: the queue into which the backward pass puts dA's product instead of computing it, or None.
    """

    deferred: ProductQueue | None

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, f: Entry = UNCUT
    ) -> torch.Tensor:
        """`f(x) A_r^T + b_r`."""
        ...


class GradientSink(Protocol):
    """Adds a parameter's gradients to a buffer: `param.grad_accumulator`, where a wrapper has set one.

    Attributes:
        fuses: a product may be added to the buffer as it is computed.
    """

    fuses: bool

    def add_product(self, dy: torch.Tensor, x: torch.Tensor) -> None:
        """In a backward pass: add dy^T x. Autograd is then given no gradient."""
        ...

    def add(self, grad: torch.Tensor) -> None:
        """In a backward pass: add dA. Autograd is then given no gradient."""
        ...

    def accumulate(self, grad: torch.Tensor) -> None:
        """After a backward pass: add dA, as autograd would have done."""
        ...


def sink_of(weight: torch.Tensor) -> GradientSink | None:
    """The parameter's sink, or None: then its gradient is `weight.grad`."""
    return getattr(weight, "grad_accumulator", None)


def fusing_sink(weight: torch.Tensor) -> GradientSink | None:
    """The sink, where a backward pass adds dA to the buffer by itself.

    Not where the weight has hooks: a hook is to see a gradient, and may change it.
    """
    sink = sink_of(weight)
    return sink if sink is not None and sink.fuses and not weight._backward_hooks else None


@dataclasses.dataclass(eq=False)
class WeightProduct:
    """The product dA = dy^T f(x), to be computed now or later.

    Attributes:
        weight: A [o, i].
        x: [..., i]; a rank's own tokens where f gathers.
        dy: [..., o].
        f: how x comes into the product.
    """

    weight: torch.Tensor
    x: torch.Tensor
    dy: torch.Tensor
    f: Entry

    def start(self) -> c.Work:
        """Begin f(x)."""
        return self.f.start(self.x)

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        """dA [o, i], from what `start` has brought."""
        return weight_gradient(x, self.dy)

    def add_to(self, sink: GradientSink, x: torch.Tensor) -> None:
        """`finish`, into a buffer."""
        sink.add_product(self.dy, x)

    def compute(self) -> torch.Tensor:
        """dA [o, i]."""
        return self.finish(self.start().wait())


def weight_gradient(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """x [..., i], dy [..., o] -> dy^T x [o, i]."""
    return dy.reshape(-1, dy.shape[-1]).t() @ x.reshape(-1, x.shape[-1])


def both_gradients(
    f: Entry,
    dx: Callable[[], torch.Tensor] | None,
    product: WeightProduct | None,
    deferred: ProductQueue | None,
) -> tuple[c.Work | None, torch.Tensor | None]:
    """Compute dx, start its sum, and compute dA meanwhile; see the module docstring.

    Args:
        dx: computes this rank's part of dx; None where it is not wanted.
        product: dA; None where it is not wanted.
        deferred: where it goes instead of being computed.

    Returns:
        The sum of dx under way, and dA where autograd is to have it.
    """
    if product is not None and deferred is not None:
        deferred.put(product)
        product = None
    arriving = product.start() if product is not None else None
    part = dx() if dx is not None else None
    x = arriving.wait() if arriving is not None else None
    sending = f.start_backward(part) if part is not None else None
    if product is None or x is None:
        return sending, None
    sink = fusing_sink(product.weight)
    if sink is None:
        return sending, product.finish(x)
    product.add_to(sink, x)
    return sending, None


class PlainProducts:
    """The products in the precision of x and A.

    Attributes:
        deferred: see `Products`.
    """

    def __init__(self) -> None:
        self.deferred: ProductQueue | None = None

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, f: Entry = UNCUT
    ) -> torch.Tensor:
        """`f(x) A_r^T + b_r`; torch's own function where there is nothing to overlap, to add to or to put off."""
        if f.tp.size == 1 and self.deferred is None and fusing_sink(weight) is None:
            return F.linear(x, weight, bias)
        return _Linear.apply(x, weight, bias, f, self.deferred)  # type: ignore[no-any-return]


class _Linear(torch.autograd.Function):
    """`F.linear(f(x), A, b)` as one function, because overlapping needs dx and dA in the same place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        f: Entry,
        deferred: ProductQueue | None,
    ) -> torch.Tensor:
        ctx.f, ctx.has_bias = f, bias is not None
        ctx.deferred = deferred
        ctx.parameter = weight  # a saved leaf comes back as another object under recompute
        ctx.save_for_backward(x, weight)
        return F.linear(f.start(x).wait(), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x, weight), dy = ctx.saved_tensors, grads[0]
        want_dx, want_dw, want_db = ctx.needs_input_grad[:3]
        product = WeightProduct(ctx.parameter, x, dy, ctx.f) if want_dw else None
        sending, dw = both_gradients(ctx.f, (lambda: dy @ weight) if want_dx else None, product, ctx.deferred)
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.has_bias and want_db else None
        return sending.wait() if sending is not None else None, dw, db, None, None
