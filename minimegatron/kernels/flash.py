"""Attention without the s x s matrix. Kernels: `csrc/flash_attention.cu`; the same in torch: `blockwise.py`.

Kept for the backward pass: q, k, v, out and one number a query.
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
MAX_HEAD = 128
Two = tuple[Tensor, Tensor]
Three = tuple[Tensor, Tensor, Tensor]


def causal(q: Tensor, k: Tensor, v: Tensor, mask: object, scale: float) -> Tensor:
    """The output alone, for a mask that is known to be plain causal."""
    return flash_attention(q, k, v, scale)[0]  # type: ignore[no-any-return]


def _sizes(q: Tensor, k: Tensor) -> tuple[int, ...]:
    b, a, n, d = q.shape
    return b, a, k.shape[1], n, k.shape[2], d


def _outputs(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = True) -> Two:
    """Empty (out, lse)."""
    op = "flash_attention"
    check_float(op, "q", q)
    check_same(op, q, k=k, v=v)
    require(q.dim() == k.dim() == 4, f"{op}: q {tuple(q.shape)}, k {tuple(k.shape)}", "give [b, heads, tokens, d]")
    b, a, _, d = q.shape
    check_shape(op, k=(k, (b, k.shape[1], k.shape[2], d)), v=(v, tuple(k.shape)))
    require(
        k.shape[1] > 0 and a % k.shape[1] == 0, f"{op}: {k.shape[1]} key heads for {a} query heads", "let g divide a"
    )
    require(1 <= d <= MAX_HEAD, f"{op}: heads of {d} channels", f"at most {MAX_HEAD}; else attention_backend sdpa")
    require(k.shape[2] > 0, f"{op}: no keys", "give at least one")
    return like(q), q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))


@operator("flash_attention_backward", lambda dout, q, k, v, out, lse, scale, causal: (like(q), like(k), like(v)))
def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, causal: bool
) -> Three:
    check_same("flash_attention_backward", q, dout=dout)
    dout, q, k, v = (t.contiguous() for t in (dout, q, k, v))
    dq, dk, dv, delta = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v), torch.empty_like(lse)
    if q.numel():
        args = (dout, q, k, v, out, lse, delta, dq, dk, dv, *_sizes(q, k), scale, int(causal), DTYPES[q.dtype])
        run("flash_attention", "mm_flash_backward", q, *args)
    return dq, dk, dv


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _grads(ctx: Any, dout: Tensor, _: Any) -> Any:
    return *_backward(dout, *ctx.saved_tensors, ctx.scale, ctx.causal), None, None


@operator("flash_attention", _outputs, keep=_keep, grads=_grads)
def flash_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = True) -> Two:
    """(out [b, a, n, d], lse [b, a, n]) of q [b, a, n, d], k and v [b, g, m, d].

    Causal: query i sees keys j <= i + m - n. A query that sees nothing gets 0, and lse -inf. The lse has no gradient.

    Raises:
        ConfigError: g does not divide a, d is larger than 128, or shapes and dtypes do not fit.
    """
    out, lse = _outputs(q, k, v, scale, causal)
    q, k, v = (t.contiguous() for t in (q, k, v))
    if q.numel():
        args = (q, k, v, out, lse, *_sizes(q, k), scale, int(causal), DTYPES[q.dtype])
        run("flash_attention", "mm_flash_forward", q, *args)
    return out, lse
