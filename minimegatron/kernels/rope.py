"""Rotary position embedding. Kernel: `csrc/rope.cu`. Kept for the backward pass: cos and sin.

x may be a view into packed queries, keys and values; it is read by its strides, not copied first.
"""

from __future__ import annotations

from typing import Any

import torch

from minimegatron.errors import require
from minimegatron.kernels import checks
from minimegatron.kernels.launch import DTYPES, accumulator, run


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Turn the first 2 r channels of every head; the angles have no gradient.

    Args:
        x: [s, b, heads, d].
        cos, sin: [s, b or 1, 1, r] in fp32 (fp64 for fp64).
        interleaved: pairs (2 i, 2 i + 1) instead of (i, i + r).
    """
    return torch.ops.minimegatron.rope(x, cos, sin, interleaved, False)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """`rope` with angles of any float dtype."""
    wide = accumulator(x.dtype)
    return rope(x, cos.to(wide), sin.to(wide), interleaved)


def _check(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    checks.float_tensor("rope", "x", x)
    require(
        x.dim() == 4 and cos.dim() == 4, f"rope: x {tuple(x.shape)}, cos {tuple(cos.shape)}", "give [s, b, heads, d]"
    )
    s, b, r = x.shape[0], x.shape[1], cos.shape[-1]
    wide = accumulator(x.dtype)
    require(
        cos.dtype == sin.dtype == wide and cos.device == sin.device == x.device,
        f"rope: cos is {cos.dtype} on {cos.device}, x {x.dtype} on {x.device}",
        f"give angles in {wide} on the device of x",
    )
    require(2 * r <= x.shape[-1], f"rope: {r} angles for {x.shape[-1]} channels", "give at most d / 2")
    batch = b if cos.shape[1] == b else 1
    checks.shape("rope", cos=(cos, (s, batch, 1, r)), sin=(sin, (s, batch, 1, r)))


@torch.library.custom_op("minimegatron::rope", mutates_args=(), device_types=("cpu", "cuda"))
def _rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, backward: bool) -> torch.Tensor:
    _check(x, cos, sin)
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    y = checks.like(x)
    if x.numel():
        args = (x, cos, sin, y, *x.shape, cos.shape[-1], *x.stride()[:3], cos.shape[1], int(interleaved), int(backward))
        run("rope", "mm_rope", x, *args, DTYPES[x.dtype])
    return y


@_rope.register_fake
def _(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, backward: bool) -> torch.Tensor:
    _check(x, cos, sin)
    return checks.like(x)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    _, cos, sin, ctx.interleaved, ctx.backward = inputs
    ctx.save_for_backward(cos, sin)


def _grads(ctx: Any, dy: torch.Tensor) -> Any:
    dx = torch.ops.minimegatron.rope(dy, *ctx.saved_tensors, ctx.interleaved, not ctx.backward)
    return dx, None, None, None, None


_rope.register_autograd(_grads, setup_context=_keep)
