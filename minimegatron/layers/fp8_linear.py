"""FP8 in column- and row-parallel linear layers: whose scale, what travels, what is kept.

The problem in a sentence: `layers/fp8.py` multiplies two matrices on one rank; in a model x, W and dy are cut over
ranks, weights are used by every microbatch, and dW may be computed later, by a pipeline.

**Whose scale.** A tensor that is cut over tp must have one scale, or the layers of tp = 2 are another model than those
of tp = 1. Delayed scaling agrees once a step (`layers/fp8_model`). Current scaling agrees at once, where the
tensor is cut over an axis:

| layer      | x                              | W   | dy                             |
|------------|--------------------------------|-----|--------------------------------|
| column     | tp with sequence parallelism   | tp  | tp                             |
| row        | tp                             | tp  | - (every rank has the same)    |
| replicated | tp with sequence parallelism   | -   | tp with sequence parallelism   |
| an expert  | fc1: -, fc2: etp               | etp | fc1: etp, fc2: -               |

Ranks of cp have other tokens, and with current scaling a scale of their own. Tiles are a rank's own; W is cut at
multiples of a tile (`precision.check_fp8_dims`), so no layout has other tiles.

**What travels.** With sequence parallelism x is gathered before the product and again before dW. With one scale a
tensor each rank quantises its own tokens and the bytes are gathered: a quarter of fp32, half of bf16. Tiles for dW run
over tokens of several ranks, so there x itself is gathered.

| sequence parallelism, gather of x | delayed, tensorwise | blockwise, mxfp8           |
|-----------------------------------|---------------------|----------------------------|
| bytes                             | s b i               | s b i times x's element    |
| besides, tensorwise               | 4 a tensor, max     | -                          |

**What is kept** for the backward pass: with one scale a tensor q of x and of W, 1 byte an element; with tiles x itself,
because dW needs other tiles of it. Within a step the weights do not move, so W is quantised by the first microbatch and
kept for the others. A second forward pass (recompute) finds the same scale and the same W.

**dW** takes the ways that `layers/products.py` names; one that is put off keeps its factors in FP8. With `fp8_wgrad`
off it is a product in the model's own precision, and x is kept as it is.

Scales of a tensor and scales of tiles keep other things for the backward pass, so each has an autograd function
(`_OneScale`, `_Tiles`) and a product for dW (`_OneScaleProduct`, `_TileProduct`).

Transformer Engine: `pytorch/module/linear.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

from minimegatron.comm.async_ops import Work
from minimegatron.comm.axis import Axis
from minimegatron.errors import ConfigError, require
from minimegatron.layers.fp8 import Fp8Recipe, Quantised, product
from minimegatron.layers.fp8_scales import Siblings, scaling_of
from minimegatron.layers.products import UNCUT, Entry, GradientSink, ProductQueue, WeightProduct, both_gradients

TENSORS = ("input", "weight", "gradient")


class ParallelFp8(nn.Module):
    """The FP8 products of one parallel layer (`layers.products.Products`); what the layer itself is does not change.

    Args:
        recipe: which scales.
        axes: input, weight, gradient -> ranks that hold parts of it.
        wgrad: dW in FP8 too.
        agree_over: axis over which delayed scaling agrees at the end of a step.
        siblings, index: of an expert, whose place other ranks may have given to others (`layers/fp8_scales.py`): for
            each of the three tensors the experts of its layer, and its number among them.

    Attributes:
        input, weight, gradient: where their scales come from. Histories grow in training alone.
        kept: {transposed: the weight in FP8} while a step lasts, or None.
        deferred: see `Products`.
    """

    def __init__(
        self,
        recipe: Fp8Recipe,
        axes: dict[str, Axis],
        wgrad: bool = True,
        agree_over: str = "tp_dp_cp",
        siblings: dict[str, Siblings] | None = None,
        index: int = 0,
    ) -> None:
        super().__init__()
        for which in TENSORS:
            place = {"siblings": siblings[which], "index": index} if siblings else {}
            self.add_module(which, scaling_of(recipe, which, axes[which], **place))
        self.recipe, self.agree_over = recipe, agree_over
        self.wgrad, self.tiled = wgrad, recipe.kind in ("block", "mx")
        self.kept: dict[bool, Quantised] | None = None
        self.deferred: ProductQueue | None = None

    def quantise(self, x: torch.Tensor, which: str, transposed: bool = False) -> Quantised:
        """`which` is input, weight or gradient; transposed: x^T, for a product that sums over the rows of x."""
        made: Quantised = getattr(self, which)(x.t().contiguous() if transposed else x)
        return made

    def weight_copy(self, weight: torch.Tensor, transposed: bool = False) -> Quantised:
        """W [o, i], or W^T, in FP8; made once a step where `fp8_model.keeping_weights` says so.

        It is the layer's one weight, wherever it lies: one that is gathered on use comes to another place each time.
        """
        if self.kept is not None and transposed in self.kept:
            return self.kept[transposed]
        copy = self.quantise(weight, "weight", transposed)
        if self.kept is not None and self.training:  # an evaluation notes no magnitude for the history
            self.kept[transposed] = copy
        return copy

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, f: Entry = UNCUT
    ) -> torch.Tensor:
        """`f(x) W_r^T + b_r` in FP8, in the dtype of x."""
        require(x.dtype == weight.dtype, f"FP8 linear: x is {x.dtype}, the weight {weight.dtype}", "give one dtype")
        function = _Tiles if self.tiled else _OneScale
        return function.apply(x, weight, bias, self, f, self.deferred)  # type: ignore[no-any-return]

    @staticmethod
    def check_generation() -> None:
        """Refuse to generate (`inference/generate`).

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "generation with FP8: scales are those of a batch, so a sequence would depend on its neighbours",
            fix="build the model without fp8_format; the weights are the same",
        )


