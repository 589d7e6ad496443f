"""Column- and row-parallel linear layers: one matrix on many ranks.

The problem in a sentence: `y = x A^T` with A of 3.2 GB on GPUs that have 2 GB left.

Cut A by its output features (rows of the stored [o, i] matrix, columns of the maths) and every rank computes *some
features of y for all tokens*; cut it by its input features and every rank computes *a partial sum of all of y*:

    column:  A = [A_1; A_2]      y_r = x A_r^T                 [s, b, i] -> [s, b, o/t]
    row:     A = [A_1, A_2]      y = sum_r x_r A_r^T           [s, b, i/t] -> [s, b, o]

The output of a column layer is cut as the input of a row layer has to be. So a pair of them needs no message between
the two, whatever elementwise function stands there, and one all-reduce in each direction.

| layer  | forward         | backward         | with sequence parallelism: forward / backward                 |
|--------|-----------------|------------------|---------------------------------------------------------------|
| column | -               | all-reduce of dx | all-gather of x / reduce-scatter of dx, all-gather of x again |
| row    | all-reduce of y | -                | reduce-scatter of y / all-gather of dy                        |

Payload each time: `s*b*h` elements, h features on the side that travels. With sequence parallelism x is stored cut over
the sequence and gathered once more in the backward pass, where wgrad needs it: that is the price of storing 1/t of it.

The backward pass of a linear layer has two products, dgrad = dy A and wgrad = dy^T x. A column layer
sums dgrad over ranks, not wgrad: it starts the sum and computes wgrad meanwhile (`overlap` in the timeline of lab 02).
`LinearFunction` implements this, `layers/fp8/linear` is its FP8 version; `layers/wgrad` says where wgrad goes.

The row layer's bias is added *after* the sum; added before, it would be added t times. With sequence parallelism each
rank adds it to its own tokens only, so its gradient is partial (`partial="sequence"`).

Paper: Shoeybi et al. 2019 (arXiv 1909.08053) section 3; Korthikanti et al. 2022 (arXiv 2205.05198) section 4.2.
Megatron-LM: `megatron/core/tensor_parallel/layers.py`, `LinearWithGradAccumulationAndAsyncCommunication`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.comm import collectives as c
from minimegatron.comm.axis import ALONE, Axis
from minimegatron.kernels import choice, ops, products
from minimegatron.kernels.quantized import Packed
from minimegatron.layers.param import Init, ParamLayout, cut_evenly, new_parameter
from minimegatron.layers.wgrad import WeightGradStore, accumulate_wgrad, fused_accumulator, wgrad

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh


class LinearFunction(torch.autograd.Function):
    """`F.linear(x, A_r, b_r)` as one function, so that dgrad is summed over tp while wgrad is computed."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tp: Axis, sequence_parallel: bool
    ) -> torch.Tensor:
        ctx.tp, ctx.sequence_parallel = tp, sequence_parallel
        ctx.weight = weight  # under recompute, `saved_tensors` has another object, without a `grad_accumulator`
        ctx.save_for_backward(x, weight)
        return products.linear(gather_input(x, tp, sequence_parallel).wait(), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x, weight), dy = ctx.saved_tensors, grads[0]
        gather = gather_input(x, ctx.tp, ctx.sequence_parallel)  # nothing without sequence parallelism
        dgrad = products.dgrad(dy, weight)
        x = gather.wait()
        reduce = reduce_dgrad(dgrad, ctx.tp, ctx.sequence_parallel)
        dw = accumulate_wgrad(ctx.weight, dy, x)  # dy^T x, while dgrad is summed over tp
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.needs_input_grad[2] else None
        return reduce.wait(), dw, db, None, None


