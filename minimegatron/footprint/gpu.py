"""What computes on a GPU, in place of what does on a CPU: for runs on fake tensors, which say that they are a CPU's.

The problem in a sentence: a plan is made on a laptop for GPUs, and torch's attention, norms and dropout keep other
things there; and a build of torch without CUDA cannot run a backward pass over tensors that say `cuda`.

| what                     | on a GPU                                                                        |
|--------------------------|---------------------------------------------------------------------------------|
| the project's kernels    | are there (`kernels = auto` or `cuda`)                                          |
| attention (`sdpa`)       | FlashAttention: q, k, v, the output and a number a query; no table of masks     |
| torch's RMSNorm          | its input and a number a row                                                    |
| dropout                  | a mask of one byte an element                                                   |
| products of FP8          | tensor cores: no factor is made wider                                           |
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from minimegatron.kernels import operators, ops
from minimegatron.layers.attention.mask import AttentionMask
from minimegatron.layers.fp8 import linear as fp8_linear
from minimegatron.layers.fp8 import matmul as fp8
from minimegatron.layers.fp8.matmul import Quantised, product_in_bf16, scaled_mm


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q) if q.shape[-1] == v.shape[-1] else _narrower(q, v.shape[-1])
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[:3], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        q, k, v, _, _ = ctx.saved_tensors
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _narrower(q: torch.Tensor, width: int) -> torch.Tensor:
    """[b, a, s, width] in the memory order of q [b, a, s, d]: [s, b, a, d]."""
    b, a, s, _ = q.shape
    return q.new_empty(s, b, a, width).permute(1, 2, 0, 3)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.empty_like(x, dtype=torch.bool))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return torch.empty_like(grads[0])


def _attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> torch.Tensor:
    return _Attention.apply(q, k, v)  # type: ignore[no-any-return]


def _rms_norm(x: torch.Tensor, shape: Any, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return _Norm.apply(x, weight)  # type: ignore[no-any-return]


def _dropout(x: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> torch.Tensor:
    return _Dropout.apply(x) if training and p > 0 else x  # type: ignore[no-any-return]


def _product(a: Quantised, b: Quantised, dtype: torch.dtype, fast: bool = False) -> torch.Tensor:
    """`layers.fp8.matmul.product` on tensor cores that take FP8."""
    one_scale = a.tile is None and b.tile is None and b.q.shape[0] % 16 == 0
    return scaled_mm(a, b, dtype, fast) if one_scale else product_in_bf16(a, b, dtype)


def _usable(backend: str, file: str, *tensors: torch.Tensor | None) -> bool:
    """`kernels.ops.usable` on a machine that has kernels."""
    dtypes = {t.dtype for t in tensors if t is not None}
    return backend in ("auto", "cuda") and len(dtypes) == 1 and dtypes <= operators.DTYPES.keys()


@contextlib.contextmanager
def computing_on_gpu() -> Iterator[None]:
    """In the block fake tensors are computed with as on a GPU."""
    there = [
        (F, "scaled_dot_product_attention", _attention),
        (F, "rms_norm", _rms_norm),
        (F, "dropout", _dropout),
        (ops, "usable", _usable),
        (AttentionMask, "dense", lambda *_: None),
        (fp8, "product", _product),
        (fp8_linear, "product", _product),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in there]
    try:
        for owner, name, function in there:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)
