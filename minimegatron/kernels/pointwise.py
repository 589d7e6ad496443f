"""Operators that read each element once: norms, activations, softmax of attention scores.

| operator         | kernel              | kept for the backward pass                                                |
|------------------|---------------------|---------------------------------------------------------------------------|
| `norm`           | `csrc/norm.cu`      | x and one or two numbers a row                                            |
| `add_norm`       | `csrc/norm.cu`      | the same of h = x + r: one pass over memory instead of two                |
| `swiglu`         | `csrc/activation.cu`| the input                                                                 |
| `bias_gelu`      | `csrc/activation.cu`| the input and the bias                                                    |
| `scaled_softmax` | `csrc/softmax.cu`   | the output                                                                |

All raise `ConfigError` on wrong shapes or mixed dtypes. On a CPU the kernel is emulated, or, where `native` is asked
for, its twin for CPUs computes (`norm.cpp`, `activation.cpp` for SwiGLU), which has the same launchers.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from minimegatron.errors import require
from minimegatron.kernels import operators
from minimegatron.kernels.operators import (
    CPU_PARTS,
    DTYPES,
    accumulator,
    check_float,
    check_same,
    check_shape,
    like,
    operator,
    parts_for,
    run,
)

Tensor = torch.Tensor
Triple = tuple[Tensor, Tensor, Tensor]
Four = tuple[Tensor, Tensor, Tensor, Tensor]

# ----------------------------------------------------------------------------------------------------------- norms


def norm(x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, native: bool = False) -> Tensor:
    """[..., n] -> [..., n]; beta None is RMSNorm."""
    return _norm(x, gamma, beta, eps, native)[0]  # type: ignore[no-any-return]


def add_norm(
    x: Tensor, r: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, native: bool = False
) -> tuple[Tensor, Tensor]:
    """(y, h): the norm of h = x + r, and h rounded to the dtype, from which the norm is computed."""
    y, h, _, _ = _add_norm(x, r, gamma, beta, eps, native)
    return y, h


def _rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1] if x.numel() else 0


def _norm_outputs(op: str, x: Tensor, r: Tensor | None, gamma: Tensor, beta: Tensor | None) -> Four:
    """Empty (y, h, mean, rstd); h is x without a residual, mean is empty for RMSNorm."""
    check_float(op, "x", x)
    check_same(op, x, residual=r, gamma=gamma, beta=beta)
    n = x.shape[-1] if x.dim() else 0
    check_shape(op, gamma=(gamma, (n,)), beta=(beta, (n,)), residual=(r, tuple(x.shape)))
    rstd = x.new_empty(_rows(x), dtype=accumulator(x.dtype))
    return like(x), like(x) if r is not None else x, torch.empty_like(rstd if beta is not None else rstd[:0]), rstd


def _norm_forward(
    op: str, x: Tensor, r: Tensor | None, gamma: Tensor, beta: Tensor | None, eps: float, native: bool
) -> Four:
    x = x.contiguous()
    y, h, mean, rstd = _norm_outputs(op, x, r, gamma, beta)
    gamma, r, beta = gamma.contiguous(), *(t if t is None else t.contiguous() for t in (r, beta))
    if rstd.numel():
        args = (x, r, gamma, beta, h, y, mean, rstd, rstd.numel(), x.shape[-1], eps, DTYPES[x.dtype])
        run("norm", "mm_norm_forward", x, *args, native=native)
    return y, h, mean, rstd


@functools.cache
def resident(n: int, dtype: torch.dtype, centred: bool, device: torch.device) -> int:
    """Blocks of the backward pass that a multiprocessor holds at once, for rows of n numbers: one wave of them."""
    kernels = operators.library("norm", "cuda" if device.type == "cuda" else "emulated")
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return max(1, kernels.ask("mm_norm_backward_resident", n, int(centred), DTYPES[dtype]))


def _norm_backward_outputs(
    dy: Tensor, ds: Tensor | None, h: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, native: bool = False
) -> Triple:
    return like(h), torch.empty_like(gamma), gamma.new_empty(gamma.shape[0] if mean.numel() else 0)


@operator("norm_backward", _norm_backward_outputs)
def _norm_backward(
    dy: Tensor, ds: Tensor | None, h: Tensor, gamma: Tensor, mean: Tensor, rstd: Tensor, native: bool = False
) -> Triple:
    """(dh, dgamma, dbeta); `ds` is the gradient of h from its other use; mean and dbeta are empty for RMSNorm."""
    check_same("norm_backward", h, dy=dy, ds=ds, gamma=gamma)
    check_shape("norm_backward", dy=(dy, tuple(h.shape)), ds=(ds, tuple(h.shape)))
    dy, h, gamma, ds = dy.contiguous(), h.contiguous(), gamma.contiguous(), ds if ds is None else ds.contiguous()
    rows, n, centred = _rows(h), h.shape[-1], mean.numel() > 0
    if not rows:
        return torch.empty_like(h), torch.zeros_like(gamma), torch.zeros_like(gamma)
    dh, dgamma, dbeta = _norm_backward_outputs(dy, ds, h, gamma, mean, rstd)
    parts = min(rows, CPU_PARTS) if native else parts_for(rows, h.device, resident(n, h.dtype, centred, h.device))
    partial = h.new_empty((2, parts, n), dtype=rstd.dtype)
    args = (dy, ds, h, gamma, mean if centred else None, rstd, dh, partial, dgamma, dbeta, rows, n, parts)
    run("norm", "mm_norm_backward", h, *args, DTYPES[h.dtype], native=native)
    return dh, dgamma, dbeta


def _keep_norm(ctx: Any, inputs: Any, output: Any) -> None:
    x, gamma, beta, _, ctx.native = inputs
    ctx.centred = beta is not None
    ctx.save_for_backward(x, gamma, *output[1:])


def _norm_grads(ctx: Any, *grads: Any) -> Any:
    dh, dgamma, dbeta = _norm_backward(grads[0], None, *ctx.saved_tensors, ctx.native)
    return dh, dgamma, dbeta if ctx.centred else None, None, None


def _fake_norm(x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, native: bool = False) -> Triple:
    y, _, mean, rstd = _norm_outputs("norm", x, None, gamma, beta)
    return y, mean, rstd


@operator("norm", _fake_norm, keep=_keep_norm, grads=_norm_grads)
def _norm(x: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, native: bool = False) -> Triple:
    y, _, mean, rstd = _norm_forward("norm", x, None, gamma, beta, eps, native)
    return y, mean, rstd


def _keep_add_norm(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, gamma, beta, _, ctx.native = inputs
    ctx.centred = beta is not None
    ctx.save_for_backward(output[1], gamma, *output[2:])


def _add_norm_grads(ctx: Any, *grads: Any) -> Any:
    dy = torch.zeros_like(ctx.saved_tensors[0]) if grads[0] is None else grads[0]  # only the sum is used
    dh, dgamma, dbeta = _norm_backward(dy, grads[1], *ctx.saved_tensors, ctx.native)
    return dh, dh, dgamma, dbeta if ctx.centred else None, None, None


def _fake_add_norm(x: Tensor, r: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, native: bool = False) -> Four:
    return _norm_outputs("add_norm", x, r, gamma, beta)


@operator("add_norm", _fake_add_norm, keep=_keep_add_norm, grads=_add_norm_grads)
def _add_norm(x: Tensor, r: Tensor, gamma: Tensor, beta: Tensor | None, eps: float, native: bool = False) -> Four:
    return _norm_forward("add_norm", x, r, gamma, beta, eps, native)


# ----------------------------------------------------------------------------------------------------- activations


def _swiglu_output(x: Tensor, native: bool = False) -> Tensor:
    check_float("swiglu", "x", x)
    even = x.dim() > 0 and x.shape[-1] % 2 == 0
    require(even, f"swiglu: x is {tuple(x.shape)}", "give gate and up side by side: [..., 2 f]")
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@operator("swiglu_backward", lambda dy, x, native=False: like(x))
def _swiglu_backward(dy: Tensor, x: Tensor, native: bool = False) -> Tensor:
    check_same("swiglu_backward", x, dy=dy)
    dx, f = like(x), x.shape[-1] // 2
    if dy.numel():
        args = (dy.contiguous(), x.contiguous(), dx, dy.numel() // f, f, DTYPES[x.dtype])
        run("activation", "mm_swiglu_backward", x, *args, native=native)
    return dx


def _keep_swiglu(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.native = inputs
    ctx.save_for_backward(x)


def _swiglu_grads(ctx: Any, dy: Tensor) -> Any:
    return _swiglu_backward(dy, *ctx.saved_tensors, ctx.native), None


@operator("swiglu", _swiglu_output, keep=_keep_swiglu, grads=_swiglu_grads)
def swiglu(x: Tensor, native: bool = False) -> Tensor:
    """[..., 2 f] = [gate, up] -> [..., f]: silu(gate) * up."""
    y, f = _swiglu_output(x), x.shape[-1] // 2
    if y.numel():
        args = (x.contiguous(), y, y.numel() // f, f, DTYPES[x.dtype])
        run("activation", "mm_swiglu_forward", x, *args, native=native)
    return y


def gelu_of(product: Callable[..., Tensor], bias: Tensor, approximate: bool) -> Tensor:
    """`bias_gelu` of a product that leaves its bias to the kernel, see `ops.bias_gelu`."""
    return bias_gelu(product(add_bias=False), bias, approximate)  # type: ignore[no-any-return]


def _bias_gelu_output(x: Tensor, bias: Tensor, approximate: bool = False) -> Tensor:
    check_float("bias_gelu", "x", x)
    check_same("bias_gelu", x, bias=bias)
    check_shape("bias_gelu", bias=(bias, tuple(x.shape[-1:])))
    return like(x)


@operator("bias_gelu_backward", lambda dy, x, bias, approximate: (like(x), like(bias)))
def _bias_gelu_backward(dy: Tensor, x: Tensor, bias: Tensor, approximate: bool) -> tuple[Tensor, Tensor]:
    """(dx, dbias)"""
    check_same("bias_gelu_backward", x, dy=dy)
    dy, x, bias, f = dy.contiguous(), x.contiguous(), bias.contiguous(), x.shape[-1]
    dx, db = torch.empty_like(x), torch.empty_like(bias)
    if not x.numel():
        return dx, db.zero_()
    rows = x.numel() // f
    parts = parts_for(rows, x.device)
    partial = x.new_empty((parts, f), dtype=accumulator(x.dtype))
    args = (dy, x, bias, dx, partial, db, rows, f, parts, int(approximate), DTYPES[x.dtype])
    run("activation", "mm_bias_gelu_backward", x, *args)
    return dx, db


def _keep_gelu(ctx: Any, inputs: Any, output: Any) -> None:
    x, bias, ctx.approximate = inputs
    ctx.save_for_backward(x, bias)


def _gelu_grads(ctx: Any, dy: Tensor) -> Any:
    return *_bias_gelu_backward(dy, *ctx.saved_tensors, ctx.approximate), None


@operator("bias_gelu", _bias_gelu_output, keep=_keep_gelu, grads=_gelu_grads)
def bias_gelu(x: Tensor, bias: Tensor, approximate: bool = False) -> Tensor:
    """gelu(x + bias), x [..., f], bias [f]; the tanh form if `approximate`."""
    y, f = _bias_gelu_output(x, bias, approximate), x.shape[-1]
    if x.numel():
        args = (x.contiguous(), bias.contiguous(), y, x.numel() // f, f, int(approximate), DTYPES[x.dtype])
        run("activation", "mm_bias_gelu_forward", x, *args)
    return y


# --------------------------------------------------------------------------------------------------------- softmax


def _softmax_output(x: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    op = "scaled_softmax"
    check_float(op, "x", x)
    require(x.dim() == 4, f"{op}: x is {tuple(x.shape)}", "give scores [b, a, q, k]")
    if mask is not None:
        b, a, q, k = x.shape
        require(mask.dtype == torch.bool, f"{op}: mask is {mask.dtype}", "give a bool, True where a key is hidden")
        require(
            tuple(mask.shape) in ((b, 1, q, k), (1, 1, q, k), (b, a, q, k)),
            f"{op}: mask is {tuple(mask.shape)} for scores {tuple(x.shape)}",
            "give [b, 1, q, k], [1, 1, q, k] or [b, a, q, k]",
        )
    return like(x)


@operator("scaled_softmax_backward", lambda dy, y, scale, causal: like(y))
def _softmax_backward(dy: Tensor, y: Tensor, scale: float, causal: bool) -> Tensor:
    check_same("scaled_softmax_backward", y, dy=dy)
    dx, (q, k) = torch.empty_like(y), y.shape[-2:]
    if y.numel():
        args = (dy.contiguous(), y, dx, y.numel() // k, q, k, scale, int(causal), DTYPES[y.dtype])
        run("softmax", "mm_softmax_backward", y, *args)
    return dx


def _keep_softmax(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.scale, _, ctx.causal = inputs
    ctx.save_for_backward(output)


def _softmax_grads(ctx: Any, dy: Tensor) -> Any:
    return _softmax_backward(dy, *ctx.saved_tensors, ctx.scale, ctx.causal), None, None, None


@operator("scaled_softmax", _softmax_output, keep=_keep_softmax, grads=_softmax_grads)
def scaled_softmax(x: Tensor, scale: float, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    """softmax(scale x) over the last dim of scores [b, a, q, k].

    Args:
        mask: bool [b, 1, q, k], [1, 1, q, k] or [b, a, q, k], True where a query does not see a key. A query that sees
            nothing gets zeros.
        causal: query i sees keys j <= i + k - q.
    """
    y, (b, a, q, k) = _softmax_output(x, scale, mask, causal), x.shape
    x, mask = x.contiguous(), None if mask is None else mask.contiguous()
    masks = b * a if mask is None else mask.shape[0] * mask.shape[1]
    if x.numel():
        args = (x, mask, y, b * a * q, q, k, b * a // masks, scale, int(causal), DTYPES[x.dtype])
        run("softmax", "mm_softmax_forward", x, *args)
    return y
