"""Column- and row-parallel linear layers: one matrix on many ranks.

The problem in a sentence: `y = x A^T` with A of 3.2 GB on GPUs that have 2 GB left.

Cut A by its output features (rows of the stored [o, i] matrix, columns of the maths) and every rank computes *some
features of y for all tokens*; cut it by its input features and every rank computes *a partial sum of all of y*:

    column:  A = [A_1; A_2]      y_r = x A_r^T                 [s, b, i] -> [s, b, o/t]
    row:     A = [A_1, A_2]      y = sum_r x_r A_r^T           [s, b, i/t] -> [s, b, o]

Put a column layer before a row layer and what leaves the first is exactly what the second wants: nothing travels
between them, whatever elementwise function stands there. One all-reduce per pair forward, one backward.

| layer  | forward         | backward         | with sequence parallelism: forward / backward                 |
|--------|-----------------|------------------|---------------------------------------------------------------|
| column | -               | all-reduce of dx | all-gather of x / reduce-scatter of dx, all-gather of x again |
| row    | all-reduce of y | -                | reduce-scatter of y / all-gather of dy                        |

Payload each time: `s*b*h` elements. With sequence parallelism x is stored cut over the sequence and gathered once more
in the backward pass, where dW needs it: that is the price of storing 1/t of it.

In the backward pass of the column layer dx must be summed over ranks but dW need not: the sum is started first and
travels while dW is computed (`overlap` in the timeline of lab 02).

The row layer's bias is added *after* the sum; added before, it would be added t times. With sequence parallelism each
rank adds it to its own tokens only, so its gradient is partial (`partial="sequence"`).

Paper: Shoeybi et al. 2019 (arXiv 1909.08053) section 3; Korthikanti et al. 2022 (arXiv 2205.05198) section 4.2.
Megatron-LM: `megatron/core/tensor_parallel/layers.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn

from minimegatron.comm import collectives as c
from minimegatron.comm.axis import Axis
from minimegatron.comm.mesh import Mesh
from minimegatron.layers.deferred import DeferredGradients, Product, weight_gradient
from minimegatron.layers.param import Init, ParamLayout, cut_evenly, new_parameter

if TYPE_CHECKING:
    from minimegatron.layers.fp8_linear import ParallelFp8

ALONE = Axis("", (0,), 0)  # a product that concerns no other rank


class ColumnParallelLinear(nn.Module):
    """`y = x A^T + b` with A cut by output features.

    Args:
        input_size: i, features of x.
        output_size: o, features of y over all ranks.
        tp: the axis that shares A.
        init: of A; the bias starts at 0.
        bias: whether there is one.
        sequence_parallel: x arrives as [s/t, b, i] and is gathered.
        gather_output: return [s, b, o] instead of [s, b, o/t]. With `gather_reduces_gradient` the ranks use the
            gathered output for different work, so its gradients are summed.
        blocks: A is a stack of this many matrices, each of which is cut (2 for [gate; up]).
        rows: logical output features, where `output_size` is padded (a vocabulary).
        dtype: of A and b.

    Attributes:
        deferred: where the backward pass puts dA's product instead of computing it (`layers/deferred.py`), or None.
        fp8: what computes the products in FP8 (`layers/fp8_linear.py`), or None.

    Raises:
        ConfigError: the output features cannot be cut evenly.
    """

    deferred: DeferredGradients | None = None

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
        blocks: int = 1,
        rows: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.fp8: ParallelFp8 | None = None
        self.tp, self.sequence_parallel = tp, sequence_parallel and tp.size > 1
        self.gather_output, self.gather_reduces_gradient = gather_output, gather_reduces_gradient
        parts = cut_evenly(output_size, tp, f"ColumnParallelLinear({input_size}, {output_size})", blocks)
        self.weight = new_parameter(ParamLayout((output_size, input_size), 0, parts, tp.rank, init, rows=rows), dtype)
        self.bias = new_parameter(ParamLayout((output_size,), 0, parts, tp.rank, rows=rows), dtype) if bias else None

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None = None) -> torch.Tensor:
        """[s, b, i] (or [s/t, b, i]) -> [s, b, o/t]; `weight` replaces A where it is tied to another layer's."""
        weight = self.weight if weight is None else weight
        y = column_linear(x, weight, self.bias, self.tp, self.sequence_parallel, self.deferred, self.fp8)
        if self.gather_output:
            y = c.gather_from_region(y, self.tp, reduce_gradient=self.gather_reduces_gradient)
        return y

    def amax_axes(self, mesh: Mesh) -> dict[str, Axis]:
        """See `layers.fp8_linear`: who holds parts of x, A and dy."""
        return {"input": self.tp if self.sequence_parallel else ALONE, "weight": self.tp, "gradient": self.tp}


