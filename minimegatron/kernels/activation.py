"""SwiGLU and bias-GeLU. Kernels: `csrc/activation.cu`. Kept for the backward pass: the inputs alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minimegatron.errors import require
from minimegatron.kernels import checks
from minimegatron.kernels.launch import DTYPES, accumulator, run


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """[..., 2 f] = [gate, up] -> [..., f]: silu(gate) * up. Raises `ConfigError` where the last dim is odd."""
    return torch.ops.minimegatron.swiglu(x)


def bias_gelu(x: torch.Tensor, bias: torch.Tensor, approximate: bool = False) -> torch.Tensor:
    """gelu(x + bias), x [..., f], bias [f]; the tanh form where `approximate`."""
    return torch.ops.minimegatron.bias_gelu(x, bias, approximate)


def gelu_of(product: Callable[..., torch.Tensor], bias: torch.Tensor, approximate: bool) -> torch.Tensor:
    """`bias_gelu` of a product that leaves its bias to the kernel, see `ops.bias_gelu`."""
    return bias_gelu(product(add_bias=False), bias, approximate)


def _check_swiglu(x: torch.Tensor) -> None:
    checks.float_tensor("swiglu", "x", x)
    require(
        x.dim() > 0 and x.shape[-1] % 2 == 0,
        f"swiglu: x is {tuple(x.shape)}",
        "give gate and up side by side: [..., 2 f]",
    )


@torch.library.custom_op("minimegatron::swiglu", mutates_args=(), device_types=("cpu", "cuda"))
def _swiglu(x: torch.Tensor) -> torch.Tensor:
    _check_swiglu(x)
    x, f = x.contiguous(), x.shape[-1] // 2
    y = x.new_empty((*x.shape[:-1], f))
    if y.numel():
        run("activation", "mm_swiglu_forward", x, x, y, y.numel() // f, f, DTYPES[x.dtype])
    return y


@_swiglu.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    _check_swiglu(x)
    return x.new_empty((*x.shape[:-1], x.shape[-1] // 2))


@torch.library.custom_op("minimegatron::swiglu_backward", mutates_args=(), device_types=("cpu", "cuda"))
def _swiglu_backward(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    checks.same("swiglu_backward", x, dy=dy)
    dy, x, f = dy.contiguous(), x.contiguous(), x.shape[-1] // 2
    dx = torch.empty_like(x)
    if dy.numel():
        run("activation", "mm_swiglu_backward", x, dy, x, dx, dy.numel() // f, f, DTYPES[x.dtype])
    return dx


@_swiglu_backward.register_fake
def _(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return checks.like(x)


def _keep_swiglu(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _swiglu_grads(ctx: Any, dy: torch.Tensor) -> Any:
    return torch.ops.minimegatron.swiglu_backward(dy, *ctx.saved_tensors)


_swiglu.register_autograd(_swiglu_grads, setup_context=_keep_swiglu)


def _check_gelu(x: torch.Tensor, bias: torch.Tensor) -> None:
    checks.float_tensor("bias_gelu", "x", x)
    checks.same("bias_gelu", x, bias=bias)
    checks.shape("bias_gelu", bias=(bias, tuple(x.shape[-1:])))


@torch.library.custom_op("minimegatron::bias_gelu", mutates_args=(), device_types=("cpu", "cuda"))
def _bias_gelu(x: torch.Tensor, bias: torch.Tensor, approximate: bool) -> torch.Tensor:
    _check_gelu(x, bias)
    x, f = x.contiguous(), x.shape[-1]
    y = torch.empty_like(x)
    if x.numel():
        args = (x, bias.contiguous(), y, x.numel() // f, f, int(approximate), DTYPES[x.dtype])
        run("activation", "mm_bias_gelu_forward", x, *args)
    return y


@_bias_gelu.register_fake
def _(x: torch.Tensor, bias: torch.Tensor, approximate: bool) -> torch.Tensor:
    _check_gelu(x, bias)
    return checks.like(x)


@torch.library.custom_op("minimegatron::bias_gelu_backward", mutates_args=(), device_types=("cpu", "cuda"))
def _bias_gelu_backward(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, approximate: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, dbias)"""
    checks.same("bias_gelu_backward", x, dy=dy)
    dy, x, bias, f = dy.contiguous(), x.contiguous(), bias.contiguous(), x.shape[-1]
    dx, db = torch.empty_like(x), torch.empty_like(bias)
    if not x.numel():
        return dx, db.zero_()
    rows = x.numel() // f
    parts = checks.parts_for(rows, x.device)
    partial = x.new_empty((parts, f), dtype=accumulator(x.dtype))
    args = (dy, x, bias, dx, partial, db, rows, f, parts, int(approximate), DTYPES[x.dtype])
    run("activation", "mm_bias_gelu_backward", x, *args)
    return dx, db


@_bias_gelu_backward.register_fake
def _(dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, approximate: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return checks.like(x), checks.like(bias)


def _keep_gelu(ctx: Any, inputs: Any, output: Any) -> None:
    x, bias, ctx.approximate = inputs
    ctx.save_for_backward(x, bias)


def _gelu_grads(ctx: Any, dy: torch.Tensor) -> Any:
    return *torch.ops.minimegatron.bias_gelu_backward(dy, *ctx.saved_tensors, ctx.approximate), None


_bias_gelu.register_autograd(_gelu_grads, setup_context=_keep_gelu)