class _SplitLinearFunction(LinearFunction):
    """`LinearFunction` if only one of dgrad and wgrad is needed, or if a `WeightGradStore` defers wgrad."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> torch.Tensor:
        *args_of_linear, ctx.store = args
        return LinearFunction.forward(ctx, *args_of_linear)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (x, weight), dy = ctx.saved_tensors, grads[0]
        needs_dgrad, needs_wgrad, needs_db = ctx.needs_input_grad[:3]
        reduce = (
            reduce_dgrad(products.dgrad(dy, weight), ctx.tp, ctx.sequence_parallel) if needs_dgrad else c.Work(None)
        )
        dw = None
        if needs_wgrad and ctx.store is not None:
            tp, sequence_parallel = ctx.tp, ctx.sequence_parallel
            ctx.store.put(ctx.weight, lambda: wgrad(dy, gather_input(x, tp, sequence_parallel).wait()))
        elif needs_wgrad:
            dw = accumulate_wgrad(ctx.weight, dy, gather_input(x, ctx.tp, ctx.sequence_parallel).wait())
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if needs_db else None
        return reduce.wait(), dw, db, None, None, None


class PackedLinearFunction(torch.autograd.Function):
    """`LinearFunction` of a packed matrix (`kernels/quantized`), which is frozen: the backward pass has dgrad alone."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: Packed, bias: torch.Tensor | None, tp: Axis, sequence_parallel: bool
    ) -> torch.Tensor:
        ctx.weight, ctx.tp, ctx.sequence_parallel = weight, tp, sequence_parallel
        x = gather_input(x, tp, sequence_parallel).wait()
        return weight.linear(x, bias, choice.unobserved("auto", "quantized", x))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        dgrad = ctx.weight.dgrad(grads[0], choice.unobserved("auto", "quantized", grads[0]))
        return reduce_dgrad(dgrad, ctx.tp, ctx.sequence_parallel).wait(), None, None, None, None


def gather_input(x: torch.Tensor, tp: Axis, sequence_parallel: bool) -> c.Work:
    """Begin to gather a column layer's x, of which each rank has [s/t, ...] with sequence parallelism."""
    return c.all_gather_start(x, tp) if sequence_parallel else c.Work(x)


def reduce_dgrad(dgrad: torch.Tensor, tp: Axis, sequence_parallel: bool) -> c.Work:
    """Begin to sum dgrad over tp; with sequence parallelism each rank gets its [s/t, ...] of the sum."""
    return c.reduce_scatter_start(dgrad, tp) if sequence_parallel else c.all_reduce_start(dgrad, tp)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor | Packed,
    bias: torch.Tensor | None = None,
    tp: Axis = ALONE,
    sequence_parallel: bool = False,
    store: WeightGradStore | None = None,
) -> torch.Tensor:
    """`F.linear(x, A_r, b_r)`, by one of five functions.

    | case                                                                        | function                     |
    |-----------------------------------------------------------------------------|------------------------------|
    | no gradient is recorded                                                     | `ops.linear`                 |
    | A is packed, and frozen                                                     | `PackedLinearFunction`       |
    | nothing to overlap, to accumulate or to defer; torch's product is as fast   | torch's `F.linear`           |
    | dgrad and wgrad are both computed in the backward pass                      | `LinearFunction`             |
    | only one of them is, or wgrad is put into `store`                           | `_SplitLinearFunction`       |

    Args:
        tp: ranks that share A by its output features.
        sequence_parallel: x is cut along dim 0 over tp.
        store: where wgrad is put instead of being computed; None to compute it.
    """
    if not torch.is_grad_enabled():
        x = gather_input(x, tp, sequence_parallel).wait() if sequence_parallel else x
        return ops.linear(x, weight, bias)
    if isinstance(weight, Packed):
        assert bias is None or not bias.requires_grad, "beside a packed matrix adapters alone are trained"
        return PackedLinearFunction.apply(x, weight, bias, tp, sequence_parallel)  # type: ignore[no-any-return]
    if tp.size == 1 and store is None and fused_accumulator(weight) is None and not products.by_onednn(x, weight):
        return F.linear(x, weight, bias)
    if store is None and x.requires_grad and weight.requires_grad:
        return LinearFunction.apply(x, weight, bias, tp, sequence_parallel)  # type: ignore[no-any-return]
    return _SplitLinearFunction.apply(x, weight, bias, tp, sequence_parallel, store)  # type: ignore[no-any-return]


