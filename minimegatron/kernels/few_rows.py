"""CPU kernels for few rows: RMSNorm, SwiGLU, RoPE and linear in one pass each, forward alone (`csrc/few_rows.cpp`).

The problem in a sentence: a decode step has one row a sequence, and torch spends more time launching the six operators
of an RMSNorm than computing them.

`ops` calls these under `torch.inference_mode()`, for fp32. In 16 bits torch computes, because its operators round after
every pass, as Hugging Face's models do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minimegatron.kernels import operators, plain


def norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """[..., n] -> [..., n], RMSNorm; torch computes LayerNorm, in one pass."""
    if bias is not None or x.dtype != torch.float32:
        return plain.norm(x, weight, bias, eps)
    x = x.contiguous()
    out = torch.empty_like(x)
    n = x.shape[-1]
    _call("mm_rms_norm", x, None, weight, None, out, x.numel() // n, n, eps)
    return out


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMSNorm(h), h) of h = x + residual."""
    if bias is not None or x.dtype != torch.float32:
        return plain.add_norm(x, residual, weight, bias, eps)
    x, residual = x.contiguous(), residual.contiguous()
    h, out, n = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    _call("mm_rms_norm", x, residual, weight, h, out, x.numel() // n, n, eps)
    return out, h


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """[..., 2 f] = [gate, up] -> [..., f]."""
    if x.dtype != torch.float32:
        return plain.swiglu(x)
    x, n = x.contiguous(), x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], n))
    _call("mm_swiglu", x, out, x.numel() // (2 * n), n)
    return out


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """[n, 1, heads, d] -> the same shape; see `ops.rope`."""
    tokens, b, heads, d = x.shape
    if b != 1 or x.stride(-1) != 1 or not x.dtype == cos.dtype == torch.float32:
        return plain.rope(x, cos, sin, interleaved)
    out = x.new_empty(x.shape)
    half, strides = cos.shape[-1], (x.stride(0), x.stride(2))
    _call("mm_rope", x, cos.contiguous(), sin.contiguous(), out, tokens, heads, d, half, *strides, int(interleaved))
    return out


def turn_and_keep(
    packed: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor | None:
    """See `ops.turn_and_keep`; None where nothing was done: another dtype, several samples, strided channels."""
    n, b, groups, width, d = packed.shape
    if (
        b != 1
        or not packed.dtype == cos.dtype == torch.float32
        or not key_pages.stride(-1) == value_pages.stride(-1) == 1
    ):
        return None
    q = packed.new_empty((n, 1, groups * (width - 2), d))
    tensors = packed.contiguous(), cos.contiguous(), sin.contiguous(), q, key_pages, value_pages, rows
    sizes = n, groups, width - 2, d, cos.shape[-1], key_pages.shape[1]
    strides = (*key_pages.stride()[:3], *value_pages.stride()[:3])
    _call("mm_turn_and_keep", *tensors, *sizes, *strides, int(interleaved))
    return q


MOST = 3  # rows of x that `linear` takes


def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear` supports these: at most `MOST` rows, fp32, a contiguous weight."""
    return 0 < x.numel() <= MOST * x.shape[-1] and x.dtype == torch.float32 and weight.is_contiguous()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., i] of at most `MOST` rows, weight [o, i] -> [..., o]."""
    x, (o, i) = x.contiguous(), weight.shape
    out = x.new_empty((*x.shape[:-1], o))
    _call("mm_product", x, weight, bias, out, x.numel() // i, o, i)
    return out


def _call(name: str, *arguments: Any) -> None:
    library: Callable[..., Any] = operators.library("few_rows", "cpu").call
    library(name, *arguments, torch.get_num_threads())
