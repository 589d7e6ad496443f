"""The fused kernels of `minimegatron/kernels` as cases: each with the same in torch, and in fp64.

A case says its inputs, the operator, the same in torch, and how many bytes must move at least, forward and backward.
`benchmarks/gpu_kernels.py` checks and times them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from minimegatron.kernels import cross_entropy, flash, permute, pointwise, reference, rope

Tensors = tuple[torch.Tensor, ...]
EPS = 1e-5


@dataclasses.dataclass(frozen=True)
class Case:
    """One operator.

    Attributes:
        name: in the table.
        inputs: (size, dtype, device) -> float tensors, all differentiable.
        fused, plain, exact: operator, the same in torch, and the reference that is computed in fp64.
        sizes: large for timing, then small ones for checking; the first of these also for a smoke run.
        traffic: the least bytes, forward and backward, from the inputs; FLOPs where `unit` is TFLOP/s.
    """

    name: str
    inputs: Callable[[Sequence[int], torch.dtype, torch.device], Tensors]
    fused: Callable[..., torch.Tensor | Tensors]
    plain: Callable[..., torch.Tensor | Tensors]
    exact: Callable[..., torch.Tensor | Tensors]
    sizes: tuple[tuple[int, ...], ...]
    traffic: Callable[[Tensors], tuple[float, float]]
    unit: str = "GB/s"


def normal(*shapes: tuple[int, ...], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensors:
    """Normal numbers on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, device=device).to(dtype) for shape in shapes)


