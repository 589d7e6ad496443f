"""Attention without the s x s matrix. Kernels: `csrc/flash_attention.cu`; the same in torch: `blockwise.py`.

Kept for the backward pass: q, k, v, out and one number a query.
"""

from __future__ import annotations

from typing import Any

import torch

from minimegatron.errors import require
from minimegatron.kernels import checks
from minimegatron.kernels.launch import DTYPES, accumulator, run

MAX_HEAD = 128
Two = tuple[torch.Tensor, torch.Tensor]
Three = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def flash_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool = True) -> Two:
    """(out [b, a, n, d], lse [b, a, n]) of q [b, a, n, d], k and v [b, g, m, d].

    Causal: query i sees keys j <= i + m - n. A query that sees nothing gets 0, and lse -inf. The lse has no gradient.

    Raises:
        ConfigError: g does not divide a, d is larger than 128, or shapes and dtypes do not fit.
    """
    return torch.ops.minimegatron.flash_attention(q, k, v, scale, causal)


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: object, scale: float) -> torch.Tensor:
    """The output alone, where the mask is known to be causal and nothing else."""
    return flash_attention(q, k, v, scale)[0]


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    op = "flash_attention"
    checks.float_tensor(op, "q", q)
    checks.same(op, q, k=k, v=v)
    require(q.dim() == k.dim() == 4, f"{op}: q {tuple(q.shape)}, k {tuple(k.shape)}", "give [b, heads, tokens, d]")
    b, a, _, d = q.shape
    checks.shape(op, k=(k, (b, k.shape[1], k.shape[2], d)), v=(v, tuple(k.shape)))
    require(
        k.shape[1] > 0 and a % k.shape[1] == 0, f"{op}: {k.shape[1]} key heads for {a} query heads", "let g divide a"
    )
    require(1 <= d <= MAX_HEAD, f"{op}: heads of {d} channels", f"at most {MAX_HEAD}; else attention_backend sdpa")
    require(k.shape[2] > 0, f"{op}: no keys", "give at least one")


@torch.library.custom_op("minimegatron::flash_attention", mutates_args=(), device_types=("cpu", "cuda"))
def _flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> Two:
    _check(q, k, v)
    q, k, v = (t.contiguous() for t in (q, k, v))
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))
    if q.numel():
        run(
            "flash_attention",
            "mm_flash_forward",
            q,
            q,
            k,
            v,
            out,
            lse,
            *_sizes(q, k),
            scale,
            int(causal),
            DTYPES[q.dtype],
        )
    return out, lse


def _sizes(q: torch.Tensor, k: torch.Tensor) -> tuple[int, ...]:
    b, a, n, d = q.shape
    return b, a, k.shape[1], n, k.shape[2], d


@_flash.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, causal: bool) -> Two:
    _check(q, k, v)
    return checks.like(q), q.new_empty(q.shape[:3], dtype=accumulator(q.dtype))


@torch.library.custom_op("minimegatron::flash_attention_backward", mutates_args=(), device_types=("cpu", "cuda"))
def _flash_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    causal: bool,
) -> Three:
    checks.same("flash_attention_backward", q, dout=dout)
    dout, q, k, v = (t.contiguous() for t in (dout, q, k, v))
    dq, dk, dv, delta = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v), torch.empty_like(lse)
    if q.numel():
        args = (dout, q, k, v, out, lse, delta, dq, dk, dv, *_sizes(q, k), scale, int(causal), DTYPES[q.dtype])
        run("flash_attention", "mm_flash_backward", q, *args)
    return dq, dk, dv


@_flash_backward.register_fake
def _(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    causal: bool,
) -> Three:
    return checks.like(q), checks.like(k), checks.like(v)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, ctx.scale, ctx.causal = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _grads(ctx: Any, dout: torch.Tensor, _: Any) -> Any:
    grads = torch.ops.minimegatron.flash_attention_backward(dout, *ctx.saved_tensors, ctx.scale, ctx.causal)
    return *grads, None, None


_flash.register_autograd(_grads, setup_context=_keep)