class ParallelLinear(nn.Module):
    """A linear layer with parameters of which a rank holds a part.

    Attributes:
        fp8: computes the layer in FP8 (`layers/fp8/linear.ParallelFp8`), or None; a module, because its scales are
            saved with the model.
        lora: what is added to y (`layers/lora.Lora`), or None.
        wgrad_store: where wgrad is put instead of being computed (`wgrad.deferring_wgrad`), or None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fp8: Any = None
        self.lora: Any = None
        self.wgrad_store: WeightGradStore | None = None

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        tp: Axis = ALONE,
        sequence_parallel: bool = False,
    ) -> torch.Tensor:
        """The function `linear`, or the same in FP8."""
        function = linear if self.fp8 is None else self.fp8.linear
        return function(x, weight, bias, tp, sequence_parallel, self.wgrad_store)  # type: ignore[no-any-return]


class ColumnParallelLinear(ParallelLinear):
    """`y = x A^T + b` with A cut by output features.

    Args:
        input_size: i, features of x.
        output_size: o, features of y over all ranks.
        tp: the axis that shares A.
        init: initial values of A; the bias starts at 0.
        bias: whether there is one.
        sequence_parallel: x arrives as [s/t, b, i] and is gathered.
        gather_output: return [s, b, o] instead of [s, b, o/t]. With `gather_reduces_gradient` the ranks use the
            gathered output for different work, so its gradients are summed.
        blocks: A is a stack of this many matrices, each of which is cut (2 for [gate; up]); or the rows of each.
        rows: logical output features, where `output_size` is padded (a vocabulary).
        dtype: dtype of A and b.

    Raises:
        ConfigError: the output features cannot be cut evenly.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        tp: Axis,
        *,
        init: Init,
        bias: bool = True,
        sequence_parallel: bool = False,
        gather_output: bool = False,
        gather_reduces_gradient: bool = False,
        blocks: int | Sequence[int] = 1,
        rows: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel and tp.size > 1
        self.gather_output, self.gather_reduces_gradient = gather_output, gather_reduces_gradient
        parts = cut_evenly(output_size, tp, f"ColumnParallelLinear({input_size}, {output_size})", blocks)
        self.weight = new_parameter(ParamLayout((output_size, input_size), 0, parts, tp.rank, init, rows=rows), dtype)
        self.bias = new_parameter(ParamLayout((output_size,), 0, parts, tp.rank, rows=rows), dtype) if bias else None

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None, add_bias: bool = True) -> torch.Tensor:
        """[s, b, i] (or [s/t, b, i]) -> [s, b, o/t].

        Args:
            weight: used in place of A, for a tied matrix.
            add_bias: False where a fused operation adds b.
        """
        weight = self.weight if weight is None else weight
        y = self.linear(x, weight, self.bias if add_bias else None, self.tp, self.sequence_parallel)
        if self.lora is not None:
            y = y + self.lora(x)
        if self.gather_output:
            y = c.gather_from_region(y, self.tp, reduce_gradient=self.gather_reduces_gradient)
        return y

    def amax_axes(self, mesh: Mesh) -> dict[str, Axis]:
        """input, weight, gradient -> ranks that hold parts of it (`layers/fp8/linear`)."""
        return {"input": self.tp if self.sequence_parallel else ALONE, "weight": self.tp, "gradient": self.tp}


class RowParallelLinear(ParallelLinear):
    """`y = x A^T + b` with A cut by input features.

    Args:
        input_size: i, features of x over all ranks; x arrives as [s, b, i/t].
        output_size: o, features of y.
        tp: the axis that shares A.
        init: initial values of A; the bias starts at 0.
        bias: whether there is one; it is replicated and added once, after the sum.
        sequence_parallel: return [s/t, b, o] (reduce-scatter) instead of [s, b, o] (all-reduce).
        input_is_parallel: False when x arrives whole and must first be cut.
        dtype: dtype of A and b.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        tp: Axis,
        *,
        init: Init,
        bias: bool = True,
        sequence_parallel: bool = False,
        input_is_parallel: bool = True,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = tp, sequence_parallel and tp.size > 1
        self.input_is_parallel = input_is_parallel
        parts = cut_evenly(input_size, tp, f"RowParallelLinear({input_size}, {output_size})")
        self.weight = new_parameter(ParamLayout((output_size, input_size), 1, parts, tp.rank, init), dtype)
        self.bias = new_parameter(ParamLayout((output_size,), partial="sequence"), dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, i/t] -> [s, b, o] (or [s/t, b, o])."""
        if not self.input_is_parallel:
            x = c.scatter_to_region(x, self.tp)
        if self.tp.size == 1:  # a sum of one part, to which the product can add b
            y = self.linear(x, self.weight, self.bias)
            return y if self.lora is None else y + self.lora(x)
        reduce = c.reduce_scatter_to_sequence_region if self.sequence_parallel else c.reduce_from_region
        y = reduce(self.linear(x, self.weight), self.tp)
        y = y if self.bias is None else y + self.bias
        return y if self.lora is None else y + self.lora(x)

    def amax_axes(self, mesh: Mesh) -> dict[str, Axis]:
        """input, weight, gradient -> ranks that hold parts of it; dy is whole on every rank (`layers/fp8/linear`)."""
        return {"input": self.tp, "weight": self.tp, "gradient": ALONE}
