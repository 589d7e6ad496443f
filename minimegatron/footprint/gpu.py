"""The operators of a GPU in place of a CPU's, for runs on fake tensors; and FLOPs of operators.

The problem in a sentence: a plan for GPUs is made on a laptop, where torch's attention, norms and dropout are other
operators that keep other tensors; and a build of torch without CUDA cannot run a backward pass over `cuda` tensors.

| what                     | on a GPU                                                                        |
|--------------------------|---------------------------------------------------------------------------------|
| the package's kernels    | compute (`kernels = auto` or `cuda`): a norm or a SwiGLU is one operator        |
| attention (`sdpa`)       | FlashAttention: keeps q, k, v, the output and log-sum-exp; no matrix of masks   |
| torch's RMSNorm, dropout | one operator each; dropout keeps a mask of one byte an element                  |
| products of FP8          | tensor cores: no factor is cast to a wider dtype                                |

FLOPs are those of `torch.utils.flop_counter`, with attention and grouped products added here. A causal mask shows half
of the square of queries and keys (Megatron's convention: s/2 keys a query), a window of w tokens w s - w^2/2 pairs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import flop_registry

from minimegatron.kernels import choice, operators
from minimegatron.layers import embedding
from minimegatron.layers.attention.core_attention import CoreAttention
from minimegatron.layers.attention.mask import AttentionMask
from minimegatron.layers.fp8 import linear as fp8_linear
from minimegatron.layers.fp8 import matmul as fp8
from minimegatron.layers.fp8.matmul import Quantised, product_in_bf16, scaled_mm

Tensor = torch.Tensor


# --------------------------------------------------------------------------------------------------------- attention


@torch.library.custom_op("dry_run::attention", mutates_args=())
def _attention(q: Tensor, k: Tensor, v: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Queries [b, a, s, d], keys [b, g, s, d] and values [b, g, s, d'] -> the output, and a number for each query.

    `share`: of the square of queries and keys that the mask shows. Only shapes are computed.
    """
    raise NotImplementedError("for fake tensors alone")


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, share: float) -> tuple[Tensor, Tensor]:
    b, a, s, _ = q.shape
    same = q.shape[-1] == v.shape[-1]
    out = torch.empty_like(q) if same else q.new_empty(s, b, a, v.shape[-1]).permute(1, 2, 0, 3)
    return out, q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("dry_run::attention_backward", mutates_args=())
def _attention_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    raise NotImplementedError("for fake tensors alone")


@_attention_backward.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, share: float) -> Tensor:
        out, lse = torch.ops.dry_run.attention(q, k, v, share)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.share = share
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *torch.ops.dry_run.attention_backward(grads[0], *ctx.saved_tensors, ctx.share), None


class _Biased(torch.autograd.Function):
    """Attention's output, which keeps the biases of its scores for their gradient."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(bias)
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0], torch.zeros_like(ctx.saved_tensors[0])


def attention_pairs(seq_length: int, window: int | None = None, causal: bool = True) -> float:
    """(query, key) pairs of one sequence that are multiplied: s^2, half of it when causal, fewer with a window."""
    if not causal:
        return float(seq_length**2)
    w = min(window or seq_length, seq_length)
    return w * seq_length - w * w / 2


def _sdpa(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, is_causal: bool = False, **_: Any) -> Tensor:
    """Replaces `F.scaled_dot_product_attention`; a bias with a gradient is kept as well."""
    out: Tensor = _Attention.apply(q, k, v, 0.5 if is_causal else 1.0)
    return out if attn_mask is None or not attn_mask.requires_grad else _Biased.apply(out, attn_mask)  # type: ignore[no-any-return]


def _core(self: CoreAttention, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask) -> Tensor:
    """Replaces `CoreAttention._sdpa`."""
    s = q.shape[2]
    return _Attention.apply(q, k, v, attention_pairs(s, mask.window, mask.causal) / s**2)  # type: ignore[no-any-return]


# --------------------------------------------------------------------------------------------------- other operators


def _rms_norm(x: Tensor, shape: Any, weight: Tensor, eps: float) -> Tensor:
    return torch.ops.aten._fused_rms_norm(x, shape, weight, eps)[0]  # type: ignore[no-any-return]


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


def _product(a: Quantised, b: Quantised, dtype: torch.dtype, fast: bool = False) -> Tensor:
    """Replaces `layers.fp8.matmul.product`, as on tensor cores with FP8."""
    one_scale = a.tile is None and b.tile is None and b.q.shape[0] % 16 == 0
    return scaled_mm(a, b, dtype, fast) if one_scale else product_in_bf16(a, b, dtype)


def _usable(backend: str, file: str, *tensors: Tensor | None) -> bool:
    """Replaces `kernels.choice.usable`, as on a machine with kernels."""
    dtypes = {t.dtype for t in tensors if t is not None}
    return backend in ("auto", "cuda") and len(dtypes) == 1 and dtypes <= operators.DTYPES.keys()


@contextlib.contextmanager
def replacing(*replaced: tuple[Any, str, Any]) -> Iterator[None]:
    """In the block each attribute (owner, name, value) has this value."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    try:
        for owner, name, value in replaced:
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def computing_on_gpu() -> contextlib.AbstractContextManager[None]:
    """In the block fake tensors go through the operators of a GPU."""
    return replacing(
        (CoreAttention, "_sdpa", _core),
        (F, "scaled_dot_product_attention", _sdpa),
        (F, "rms_norm", _rms_norm),
        (F, "dropout", _dropout),
        (embedding, "embedding", F.embedding),
        (choice, "usable", _usable),
        (AttentionMask, "dense", lambda *_: None),
        (fp8, "product", _product),
        (fp8_linear, "product", _product),
    )


