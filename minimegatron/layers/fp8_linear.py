"""FP8 in column- and row-parallel linear layers: whose scale, what travels, what is kept.

The problem in a sentence: `layers/fp8.py` multiplies two matrices on one rank; in a model x, W and dy are cut over
ranks, weights are used by every microbatch, and dW may be somebody else's business.

**Whose scale.** A tensor that is cut over tp must have one scale, or the layers of tp = 2 are another model than those
of tp = 1. Delayed scaling agrees once a step (`layers/fp8_model`). Current scaling agrees at once, where there is
somebody to agree with:

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

**dW** is added to `main_grad` where that is asked for, or put off (`layers/deferred.py`) with its factors in FP8. With
`fp8_wgrad` off it is a product in the model's own precision, and x is kept as it is.

Transformer Engine: `pytorch/module/linear.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from minimegatron.comm import collectives as c
from minimegatron.comm.axis import Axis
from minimegatron.errors import require
from minimegatron.layers.deferred import DeferredGradients, Product, weight_gradient
from minimegatron.layers.fp8 import Fp8Recipe, Quantised, product
from minimegatron.layers.fp8_scales import Siblings, scaling_of
from minimegatron.layers.linear import accumulates

TENSORS = ("input", "weight", "gradient")


class ParallelFp8(nn.Module):
    """The FP8 products of one parallel layer; what the layer itself is does not change.

    Args:
        recipe: which scales.
        axes: input, weight, gradient -> ranks that hold parts of it.
        wgrad: dW in FP8 too.
        agree_over: axis over which delayed scaling agrees at the end of a step.
        siblings, index: of an expert, whose place other ranks may have given to others (`layers/fp8_scales.py`): for
            each of the three tensors the experts of its layer, and its number among them.

    Attributes:
        input, weight, gradient: where their scales come from. Histories grow in training alone.
        kept: weights in FP8 while a step lasts, or None.
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
        self.kept: dict[tuple[int, bool], Quantised] | None = None

    def quantise(self, x: torch.Tensor, which: str, transposed: bool = False) -> Quantised:
        """`which` is input, weight or gradient; transposed: x^T, for a product that sums over the rows of x."""
        made: Quantised = getattr(self, which)(x.t().contiguous() if transposed else x)
        return made

    def weight_copy(self, weight: torch.Tensor, transposed: bool = False) -> Quantised:
        """W [o, i], or W^T, in FP8; made once a step where `fp8_model.keeping_weights` says so."""
        key = (weight.data_ptr(), transposed)
        if self.kept is not None and key in self.kept:
            return self.kept[key]
        copy = self.quantise(weight, "weight", transposed)
        if self.kept is not None:
            self.kept[key] = copy
        return copy

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tp: Axis,
        sequence_parallel: bool = False,
        deferred: DeferredGradients | None = None,
    ) -> torch.Tensor:
        """`x W_r^T + b_r` as `layers.linear.column_linear` computes it, in FP8, in the dtype of x."""
        require(x.dtype == weight.dtype, f"FP8 linear: x is {x.dtype}, the weight {weight.dtype}", "give one dtype")
        return _Fp8Column.apply(x, weight, bias, self, tp, sequence_parallel, deferred)  # type: ignore[no-any-return]


