"""Rotary embedding, and queries, keys and values out of a packed projection. Kernels: `csrc/rope.cu`, for CPUs
`csrc/rope.cpp`.

| operator | reads                                              | on                                               |
|----------|----------------------------------------------------|--------------------------------------------------|
| `rope`   | x by its strides: a view into packed q, k, v       | a GPU, the emulator, a CPU                       |
| `heads`  | the packed projection, once, for q, k and v        | a CPU; elsewhere `turned_heads` calls `rope`     |

Kept for the backward pass: cos and sin. A rotation is undone by the rotation back, so the gradient of `rope` is `rope`
with `backward` turned over; that of `heads` writes the gradients of q, k and v into one packed tensor.

Both raise `ConfigError` on wrong shapes or mixed dtypes. Su et al. 2021 (arXiv 2104.09864).
"""

from __future__ import annotations

from typing import Any

import torch

from minimegatron.errors import require
from minimegatron.kernels.operators import (
    DTYPES,
    accumulator,
    check_float,
    check_same,
    check_shape,
    like,
    operator,
    run,
)

Tensor = torch.Tensor
Triple = tuple[Tensor, Tensor, Tensor]


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, native: bool = False) -> Tensor:
    """`rope` with angles of any float dtype."""
    wide = accumulator(x.dtype)
    return rope(x, cos.to(wide), sin.to(wide), interleaved, False, native)  # type: ignore[no-any-return]


def _rope_output(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, backward: bool = False, native: bool = False
) -> Tensor:
    check_float("rope", "x", x)
    fits = x.dim() == 4 and cos.dim() == 4
    require(fits, f"rope: x {tuple(x.shape)}, cos {tuple(cos.shape)}", "give [s, b, heads, d]")
    s, b, r, wide = x.shape[0], x.shape[1], cos.shape[-1], accumulator(x.dtype)
    require(
        cos.dtype == sin.dtype == wide and cos.device == sin.device == x.device,
        f"rope: cos is {cos.dtype} on {cos.device}, x {x.dtype} on {x.device}",
        f"give angles in {wide} on the device of x",
    )
    require(2 * r <= x.shape[-1], f"rope: {r} angles for {x.shape[-1]} channels", "give at most d / 2")
    angles = (s, b if cos.shape[1] == b else 1, 1, r)
    check_shape("rope", cos=(cos, angles), sin=(sin, angles))
    return like(x)


def _keep_rope(ctx: Any, inputs: Any, output: Any) -> None:
    _, cos, sin, ctx.interleaved, ctx.backward, ctx.native = inputs
    ctx.save_for_backward(cos, sin)


def _rope_grads(ctx: Any, dy: Tensor) -> Any:
    back = rope(dy, *ctx.saved_tensors, ctx.interleaved, not ctx.backward, ctx.native)
    return back, None, None, None, None, None


@operator("rope", _rope_output, keep=_keep_rope, grads=_rope_grads)
def rope(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, backward: bool = False, native: bool = False
) -> Tensor:
    """Rotate the first 2 r channels of every head; the angles have no gradient.

    Args:
        x: [s, b, heads, d].
        cos, sin: [s, b or 1, 1, r] in fp32 (fp64 for fp64).
        interleaved: pairs (2 i, 2 i + 1) instead of (i, i + r).
        backward: rotate back.
    """
    y = _rope_output(x, cos, sin)
    x = x if x.stride(-1) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    if x.numel():
        args = (x, cos, sin, y, *x.shape, cos.shape[-1], *x.stride()[:3], cos.shape[1], int(interleaved), int(backward))
        run("rope", "mm_rope", x, *args, DTYPES[x.dtype], native=native)
    return y


def turned_heads(packed: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Triple:
    """`ops.heads` by the kernel of `rope`; v is a view."""
    q, k, v = packed.split([packed.shape[3] - 2, 1, 1], 3)
    q, k = (turn(t, cos, sin, interleaved) for t in (q.flatten(2, 3), k.squeeze(3)))
    return q, k, v.squeeze(3)


def native_heads(packed: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Triple:
    """`ops.heads` by a kernel for CPUs, with angles of any float dtype."""
    wide = accumulator(packed.dtype)
    return heads(packed, cos.to(wide), sin.to(wide), interleaved, True)  # type: ignore[no-any-return]


def _heads_outputs(packed: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, native: bool = False) -> Triple:
    fits = packed.dim() == 5 and packed.shape[3] > 2
    require(fits, f"heads: packed is {tuple(packed.shape)}", "give [s, b, groups, a/g + 2, d]")
    s, b, g, n, d = packed.shape
    _rope_output(packed.view(s, b, g * n, d), cos, sin)
    return packed.new_empty((s, b, g * (n - 2), d)), packed.new_empty((s, b, g, d)), packed.new_empty((s, b, g, d))


def _packed_output(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, native: bool = False
) -> Tensor:
    s, b, g, d = dk.shape
    return dk.new_empty((s, b, g, dq.shape[2] // g + 2, d))


@operator("heads_backward", _packed_output)
def _heads_backward(
    dq: Tensor, dk: Tensor, dv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, native: bool = False
) -> Tensor:
    check_same("heads_backward", dq, dk=dk, dv=dv)
    packed = _packed_output(dq, dk, dv, cos, sin, interleaved)
    if packed.numel():
        args = (*(t.contiguous() for t in (dq, dk, dv, cos, sin)), packed, *_heads_sizes(packed, cos), int(interleaved))
        run("rope", "mm_heads_backward", packed, *args, DTYPES[packed.dtype], native=True)
    return packed


def _heads_sizes(packed: Tensor, cos: Tensor) -> tuple[int, ...]:
    s, b, g, n, d = packed.shape
    return s, b, g, n - 2, d, cos.shape[-1], cos.shape[1]


def _keep_heads(ctx: Any, inputs: Any, output: Any) -> None:
    _, cos, sin, ctx.interleaved, ctx.native = inputs
    ctx.save_for_backward(cos, sin)
    ctx.shapes = [t.shape for t in output]


def _heads_grads(ctx: Any, *grads: Tensor | None) -> Any:
    cos, sin = ctx.saved_tensors
    like = next(g for g in grads if g is not None)
    given = [like.new_zeros(shape) if g is None else g for g, shape in zip(grads, ctx.shapes, strict=True)]
    return _heads_backward(*given, cos, sin, ctx.interleaved, ctx.native), None, None, None, None


@operator("heads", _heads_outputs, keep=_keep_heads, grads=_heads_grads)
def heads(packed: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, native: bool = False) -> Triple:
    """(q [s, b, a, d], k, v [s, b, g, d]) of packed [s, b, g, a/g + 2, d], q and k turned as by `rope`; on a CPU."""
    assert native, "only the kernel for CPUs takes a packed projection"
    q, k, v = _heads_outputs(packed, cos, sin)
    if packed.numel():
        args = (*(t.contiguous() for t in (packed, cos, sin)), q, k, v, *_heads_sizes(packed, cos), int(interleaved))
        run("rope", "mm_heads", packed, *args, DTYPES[packed.dtype], native=True)
    return q, k, v
