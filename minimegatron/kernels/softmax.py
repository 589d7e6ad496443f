"""Scaled softmax over attention scores, causal or masked. Kernel: `csrc/softmax.cu`.

The mask is bool, True where a query does not see a key: [b, 1, q, k], [1, 1, q, k] or [b, a, q, k]. A query that sees
nothing gets zeros. Kept for the backward pass: the output alone.
"""

from __future__ import annotations

from typing import Any

import torch

from minimegatron.errors import require
from minimegatron.kernels import checks
from minimegatron.kernels.launch import DTYPES, run


def scaled_softmax(
    x: torch.Tensor, scale: float, mask: torch.Tensor | None = None, causal: bool = False
) -> torch.Tensor:
    """softmax(scale x) over the last dim of scores [b, a, q, k]; causal: query i sees keys j <= i + k - q.

    Raises:
        ConfigError: other than four dims, a mask that is not bool or has another shape.
    """
    return torch.ops.minimegatron.scaled_softmax(x, mask, scale, causal)


def _check(x: torch.Tensor, mask: torch.Tensor | None) -> None:
    op = "scaled_softmax"
    checks.float_tensor(op, "x", x)
    require(x.dim() == 4, f"{op}: x is {tuple(x.shape)}", "give scores [b, a, q, k]")
    if mask is not None:
        b, a, q, k = x.shape
        require(mask.dtype == torch.bool, f"{op}: mask is {mask.dtype}", "give a bool, True where a key is hidden")
        require(
            tuple(mask.shape) in ((b, 1, q, k), (1, 1, q, k), (b, a, q, k)),
            f"{op}: mask is {tuple(mask.shape)} for scores {tuple(x.shape)}",
            "give [b, 1, q, k], [1, 1, q, k] or [b, a, q, k]",
        )


@torch.library.custom_op("minimegatron::scaled_softmax", mutates_args=(), device_types=("cpu", "cuda"))
def _softmax(x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool) -> torch.Tensor:
    _check(x, mask)
    x, mask = x.contiguous(), None if mask is None else mask.contiguous()
    b, a, q, k = x.shape
    y = torch.empty_like(x)
    masks = b * a if mask is None else mask.shape[0] * mask.shape[1]
    if x.numel():
        args = (x, mask, y, b * a * q, q, k, b * a // masks, scale, int(causal), DTYPES[x.dtype])
        run("softmax", "mm_softmax_forward", x, *args)
    return y


@_softmax.register_fake
def _(x: torch.Tensor, mask: torch.Tensor | None, scale: float, causal: bool) -> torch.Tensor:
    _check(x, mask)
    return checks.like(x)


@torch.library.custom_op("minimegatron::scaled_softmax_backward", mutates_args=(), device_types=("cpu", "cuda"))
def _softmax_backward(dy: torch.Tensor, y: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    checks.same("scaled_softmax_backward", y, dy=dy)
    dy, (q, k) = dy.contiguous(), y.shape[-2:]
    dx = torch.empty_like(y)
    if y.numel():
        args = (dy, y, dx, y.numel() // k, q, k, scale, int(causal), DTYPES[y.dtype])
        run("softmax", "mm_softmax_backward", y, *args)
    return dx


@_softmax_backward.register_fake
def _(dy: torch.Tensor, y: torch.Tensor, scale: float, causal: bool) -> torch.Tensor:
    return checks.like(y)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.scale, ctx.causal = inputs[2], inputs[3]
    ctx.save_for_backward(output)


def _grads(ctx: Any, dy: torch.Tensor) -> Any:
    return (
        torch.ops.minimegatron.scaled_softmax_backward(dy, *ctx.saved_tensors, ctx.scale, ctx.causal),
        None,
        None,
        None,
    )


_softmax.register_autograd(_grads, setup_context=_keep)