class _Fp8Column(torch.autograd.Function):
    """`layers.linear._ColumnLinear` with quantised factors; all rows of a tensor in one dim here."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: ParallelFp8,
        tp: Axis,
        sequence_parallel: bool,
        deferred: DeferredGradients | None,
    ) -> torch.Tensor:
        ctx.layer, ctx.tp, ctx.deferred, ctx.has_bias = layer, tp, deferred, bias is not None
        ctx.gather = tp if sequence_parallel else None
        ctx.parameter = weight  # a saved leaf comes back as another object under recompute
        rows, w = _rows(x), layer.weight_copy(weight)
        if layer.tiled:
            rows = rows if ctx.gather is None else c.all_gather(rows, tp)
            qx, kept = layer.quantise(rows, "input"), (x, None, weight, None)
        else:
            own = layer.quantise(rows, "input")
            qx = own if ctx.gather is None else Quantised(_gather_bytes(own.q, tp).wait(), own.inverse)
            back, turned = (own if ctx.gather is not None else own.t()), w.t()
            kept = (back.q if layer.wgrad else None, own.inverse, turned.q, w.inverse)  # type: ignore[assignment]
        wide = None if layer.tiled or layer.wgrad else x
        ctx.save_for_backward(*kept, wide)
        y = product(qx, w, x.dtype, fast=True)
        y = y if bias is None else y + bias
        return y.view(-1, *x.shape[1:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        layer, gather, dtype, dy = ctx.layer, ctx.gather, grads[0].dtype, _rows(grads[0]).contiguous()
        x, x_inverse, w, w_inverse, wide = ctx.saved_tensors
        want_dx, want_dw, want_db = ctx.needs_input_grad[:3]
        quantised = layer.quantise(dy, "gradient") if want_dx or (layer.wgrad and not layer.tiled) else None
        wide = x if layer.tiled else wide

        def fetch() -> Callable[[], torch.Tensor]:
            """Start to gather what dW needs of x; the result waits for it."""
            if layer.wgrad and not layer.tiled:
                if gather is None:
                    return lambda: x
                arriving = _gather_bytes(x, gather)
                return lambda: arriving.wait().t()
            rows = _rows(wide)
            return (lambda: rows) if gather is None else c.all_gather_start(rows, gather).wait

        def weights(rows: torch.Tensor) -> torch.Tensor:
            if not layer.wgrad:
                return weight_gradient(rows, dy)
            if layer.tiled:
                return product(layer.quantise(dy, "gradient", True), layer.quantise(rows, "input", True), dtype)
            assert quantised is not None, "dy is quantised above"
            return product(quantised.t(), Quantised(rows, x_inverse), dtype)

        if want_dw and ctx.deferred is not None:
            ctx.deferred.put(_Later(ctx.parameter, x if wide is None else wide, dy, gather, lambda: weights(fetch()())))
            want_dw = False
        fetched = fetch() if want_dw else None
        sending = None
        if want_dx:
            turned = layer.weight_copy(w, True) if layer.tiled else Quantised(w, w_inverse)
            assert quantised is not None
            dx = product(quantised, turned, dtype).view(-1, *grads[0].shape[1:-1], turned.q.shape[0])
            rows = fetched() if fetched else None
            sending = c.reduce_scatter_start(dx, ctx.tp) if gather is not None else c.all_reduce_start(dx, ctx.tp)
        else:
            rows = fetched() if fetched else None
        dw = None
        if rows is not None:
            dw = weights(rows)
            if accumulates(ctx.parameter):
                ctx.parameter.main_grad.add_(dw)
                ctx.parameter.grad_added_to_main_grad, dw = True, None
        db = dy.sum(0) if ctx.has_bias and want_db else None
        return sending.wait() if sending else None, dw, db, None, None, None, None


@dataclasses.dataclass(frozen=True)
class _Later(Product):
    """dW of an FP8 layer, put off with its quantised factors."""

    finish: Callable[[], torch.Tensor] | None = None

    def compute(self) -> torch.Tensor:
        assert self.finish is not None
        return self.finish()


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


class _Bytes:
    """A gather of FP8 numbers, which gloo does not know, as bytes."""

    def __init__(self, pending: c.Pending, dtype: torch.dtype) -> None:
        self._pending, self._dtype = pending, dtype

    def wait(self) -> torch.Tensor:
        return self._pending.wait().view(self._dtype)


def _gather_bytes(q: torch.Tensor, axis: Axis) -> _Bytes:
    return _Bytes(c.all_gather_start(q.contiguous().view(torch.uint8), axis), q.dtype)
