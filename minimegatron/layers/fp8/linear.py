"""FP8 in column- and row-parallel linear layers: shared scales, messages, and what is kept.

**Shared scales.** A tensor that is cut over tp must have one scale, or the layers of tp = 2 are another model than
those of tp = 1. Delayed scaling agrees once a step (`move_scales`). Current scaling agrees at once, over the axis over
which the tensor is cut:

| layer      | x                              | W   | dy                             |
|------------|--------------------------------|-----|--------------------------------|
| column     | tp with sequence parallelism   | tp  | tp                             |
| row        | tp                             | tp  | - (every rank has the same)    |
| replicated | tp with sequence parallelism   | -   | tp with sequence parallelism   |
| an expert  | fc1: -, fc2: etp               | etp | fc1: etp, fc2: -               |

Ranks of cp have other tokens, and with current scaling a scale of their own. A tile is on one rank; W is cut at
multiples of a tile (`check_fp8_dims`), so all layouts have the same tiles of W.

**Messages.** With sequence parallelism x is gathered before the product and again before wgrad. With one scale a
tensor each rank quantises its own tokens and the bytes are gathered: a quarter of fp32, half of bf16. Tiles for wgrad
run over tokens of several ranks, so with tiles x itself is gathered.

| sequence parallelism, gather of x | delayed, tensorwise | blockwise, mxfp8           |
|-----------------------------------|---------------------|----------------------------|
| bytes                             | s b i               | s b i times x's element    |
| also, if tensorwise               | 4 a tensor, max     | -                          |

**Kept** for the backward pass: with one scale a tensor q of x and of W, 1 byte an element; with tiles x itself, because
wgrad needs other tiles of it. So each has an autograd function (`_OneScale`, `_Tiles`). Within a step the weights do
not change, so W is quantised by the first microbatch and kept for the others (`keeping_weights`). A second forward pass
(recompute) uses the same scale and the same W.

**wgrad** goes where `layers/wgrad` says; a deferred one keeps its factors in FP8. With `fp8_wgrad` off it is a product
in the model's own precision, and x is kept as it is.

`layers/fp8/enable` says which layers of a model have it, and has `move_scales` and `keeping_weights`. Transformer
Engine: `pytorch/module/linear.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from minimegatron.comm.async_ops import Work
from minimegatron.comm.axis import ALONE, Axis
from minimegatron.errors import ConfigError, require
from minimegatron.layers.fp8.matmul import Fp8Recipe, Quantised, product
from minimegatron.layers.fp8.scaling import Siblings, scaling_of
from minimegatron.layers.linear import gather_input, reduce_dgrad
from minimegatron.layers.wgrad import WeightGradStore, fused_accumulator, wgrad

TENSORS = ("input", "weight", "gradient")


class ParallelFp8(nn.Module):
    """The FP8 products of one parallel layer; the layer itself does not change.

    Args:
        recipe: how scales are chosen.
        axes: input, weight, gradient -> ranks that hold parts of it.
        wgrad: whether wgrad is in FP8 too.
        agree_over: axis over which delayed scaling agrees at the end of a step.
        siblings, index: for an expert, because ranks of ep have other experts in the same place
            (`layers/fp8/scaling.py`): for each of the three tensors the experts of its layer, and its number among
            them.

    Attributes:
        input, weight, gradient: the scaling of each tensor. Histories grow in training alone.
        kept: {transposed: the weight in FP8} during a step, or None.
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

    def quantise(self, x: torch.Tensor, which: str, transposed: bool = False) -> Quantised:
        """x in FP8; `which` is input, weight or gradient; transposed: x^T, for a product that sums over the rows
        of x."""
        made: Quantised = getattr(self, which)(x.t().contiguous() if transposed else x)
        return made

    def weight_copy(self, weight: torch.Tensor, transposed: bool = False) -> Quantised:
        """W [o, i], or W^T, in FP8; made once a step if `keeping_weights` says so.

        The key is the layer, not the address of W: a weight that is gathered on use has another address each time.
        """
        if self.kept is not None and transposed in self.kept:
            return self.kept[transposed]
        copy = self.quantise(weight, "weight", transposed)
        if self.kept is not None and self.training:  # an evaluation notes no magnitude for the history
            self.kept[transposed] = copy
        return copy

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        tp: Axis = ALONE,
        sequence_parallel: bool = False,
        store: WeightGradStore | None = None,
    ) -> torch.Tensor:
        """`layers.linear.linear` in FP8, in the dtype of x."""
        require(x.dtype == weight.dtype, f"FP8 linear: x is {x.dtype}, the weight {weight.dtype}", "give one dtype")
        function = _Tiles if self.tiled else _OneScale
        return function.apply(x, weight, bias, self, tp, sequence_parallel, store)  # type: ignore[no-any-return]

    @staticmethod
    def check_generation() -> None:
        """Refuse to generate (`inference/engine`).

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "generation with FP8: scales are those of a batch, so a sequence would depend on its neighbours",
            fix="build the model without fp8_format; the weights are the same",
        )


# ------------------------------------------------------------------------------------------- one scale a tensor


class _OneScale(torch.autograd.Function):
    """`LinearFunction` of factors with one scale each. Kept: q of x, or x itself if wgrad is not in FP8; q of W^T.

    If x is not gathered again, q of x^T is kept, which wgrad reads and which the cast may have written.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: ParallelFp8,
        tp: Axis,
        sequence_parallel: bool,
        store: WeightGradStore | None,
    ) -> torch.Tensor:
        ctx.layer, ctx.tp, ctx.sequence_parallel, ctx.store = layer, tp, sequence_parallel, store
        ctx.weight = weight  # recompute gives another object back, without a `grad_accumulator`
        qw = layer.weight_copy(weight)
        qx = layer.quantise(_rows(x), "input")
        kept = (qx if sequence_parallel else qx.t()).q if layer.wgrad else None
        ctx.save_for_backward(kept, qx.inverse, None if layer.wgrad else x, qw.t().q, qw.inverse)
        if sequence_parallel:
            qx = Quantised(gather_input(_bytes(qx.q), tp, True).wait().view(qx.q.dtype), qx.inverse)
        return _as_rows_of(x, product(qx, qw, x.dtype, fast=True), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        layer, sequence_parallel, dy = ctx.layer, ctx.sequence_parallel, _rows(grads[0]).contiguous()
        qx, x_inverse, x, qw_t, w_inverse = ctx.saved_tensors
        qdy: Any = layer.quantise(dy, "gradient") if ctx.needs_input_grad[0] or layer.wgrad else None

        def dgrad() -> torch.Tensor:
            return _as_rows_of(grads[0], product(qdy, Quantised(qw_t, w_inverse), dy.dtype))

        if not layer.wgrad:
            return _backward(ctx, dy, dgrad, _rows(x), partial(wgrad, dy))
        qdy_t = Quantised(qdy.t().q, qdy.inverse)

        def dw(arrived: torch.Tensor) -> torch.Tensor:
            q = arrived.view(qx.dtype)
            return product(qdy_t, Quantised(q.t() if sequence_parallel else q, x_inverse), dy.dtype)

        return _backward(ctx, dy, dgrad, _bytes(qx), dw)


# ------------------------------------------------------------------------------------------- a scale for every tile


class _Tiles(torch.autograd.Function):
    """`LinearFunction` of factors with a scale for every tile. Kept: x and W, from which other tiles are made.

    Tiles for wgrad run over tokens, with sequence parallelism over those of all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        layer: ParallelFp8,
        tp: Axis,
        sequence_parallel: bool,
        store: WeightGradStore | None,
    ) -> torch.Tensor:
        ctx.layer, ctx.tp, ctx.sequence_parallel, ctx.store = layer, tp, sequence_parallel, store
        ctx.weight = weight  # recompute gives another object back, without a `grad_accumulator`
        ctx.save_for_backward(x, weight)
        qw = layer.weight_copy(weight)
        qx = layer.quantise(gather_input(_rows(x), tp, sequence_parallel).wait(), "input")
        return _as_rows_of(x, product(qx, qw, x.dtype, fast=True), bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        layer, dy = ctx.layer, _rows(grads[0]).contiguous()
        x, weight = ctx.saved_tensors
        qdy: Any = layer.quantise(dy, "gradient") if ctx.needs_input_grad[0] else None

        def dgrad() -> torch.Tensor:
            return _as_rows_of(grads[0], product(qdy, layer.weight_copy(weight, True), dy.dtype))

        def dw(arrived: torch.Tensor) -> torch.Tensor:
            return product(layer.quantise(dy, "gradient", True), layer.quantise(arrived, "input", True), dy.dtype)

        return _backward(ctx, dy, dgrad, _rows(x), dw if layer.wgrad else partial(wgrad, dy))


# ---------------------------------------------------------------------------------------------- backward, and layouts


def _backward(
    ctx: Any,
    dy: torch.Tensor,
    dgrad: Callable[[], torch.Tensor],
    x: torch.Tensor,
    dw: Callable[[torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor | None, ...]:
    """The order of `LinearFunction.backward`, with products in FP8.

    Args:
        dy: [n, o].
        dgrad: computes this rank's part of dgrad.
        x: the tensor that is gathered for wgrad.
        dw: computes wgrad from the gathered tensor.
    """
    tp, sequence_parallel = ctx.tp, ctx.sequence_parallel
    needs_dgrad, needs_wgrad, needs_db = ctx.needs_input_grad[:3]
    if needs_wgrad and ctx.store is not None:
        ctx.store.put(ctx.weight, lambda: dw(gather_input(x, tp, sequence_parallel).wait()))
        needs_wgrad = False
    gather = gather_input(x, tp, sequence_parallel) if needs_wgrad else Work(None)
    part = dgrad() if needs_dgrad else None
    arrived = gather.wait()
    reduce = reduce_dgrad(part, tp, sequence_parallel) if part is not None else Work(None)
    grad = dw(arrived) if needs_wgrad else None
    accumulator = fused_accumulator(ctx.weight)
    if grad is not None and accumulator is not None:
        accumulator.add(grad)
        grad = None
    db = dy.sum(0) if needs_db else None
    return reduce.wait(), grad, db, None, None, None, None


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(-1, x.shape[-1])


def _as_rows_of(x: torch.Tensor, y: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y [n, o], plus the bias, with the dims between first and last of x."""
    y = y if bias is None else y + bias
    return y.view(-1, *x.shape[1:-1], y.shape[-1])


def _bytes(q: torch.Tensor) -> torch.Tensor:
    """FP8 numbers as bytes: gloo has no FP8 dtype."""
    return q.view(torch.uint8)
