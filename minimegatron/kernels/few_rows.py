"""CPU kernels as a decode step wants them: RMSNorm, SwiGLU, RoPE and linear of few rows, forward alone.

The problem in a sentence: a decode step has one row a sequence, and torch spends more time launching the six operators
of an RMSNorm than computing them; even the operator around a kernel would cost more than the kernel.

`ops` calls these under `torch.inference_mode()`, for fp32: the kernels of training (`norm.cpp`, `activation.cpp`,
`rope.cpp`), and `few_rows.cpp`. In 16 bits torch computes, because its operators round after every pass, as Hugging
Face's models do.
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
    out, n = torch.empty_like(x), x.shape[-1]
    sizes = x.numel() // n, n, eps, operators.DTYPES[x.dtype]
    _call("norm", "mm_norm_forward", x, None, weight, None, None, out, None, None, *sizes)
    return out


def add_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(RMSNorm(h), h) of h = x + residual."""
    if bias is not None or x.dtype != torch.float32:
        return plain.add_norm(x, residual, weight, bias, eps)
    x, residual = x.contiguous(), residual.contiguous()
    h, out, n = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    sizes = x.numel() // n, n, eps, operators.DTYPES[x.dtype]
    _call("norm", "mm_norm_forward", x, residual, weight, None, h, out, None, None, *sizes)
    return out, h


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """[..., 2 f] = [gate, up] -> [..., f]."""
    if x.dtype != torch.float32:
        return plain.swiglu(x)
    x, n = x.contiguous(), x.shape[-1] // 2
    out = x.new_empty((*x.shape[:-1], n))
    _call("activation", "mm_swiglu_forward", x, out, x.numel() // (2 * n), n, operators.DTYPES[x.dtype])
    return out


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """[s, b, heads, d] -> the same shape; see `ops.rope`."""
    if x.stride(-1) != 1 or not x.dtype == cos.dtype == torch.float32:
        return plain.rope(x, cos, sin, interleaved)
    out = x.new_empty(x.shape)
    sizes = (*x.shape, cos.shape[-1], *x.stride()[:3], cos.shape[1], int(interleaved), 0, operators.DTYPES[x.dtype])
    _call("rope", "mm_rope", x, cos.contiguous(), sin.contiguous(), out, *sizes)
    return out


def rope_and_keep(
    packed: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    key_pages: torch.Tensor,
    value_pages: torch.Tensor,
    rows: torch.Tensor,
) -> torch.Tensor | None:
    """See `ops.rope_and_keep`; None where nothing was done: another dtype, several samples, strided channels."""
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
    _call("few_rows", "mm_rope_and_keep", *tensors, *sizes, *strides, int(interleaved))
    return q


MOST = 3  # rows of x that `linear` takes


def fits(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `linear` supports these: at most `MOST` rows, fp32, a contiguous weight."""
    return 0 < x.numel() <= MOST * x.shape[-1] and x.dtype == torch.float32 and weight.is_contiguous()


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., i] of at most `MOST` rows, weight [o, i] -> [..., o]."""
    x, (o, i) = x.contiguous(), weight.shape
    out = x.new_empty((*x.shape[:-1], o))
    _call("few_rows", "mm_product", x, weight, bias, out, x.numel() // i, o, i)
    return out


def _call(file: str, name: str, *arguments: Any) -> None:
    library: Callable[..., Any] = operators.library(file, "cpu").call
    library(name, *arguments)