def counting_attention(causal: bool) -> contextlib.AbstractContextManager[None]:
    """In the block every attention over a whole sequence is one operator, which counts the pairs that the mask shows,
    or all."""

    def attend(
        self: CoreAttention, q: Tensor, k: Tensor, v: Tensor, mask: AttentionMask, sink: Tensor | None = None
    ) -> Tensor:
        q, k, v = (t.permute(1, 2, 0, 3) for t in (q, k, v))
        out = _core(self, q, k, v, mask) if causal else _sdpa(q, k, v)
        return out.permute(2, 0, 1, 3)

    return replacing((CoreAttention, "attend", attend))


# ------------------------------------------------------------------------------------------------------------- FLOPs


def _attention_flops(q: Tensor, k: Tensor, v: Tensor, share: float, backward: bool) -> float:
    """Two products forward, five backward: the backward pass computes the scores again."""
    d, wide = q.shape[-1], v.shape[-1]
    return 2.0 * share * q.shape[:-1].numel() * k.shape[-2] * (3 * d + 2 * wide if backward else d + wide)


def _flash(q: Tensor, k: Tensor, v: Tensor, _: float = 0.0, causal: bool = False, *__: Any, **___: Any) -> float:
    return _attention_flops(q, k, v, 0.5 if causal else 1.0, False)


def _flash_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any, **_: Any) -> float:
    _out, _lse, _number, causal, *_native = more
    return _attention_flops(q, k, v, 0.5 if causal else 1.0, True)


def _grouped_mm(a: Tensor, b: Tensor, *_: Any, out_val: Tensor, **__: Any) -> float:
    """Rows of every group times its matrix; or, if the result has a matrix for each group, sums over rows."""
    return 2.0 * out_val.numel() * a.shape[-1] if out_val.dim() == 2 else 2.0 * a.numel() * out_val.shape[-1]


_COUNTS: dict[str, Callable[..., float]] = {
    **{str(operator): count for operator, count in flop_registry.items()},
    "aten._grouped_mm": _grouped_mm,
    "aten.linalg_solve_triangular": lambda a, *_, out_val, **__: float(out_val.numel() * a.shape[-1]),
    "mkldnn._linear_pointwise": lambda x, weight, *_, out_val, **__: 2.0 * out_val.numel() * x.shape[-1],
    "aten._scaled_dot_product_flash_attention_for_cpu": _flash,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _flash_backward,
    "minimegatron.flash_attention": _flash,
    "minimegatron.flash_attention_backward": _flash_backward,
    "minimegatron.chunk_scan": lambda scores, logs, x, *_, **__: float(x.numel() * x.shape[1]),
    "minimegatron.chunk_scan_backward": lambda dy, scores, logs, x, *_, **__: 2.0 * x.numel() * x.shape[1],
    "dry_run.attention": lambda q, k, v, share, **_: _attention_flops(q, k, v, share, False),
    "dry_run.attention_backward": lambda dout, q, k, v, out, lse, share, **_: _attention_flops(q, k, v, share, True),
}


@functools.cache
def flops_of(operator: Any) -> Callable[..., float] | None:
    """The function that counts an operator's FLOPs from its arguments and `out_val`; None for operators without
    products."""
    return _COUNTS.get(str(operator._overloadpacket).removesuffix("_"))