class RowParallelLinear(nn.Module):
    """`y = x A^T + b` with A cut by input features.

    Args:
        input_size: i, features of x over all ranks; x arrives as [s, b, i/t].
        output_size: o, features of y.
        tp: the axis that shares A.
        init: of A; the bias starts at 0.
        bias: whether there is one; it is replicated and added once, after the sum.
        sequence_parallel: return [s/t, b, o] (reduce-scatter) instead of [s, b, o] (all-reduce).
        input_is_parallel: False when x arrives whole and must first be cut.
        dtype: of A and b.

    Attributes:
        deferred, fp8: as in `ColumnParallelLinear`.
    """

    deferred: DeferredGradients | None = None

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
        self.fp8: ParallelFp8 | None = None
        self.tp, self.sequence_parallel, self.input_is_parallel = (
            tp,
            sequence_parallel and tp.size > 1,
            input_is_parallel,
        )
        parts = cut_evenly(input_size, tp, f"RowParallelLinear({input_size}, {output_size})")
        self.weight = new_parameter(ParamLayout((output_size, input_size), 1, parts, tp.rank, init), dtype)
        self.bias = new_parameter(ParamLayout((output_size,), partial="sequence"), dtype) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[s, b, i/t] -> [s, b, o] (or [s/t, b, o])."""
        if not self.input_is_parallel:
            x = c.scatter_to_region(x, self.tp)
        if self.tp.size == 1:
            return column_linear(x, self.weight, self.bias, self.tp, deferred=self.deferred, fp8=self.fp8)
        y = column_linear(x, self.weight, None, ALONE, deferred=self.deferred, fp8=self.fp8)
        y = (
            c.reduce_scatter_to_sequence_region(y, self.tp)
            if self.sequence_parallel
            else c.reduce_from_region(y, self.tp)
        )
        return y if self.bias is None else y + self.bias

    def amax_axes(self, mesh: Mesh) -> dict[str, Axis]:
        """See `layers.fp8_linear`; dy has been gathered, or was never cut."""
        return {"input": self.tp, "weight": self.tp, "gradient": ALONE}


def column_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tp: Axis,
    sequence_parallel: bool = False,
    deferred: DeferredGradients | None = None,
    fp8: ParallelFp8 | None = None,
) -> torch.Tensor:
    """`x A_r^T + b_r` whose backward sums dx over tp while dW is computed, or leaves dW to `deferred`."""
    if fp8 is not None:
        return fp8.linear(x, weight, bias, tp, sequence_parallel, deferred)
    if tp.size == 1 and deferred is None and not accumulates(weight):
        return F.linear(x, weight, bias)
    return _ColumnLinear.apply(x, weight, bias, tp, sequence_parallel, deferred)  # type: ignore[no-any-return]


def accumulates(weight: torch.Tensor) -> bool:
    """Whether dW is added to `weight.main_grad` by the product that computes it (`parallel/ddp.py` asks for it).

    Not where somebody has hooked the weight: a hook is to see a gradient, and may change it.
    """
    return getattr(weight, "gradient_accumulation_fusion", False) and not weight._backward_hooks


class _ColumnLinear(torch.autograd.Function):
    """The column layer as one function, because overlapping needs dx and dW in the same place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        tp: Axis,
        sequence_parallel: bool,
        deferred: DeferredGradients | None,
    ) -> torch.Tensor:
        ctx.tp, ctx.sequence_parallel, ctx.has_bias = tp, sequence_parallel, bias is not None
        ctx.deferred, ctx.parameter = deferred, weight  # a saved leaf comes back as another object under recompute
        ctx.save_for_backward(x, weight)
        return F.linear(c.all_gather(x, tp) if sequence_parallel else x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        dy, tp = grads[0], ctx.tp
        want_dx, want_dw, want_db = ctx.needs_input_grad[:3]
        if want_dw and ctx.deferred is not None:
            ctx.deferred.put(Product(ctx.parameter, x, dy, tp if ctx.sequence_parallel else None))
            want_dw = False
        gathering = c.all_gather_start(x, tp) if ctx.sequence_parallel and want_dw else None
        sending = None
        if want_dx:
            dx = dy @ weight
            x = gathering.wait() if gathering else x
            sending = c.reduce_scatter_start(dx, tp) if ctx.sequence_parallel else c.all_reduce_start(dx, tp)
        elif gathering:
            x = gathering.wait()
        dw = None
        if want_dw and accumulates(ctx.parameter):
            rows = dy.reshape(-1, dy.shape[-1])
            ctx.parameter.main_grad.addmm_(rows.t(), x.reshape(-1, x.shape[-1]))
            ctx.parameter.grad_added_to_main_grad = True
        elif want_dw:
            dw = weight_gradient(x, dy)
        db = dy.reshape(-1, dy.shape[-1]).sum(0) if ctx.has_bias and want_db else None
        return sending.wait() if sending else None, dw, db, None, None, None
