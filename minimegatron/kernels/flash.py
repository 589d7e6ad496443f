"""Attention without the s x s matrix. Kernels: `csrc/flash_attention.cu`, for CPUs `csrc/flash_attention.cpp`; the same
in torch: `blockwise.py`.

Kept for the backward pass: q, k, v, out and one number a query. The kernel for CPUs reads q, k and v by strides, so
views of a packed projection are not copied, and its results lie in memory as layers read them: [tokens, b, heads, d].
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


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float, native: bool = False) -> Tensor:
    """The output alone, for a mask that is known to be plain: causal or full."""
    return flash_attention(q, k, v, scale, mask.causal, native)[0]  # type: ignore[no-any-return]


def fits(q: Tensor, v: Tensor) -> bool:
    """Whether the kernels have such heads, of queries [..., d] and values [..., d']."""
    return q.shape[-1] == v.shape[-1] <= MAX_HEAD


def _sizes(q: Tensor, k: Tensor) -> tuple[int, ...]:
    b, a, n, d = q.shape
    return b, a, k.shape[1], n, k.shape[2], d


def _by_token(x: Tensor) -> Tensor:
    """An empty tensor of the shape of x [b, heads, tokens, d], whose memory has [tokens, b, heads, d]."""
    b, heads, tokens, d = x.shape
    return x.new_empty((tokens, b, heads, d)).permute(1, 2, 0, 3)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Those of a sample, a head and a token, of each tensor."""
    return tuple(stride for t in tensors for stride in t.stride()[:3])


def _dense(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, those copied whose channels are not dense."""
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)


def _outputs(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = True, native: bool = False) -> Two:
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
    return _by_token(q) if native else like(q), q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))


def _gradients(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    native: bool = False,
) -> Three:
    """Empty (dq, dk, dv)."""
    empty = _by_token if native else like
    return empty(q), empty(k), empty(v)


@operator("flash_attention_backward", _gradients)
def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    native: bool = False,
) -> Three:
    """(dq, dk, dv) from the results of `flash_attention`."""
    check_same("flash_attention_backward", q, dout=dout)
    check_shape("flash_attention_backward", dout=(dout, tuple(q.shape)))
    if native:
        dout, q, k, v, out = _dense(dout, q, k, v, out)
        grads = _gradients(dout, q, k, v, out, lse, scale, causal, native)
        if not q.numel():
            return grads[0], grads[1].zero_(), grads[2].zero_()
        args = (dout, q, k, v, out, lse.contiguous(), *grads, *_sizes(q, k), *_strides(dout, q, k, v, out, *grads))
        run("flash_attention", "mm_flash_backward", q, *args, scale, int(causal), DTYPES[q.dtype], native=True)
        return grads
    dout, q, k, v = (t.contiguous() for t in (dout, q, k, v))
    dq, dk, dv, delta = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v), torch.empty_like(lse)
    if q.numel():
        args = (dout, q, k, v, out, lse, delta, dq, dk, dv, *_sizes(q, k), scale, int(causal), DTYPES[q.dtype])
        run("flash_attention", "mm_flash_backward", q, *args)
    return dq, dk, dv


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.scale, ctx.causal, ctx.native = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _grads(ctx: Any, dout: Tensor, _: Any) -> Any:
    return *attention_backward(dout, *ctx.saved_tensors, ctx.scale, ctx.causal, ctx.native), None, None, None


@operator("flash_attention", _outputs, keep=_keep, grads=_grads)
def flash_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool = True, native: bool = False) -> Two:
    """(out [b, a, n, d], lse [b, a, n]) of q [b, a, n, d], k and v [b, g, m, d].

    Causal: query i sees keys j <= i + m - n. A query that sees nothing gets 0, and lse -inf. The lse has no gradient.

    Raises:
        ConfigError: g does not divide a, d is larger than 128, or shapes and dtypes do not fit.
    """
    out, lse = _outputs(q, k, v, scale, causal, native)
    if native:
        q, k, v = _dense(q, k, v)
        if q.numel():
            args = (q, k, v, out, lse, *_sizes(q, k), *_strides(q, k, v, out), scale, int(causal), DTYPES[q.dtype])
            run("flash_attention", "mm_flash_forward", q, *args, native=True)
        return out, lse
    q, k, v = (t.contiguous() for t in (q, k, v))
    if q.numel():
        args = (q, k, v, out, lse, *_sizes(q, k), scale, int(causal), DTYPES[q.dtype])
        run("flash_attention", "mm_flash_forward", q, *args)
    return out, lse
