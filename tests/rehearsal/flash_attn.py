"""Stand-in for the package flash-attn: its two functions, with what they refuse, computed by the plain formula.

Rows of q see keys of their own document; `causal` aligns the last query with the last key, as flash-attn 2.1 does.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import torch

from tests.rehearsal import operators
from tests.rehearsal.record import RECORD
from tests.rehearsal.tensor import CudaTensor

Window = tuple[int, int]


def _check(*tensors: torch.Tensor) -> None:
    for x in tensors:
        operators.require(isinstance(x, CudaTensor), "flash_attn: Input tensor must be on CUDA device")
        operators.require(x.dtype in operators.HALF, "FlashAttention only support fp16 and bf16 data type")
        operators.require(x.stride(-1) == 1, "Input tensor must have contiguous last dimension")


def _table(queries: int, keys: int, causal: bool, window: Window, starts: list[int] | None) -> torch.Tensor:
    """True where a query sees a key, [queries, keys]."""
    left, right = window
    q, k = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)[None]
    seen = torch.ones(queries, keys, dtype=torch.bool)
    if causal or right >= 0:
        seen &= k <= q + (0 if causal else right)
    if left >= 0:
        seen &= k >= q - left
    if starts is not None:
        document = torch.zeros(keys, dtype=torch.int64)
        for start in starts[1:-1]:
            document[start:] += 1
        seen &= document[:, None] == document[None]
    return seen


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, dropout_p: float, scale: float | None
) -> torch.Tensor:
    """[b, s, heads, d], one launch forward and one backward."""
    options = {"dropout_p": dropout_p, "is_causal": False, "scale": scale, "enable_gqa": True}
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    inside = CudaTensor(table, q.device.index)
    return operators.Fused.apply(options, "flash_attn", q, k, v, inside).transpose(1, 2)


def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    **_: Any,
) -> torch.Tensor:
    """q [b, s, a, d], k and v [b, s, g, d]."""
    _check(q, k, v)
    RECORD.choice("flash_attn_func")
    return _attend(q, k, v, _table(q.shape[1], k.shape[1], causal, window_size, None), dropout_p, softmax_scale)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    **_: Any,
) -> torch.Tensor:
    """q [tokens, a, d]; documents begin at `cu_seqlens_q`, int32 on the GPU, the last entry is the end."""
    _check(q, k, v)
    for x in (cu_seqlens_q, cu_seqlens_k):
        operators.require(isinstance(x, CudaTensor), "flash_attn: cu_seqlens must be on CUDA")
        operators.require(x.dtype == torch.int32 and x.is_contiguous(), "cu_seqlens must have dtype int32")
    starts = cu_seqlens_q.inner.tolist()
    longest = max(b - a for a, b in zip(starts, starts[1:], strict=False))
    operators.require(starts[-1] == q.shape[0], f"cu_seqlens end at {starts[-1]}, there are {q.shape[0]} tokens")
    operators.require(int(max_seqlen_q) >= longest, f"max_seqlen_q {max_seqlen_q} < {longest}")
    RECORD.choice("flash_attn_varlen_func")
    table = _table(q.shape[0], k.shape[0], causal, window_size, starts)
    return _attend(q[None], k[None], v[None], table, dropout_p, softmax_scale)[0]


def install() -> None:
    """Make `import flash_attn` find this."""
    module = types.ModuleType("flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    module.flash_attn_func = flash_attn_func
    module.flash_attn_varlen_func = flash_attn_varlen_func
    sys.modules["flash_attn"] = module
