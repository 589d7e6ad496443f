"""RMSNorm and LayerNorm operators, alone and with the residual addition before them. Kernels: `csrc/norm.cu`.

    norm(x, gamma, beta, eps)                      y
    add_norm(x, r, gamma, beta, eps)               y and h = x + r, one pass over memory instead of two

beta None is RMSNorm. Kept for the backward pass: h (which is x without a residual) and one or two numbers a row.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch

from minimegatron.kernels import checks, launch
from minimegatron.kernels.launch import DTYPES, accumulator, run

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def norm(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, eps: float) -> torch.Tensor:
    """[..., n] -> [..., n]. Raises `ConfigError` on other shapes or mixed dtypes."""
    return torch.ops.minimegatron.norm(x, gamma, beta, eps)[0]


def add_norm(
    x: torch.Tensor, r: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, h): the norm of h = x + r, and h rounded to the dtype, from which the norm is computed."""
    y, h, _, _ = torch.ops.minimegatron.add_norm(x, r, gamma, beta, eps)
    return y, h


def _check(op: str, x: torch.Tensor, r: torch.Tensor | None, gamma: torch.Tensor, beta: torch.Tensor | None) -> None:
    checks.float_tensor(op, "x", x)
    checks.same(op, x, residual=r, gamma=gamma, beta=beta)
    n = x.shape[-1] if x.dim() else 0
    checks.shape(op, gamma=(gamma, (n,)), beta=(beta, (n,)), residual=(r, tuple(x.shape)))


def _rows(x: torch.Tensor) -> int:
    return x.numel() // x.shape[-1] if x.numel() else 0


def _forward(
    op: str, x: torch.Tensor, r: torch.Tensor | None, gamma: torch.Tensor, beta: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y, h, mean, rstd); mean is empty for RMSNorm."""
    _check(op, x, r, gamma, beta)
    x, gamma = x.contiguous(), gamma.contiguous()
    r, beta = (t if t is None else t.contiguous() for t in (r, beta))
    rows = _rows(x)
    y, h = torch.empty_like(x), torch.empty_like(x) if r is not None else x
    rstd = x.new_empty(rows, dtype=accumulator(x.dtype))
    mean = torch.empty_like(rstd if beta is not None else rstd[:0])
    if rows:
        args = (x, r, gamma, beta, h, y, mean, rstd, rows, x.shape[-1], eps, DTYPES[x.dtype])
        run("norm", "mm_norm_forward", x, *args)
    return y, h, mean, rstd


@torch.library.custom_op("minimegatron::norm", mutates_args=(), device_types=("cpu", "cuda"))
def _norm(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, eps: float) -> Triple:
    y, _, mean, rstd = _forward("norm", x, None, gamma, beta, eps)
    return y, mean, rstd


@_norm.register_fake
def _(x: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, eps: float) -> Triple:
    _check("norm", x, None, gamma, beta)
    rstd = x.new_empty(_rows(x), dtype=accumulator(x.dtype))
    return checks.like(x), torch.empty_like(rstd if beta is not None else rstd[:0]), rstd


@torch.library.custom_op("minimegatron::add_norm", mutates_args=(), device_types=("cpu", "cuda"))
def _add_norm(
    x: torch.Tensor, r: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _forward("add_norm", x, r, gamma, beta, eps)


@_add_norm.register_fake
def _(
    x: torch.Tensor, r: torch.Tensor, gamma: torch.Tensor, beta: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    _check("add_norm", x, r, gamma, beta)
    rstd = x.new_empty(_rows(x), dtype=accumulator(x.dtype))
    return checks.like(x), checks.like(x), torch.empty_like(rstd if beta is not None else rstd[:0]), rstd


@functools.cache
def resident(n: int, dtype: torch.dtype, centred: bool, device: torch.device) -> int:
    """How many blocks of the backward pass a multiprocessor holds at once, for rows of n numbers: one wave of them."""
    found = launch.library("norm", "cuda" if device.type == "cuda" else "emulated")
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        return max(1, found.ask("mm_norm_backward_resident", n, int(centred), DTYPES[dtype]))


@torch.library.custom_op("minimegatron::norm_backward", mutates_args=(), device_types=("cpu", "cuda"))
def _norm_backward(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    h: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
) -> Triple:
    """(dh, dgamma, dbeta); `ds` reaches h by another way; mean and dbeta are empty for RMSNorm."""
    checks.same("norm_backward", h, dy=dy, ds=ds, gamma=gamma)
    checks.shape("norm_backward", dy=(dy, tuple(h.shape)), ds=(ds, tuple(h.shape)))
    dy, h, gamma = dy.contiguous(), h.contiguous(), gamma.contiguous()
    ds = ds if ds is None else ds.contiguous()
    rows, n = _rows(h), h.shape[-1]
    centred = mean.numel() == rows and rows > 0
    dh = torch.empty_like(h)
    if not rows:
        return dh, torch.zeros_like(gamma), torch.zeros_like(gamma)
    parts = checks.parts_for(rows, h.device, resident(n, h.dtype, centred, h.device))
    partial = h.new_empty((2, parts, n), dtype=rstd.dtype)
    dgamma, dbeta = torch.empty_like(gamma), torch.empty_like(gamma) if centred else gamma.new_empty(0)
    args = (
        dy,
        ds,
        h,
        gamma,
        mean if centred else None,
        rstd,
        dh,
        partial,
        dgamma,
        dbeta,
        rows,
        n,
        parts,
        DTYPES[h.dtype],
    )
    run("norm", "mm_norm_backward", h, *args)
    return dh, dgamma, dbeta


@_norm_backward.register_fake
def _(
    dy: torch.Tensor,
    ds: torch.Tensor | None,
    h: torch.Tensor,
    gamma: torch.Tensor,
    mean: torch.Tensor,
    rstd: torch.Tensor,
) -> Triple:
    return checks.like(h), torch.empty_like(gamma), gamma.new_empty(gamma.shape[0] if mean.numel() else 0)


def _keep_norm(ctx: Any, inputs: Any, output: Any) -> None:
    x, gamma, beta, _ = inputs
    ctx.centred = beta is not None
    ctx.save_for_backward(x, gamma, *output[1:])


def _keep_add_norm(ctx: Any, inputs: Any, output: Any) -> None:
    _, _, gamma, beta, _ = inputs
    ctx.centred = beta is not None
    ctx.save_for_backward(output[1], gamma, *output[2:])


def _norm_grads(ctx: Any, *grads: Any) -> Any:
    dh, dgamma, dbeta = torch.ops.minimegatron.norm_backward(grads[0], None, *ctx.saved_tensors)
    return dh, dgamma, dbeta if ctx.centred else None, None


def _add_norm_grads(ctx: Any, *grads: Any) -> Any:
    dh, dgamma, dbeta = torch.ops.minimegatron.norm_backward(grads[0], grads[1], *ctx.saved_tensors)
    return dh, dh, dgamma, dbeta if ctx.centred else None, None


_norm.register_autograd(_norm_grads, setup_context=_keep_norm)
_add_norm.register_autograd(_add_norm_grads, setup_context=_keep_add_norm)