# ------------------------------------------------------------------------------------------- one scale a tensor


class _OneScale(torch.autograd.Function):
    """`layers.products._Linear` of factors with one scale each. Kept: q of x, or x itself without FP8 for dW; q of W^T.

    Where x is not gathered again, q of x^T is kept, which dW reads and which the cast may have written.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: ParallelFp8,
        f: Entry,
        deferred: ProductQueue | None,
    ) -> torch.Tensor:
        ctx.layer, ctx.f, ctx.deferred, ctx.has_bias = layer, f, deferred, bias is not None
        ctx.parameter = weight  # a saved leaf comes back as another object under recompute
        qw = layer.weight_copy(weight)
        own = layer.quantise(_rows(x), "input")
        kept = (own if f.gathers else own.t()).q if layer.wgrad else None
        wide = None if layer.wgrad else x
        ctx.save_for_backward(kept, own.inverse, wide, qw.t().q, qw.inverse)
        qx = Quantised(f.start(_bytes(own.q)).wait().view(own.q.dtype), own.inverse) if f.gathers else own
        return _as_rows_of(x, product(qx, qw, x.dtype, fast=True), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        layer, f, weight, dy = ctx.layer, ctx.f, ctx.parameter, _rows(grads[0]).contiguous()
        want_dx, want_dw, want_db = ctx.needs_input_grad[:3]
        qx, x_inverse, wide, turned, w_inverse = ctx.saved_tensors
        qdy: Any = layer.quantise(dy, "gradient") if want_dx or layer.wgrad else None
        if layer.wgrad:
            dw: WeightProduct = _OneScaleProduct(weight, qx, qdy.t().q, f, x_inverse, qdy.inverse, dy.dtype)
        else:
            dw = _WideProduct(weight, _rows(wide), dy, f)

        def dx() -> torch.Tensor:
            return _as_rows_of(grads[0], product(qdy, Quantised(turned, w_inverse), dy.dtype))

        sending, gradient = both_gradients(f, dx if want_dx else None, dw if want_dw else None, ctx.deferred)
        db = dy.sum(0) if ctx.has_bias and want_db else None
        return sending.wait() if sending is not None else None, gradient, db, None, None, None


# ------------------------------------------------------------------------------------------- a scale for every tile


class _Tiles(torch.autograd.Function):
    """`layers.products._Linear` of factors with a scale for every tile. Kept: x and W, whose other tiles follow."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: ParallelFp8,
        f: Entry,
        deferred: ProductQueue | None,
    ) -> torch.Tensor:
        ctx.layer, ctx.f, ctx.deferred, ctx.has_bias = layer, f, deferred, bias is not None
        ctx.parameter = weight  # a saved leaf comes back as another object under recompute
        ctx.save_for_backward(x, weight)
        qw = layer.weight_copy(weight)
        qx = layer.quantise(f.start(_rows(x)).wait(), "input")
        return _as_rows_of(x, product(qx, qw, x.dtype, fast=True), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        layer, f, dy = ctx.layer, ctx.f, _rows(grads[0]).contiguous()
        want_dx, want_dw, want_db = ctx.needs_input_grad[:3]
        x, weight = ctx.saved_tensors
        qdy: Any = layer.quantise(dy, "gradient") if want_dx else None
        factors = (ctx.parameter, _rows(x), dy, f)
        dw = _TileProduct(*factors, layer) if layer.wgrad else _WideProduct(*factors)

        def dx() -> torch.Tensor:
            return _as_rows_of(grads[0], product(qdy, layer.weight_copy(weight, True), dy.dtype))

        sending, gradient = both_gradients(f, dx if want_dx else None, dw if want_dw else None, ctx.deferred)
        db = dy.sum(0) if ctx.has_bias and want_db else None
        return sending.wait() if sending is not None else None, gradient, db, None, None, None


# ------------------------------------------------------------------------------------------------ products for dW


class _WideProduct(WeightProduct):
    """dW in the model's own precision; rounded to it before it is added to a buffer."""

    def add_to(self, sink: GradientSink, x: torch.Tensor) -> None:
        sink.add(self.finish(x))


@dataclasses.dataclass(eq=False)
class _OneScaleProduct(_WideProduct):
    """dW of factors with one scale each.

    Attributes:
        x: q of x [n, i] where f gathers, else of x^T.
        dy: q of dy^T.
        x_inverse, dy_inverse: what q is to be multiplied by.
        dtype: of dW.
    """

    x_inverse: torch.Tensor
    dy_inverse: torch.Tensor
    dtype: torch.dtype

    def start(self) -> Work:
        return self.f.start(_bytes(self.x))

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        q = x.view(self.x.dtype)
        turned = Quantised(q.t() if self.f.gathers else q, self.x_inverse)
        return product(Quantised(self.dy, self.dy_inverse), turned, self.dtype)


@dataclasses.dataclass(eq=False)
class _TileProduct(_WideProduct):
    """dW of x and dy in tiles along their rows, which are those of all ranks where f gathers."""

    layer: ParallelFp8

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        qdy, qx = self.layer.quantise(self.dy, "gradient", True), self.layer.quantise(x, "input", True)
        return product(qdy, qx, self.dy.dtype)


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _as_rows_of(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y [n, o], plus the bias, with the dims between first and last of x."""
    y = y if bias is None else y + bias
    return y.view(-1, *x.shape[1:-1], y.shape[-1])


def _bytes(q: torch.Tensor) -> torch.Tensor:
    """FP8 numbers as bytes, because gloo knows no others of their size."""
    return q.view(torch.uint8)