def _angles(x: torch.Tensor, dtype: torch.dtype = torch.float32) -> Tensors:
    return _angles_of(x.shape[0], x.shape[-1] // 2, x.device, dtype)


# Beside the inputs, not part of what is timed.
@functools.cache
def _angles_of(s: int, r: int, device: torch.device, dtype: torch.dtype) -> Tensors:
    angle = torch.arange(s).float()[:, None] * 10000.0 ** (-torch.arange(r) / r)
    return tuple(t[:, None, None].to(device, dtype) for t in (angle.cos(), angle.sin()))


def _target(z: torch.Tensor) -> torch.Tensor:
    return _target_of(*z.shape, z.device)


@functools.cache
def _target_of(n: int, v: int, device: torch.device) -> torch.Tensor:
    return torch.arange(n, device=device) * 7919 % v


def _rope_torch(x: torch.Tensor) -> torch.Tensor:
    cos, sin = _angles(x, x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _add_norm_torch(x: torch.Tensor, r: torch.Tensor, g: torch.Tensor) -> Tensors:
    h = x + r
    return F.rms_norm(h, g.shape, g, EPS), h


def _causal_torch(x: torch.Tensor) -> torch.Tensor:
    hidden = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(x.shape[-1] - x.shape[-2] + 1)
    return (x.float() * 0.1).masked_fill(hidden, -torch.inf).softmax(-1).to(x.dtype)


def _maps(x: torch.Tensor, k: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """A shuffle of the k choices of every row, the same for one size."""
    return _maps_of(x.shape[0], k, x.device)


@functools.cache
def _maps_of(t: int, k: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    slots = torch.randperm(t * k, generator=torch.Generator().manual_seed(0)).to(device)
    return slots, permute.inverse(slots, t, k)


def _moe(x: torch.Tensor) -> torch.Tensor:
    slots, places = _maps(x)
    return permute.unpermute(permute.permute(x, slots, places), slots, places)


def _moe_torch(x: torch.Tensor) -> torch.Tensor:
    slots, places = _maps(x)
    y = x.index_select(0, slots // places.shape[1])
    return torch.zeros_like(x).index_add(0, slots // places.shape[1], y)


def _moe_exact(x: torch.Tensor) -> torch.Tensor:
    slots, places = _maps(x)
    return reference.unpermute(reference.permute(x, slots, places), slots, places)


def _loss_exact(z: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(z, _target(z), reduction="none")


def cases() -> list[Case]:
    """Every differentiable operator. Sizes of the goals: Llama 8B's and larger."""

    def rows(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensors:
        return normal(tuple(size), tuple(size[-1:]), dtype=dtype, device=device)

    def rows_and_bias(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensors:
        return normal(tuple(size), tuple(size[-1:]), tuple(size[-1:]), dtype=dtype, device=device)

    def two_rows(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensors:
        return normal(tuple(size), tuple(size), tuple(size[-1:]), dtype=dtype, device=device)

    def one(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensors:
        return normal(tuple(size), dtype=dtype, device=device)

    def heads(size: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensors:
        return normal(*[tuple(size)] * 3, dtype=dtype, device=device)

    def times(forward: float, backward: float) -> Callable[[Tensors], tuple[float, float]]:
        return lambda tensors: (forward * tensors[0].nbytes, backward * tensors[0].nbytes)

    def attention_flops(tensors: Tensors) -> tuple[float, float]:
        b, a, s, d = tensors[0].shape
        return 2.0 * b * a * s * s * d, 5.0 * b * a * s * s * d  # the causal half

    wide, small = (16384, 4096), ((8, 64), (3, 33), (2, 1000))
    inner, inner_small = (16384, 14336), ((4, 64), (3, 34), (2, 1000))
    return [
        Case("RMSNorm", rows, lambda x, g: pointwise.norm(x, g, None, EPS), lambda x, g: F.rms_norm(x, g.shape, g, EPS),
             lambda x, g: reference.norm(x, g, None, EPS), (wide, *small), times(2, 3)),
        Case("LayerNorm", rows_and_bias, lambda x, g, b: pointwise.norm(x, g, b, EPS),
             lambda x, g, b: F.layer_norm(x, g.shape, g, b, EPS), lambda x, g, b: reference.norm(x, g, b, EPS),
             (wide, *small), times(2, 3)),
        Case("add, RMSNorm", two_rows, lambda x, r, g: pointwise.add_norm(x, r, g, None, EPS), _add_norm_torch,
             lambda x, r, g: reference.add_norm(x, r, g, None, EPS), (wide, *small), times(4, 4)),
        Case("softmax, causal", one, lambda x: pointwise.scaled_softmax(x, 0.1, None, True), _causal_torch,
             lambda x: reference.scaled_softmax(x, 0.1, None, True),
             ((4, 16, 2048, 2048), (1, 2, 9, 16), (2, 1, 5, 33)), times(1.5, 2)),
        Case("SwiGLU", lambda size, *rest: one((*size[:-1], 2 * size[-1]), *rest), pointwise.swiglu,
             lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1], reference.swiglu, (inner, *inner_small),
             times(1.5, 2.5)),
        Case("bias-GeLU", rows, lambda x, b: pointwise.bias_gelu(x, b, True),
             lambda x, b: F.gelu(x + b, approximate="tanh"), lambda x, b: reference.bias_gelu(x, b, True),
             (inner, *inner_small), times(2, 3)),
        Case("RoPE", one, lambda x: rope.rope(x, *_angles(x)), _rope_torch,
             lambda x: reference.rope(x, *(t.double() for t in _angles(x))),
             ((16384, 1, 40, 128), (5, 2, 3, 16), (3, 1, 1, 34)), times(2, 2)),
        Case("cross entropy", one, lambda z: cross_entropy.cross_entropy(z, _target(z)),
             lambda z: F.cross_entropy(z.float(), _target(z), reduction="none"), _loss_exact,
             ((8192, 128256), (6, 64), (3, 1001)), times(1, 2)),
        Case("MoE permute and back", one, _moe, _moe_torch, _moe_exact, ((16384, 2048), (7, 16), (3, 33)),
             times(18, 18)),
        Case("attention, ours to read", heads,
             lambda q, k, v: flash.flash_attention(q, k, v, q.shape[-1] ** -0.5)[0],
             lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
             lambda q, k, v: reference.attention(q, k, v, q.shape[-1] ** -0.5)[0],
             ((2, 16, 4096, 128), (1, 2, 40, 16), (1, 1, 33, 64)), attention_flops, "TFLOP/s"),
    ]  # fmt: skip


def liger(name: str) -> dict[str, Callable[..., torch.Tensor | Tensors]]:
    """The same by the Liger kernels, where the package is installed and has it."""
    try:
        from liger_kernel.transformers import functional as theirs
    except ImportError:
        return {}
    found: dict[str, Callable[..., torch.Tensor]] = {
        "RMSNorm": lambda x, g: theirs.liger_rms_norm(x, g, EPS, in_place=False),
        "LayerNorm": lambda x, g, b: theirs.liger_layer_norm(x, g, b, EPS),
        "SwiGLU": lambda x: theirs.liger_swiglu(*(t.contiguous() for t in x.chunk(2, -1))),
        "cross entropy": lambda z: theirs.liger_cross_entropy(z, _target(z), reduction="none"),
    }
    return {"Liger": found[name]} if name in found else {}
