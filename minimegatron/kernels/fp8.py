"""Casts to FP8, with one scale a tensor or one a tile. Kernels: `csrc/fp8.cu`. What to scale by: `layers/fp8.py`."""

from __future__ import annotations

import torch

from minimegatron.fields import require
from minimegatron.kernels import checks
from minimegatron.kernels.launch import DTYPES, run

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RULES = {"float": 0, "power": 1, "mx": 2}


def cast(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, transpose: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Cast x [m, n] times `scale`, an fp32 scalar on its device.

    Returns:
        (q [m, n]; its transposed copy [n, m], or None; amax of x, fp32 scalar, NaN where x has one).
    """
    q, qt, amax = torch.ops.minimegatron.fp8_cast(x, scale, dtype == E5M2, transpose)
    _check_format(dtype)
    return q.view(dtype), qt.view(dtype) if transpose else None, amax


def cast_tiles(
    x: torch.Tensor, tile: tuple[int, int], dtype: torch.dtype, rule: str = "float"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast x [m, n] with a scale for every tile, see `reference.fp8_cast_tiles`.

    Returns:
        (q [m, n]; scales fp32 [ceil(m / tile[0]), ceil(n / tile[1])], with which q is multiplied to get x back).
    """
    _check_format(dtype)
    require(rule in RULES, f"rule {rule!r}", f"choose among {', '.join(RULES)}")
    q, scales = torch.ops.minimegatron.fp8_cast_tiles(x, tile[0], tile[1], RULES[rule], dtype == E5M2)
    return q.view(dtype), scales


def _check_format(dtype: torch.dtype) -> None:
    require(dtype in (E4M3, E5M2), f"fp8 format {dtype}", "choose torch.float8_e4m3fn or torch.float8_e5m2")


def _check(x: torch.Tensor) -> None:
    checks.float_tensor("fp8_cast", "x", x)
    require(x.dim() == 2, f"fp8_cast: x is {tuple(x.shape)}", "give a matrix")


@torch.library.custom_op("minimegatron::fp8_cast", mutates_args=(), device_types=("cpu", "cuda"))
def _cast(
    x: torch.Tensor, scale: torch.Tensor, e5m2: bool, transpose: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(x)
    require(
        scale.dtype == torch.float32 and scale.numel() == 1 and scale.device == x.device,
        f"fp8_cast: scale is {scale.dtype} {tuple(scale.shape)} on {scale.device}",
        f"give one fp32 number on {x.device}",
    )
    x, (m, n) = x.contiguous(), x.shape
    q, qt = x.new_empty((m, n), dtype=torch.uint8), x.new_empty((n, m) if transpose else (0,), dtype=torch.uint8)
    amax = x.new_zeros((), dtype=torch.float32)
    args = (x, scale, q, qt if transpose else None, amax, m, n, int(e5m2), DTYPES[x.dtype])
    run("fp8", "mm_fp8_cast", x, *args)
    return q, qt, amax


@_cast.register_fake
def _(
    x: torch.Tensor, scale: torch.Tensor, e5m2: bool, transpose: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(x)
    m, n = x.shape
    u8 = torch.uint8
    return (
        x.new_empty((m, n), dtype=u8),
        x.new_empty((n, m) if transpose else (0,), dtype=u8),
        x.new_empty((), dtype=torch.float32),
    )


@torch.library.custom_op("minimegatron::fp8_cast_tiles", mutates_args=(), device_types=("cpu", "cuda"))
def _cast_tiles(x: torch.Tensor, bm: int, bn: int, rule: int, e5m2: bool) -> tuple[torch.Tensor, torch.Tensor]:
    _check(x)
    require(bm >= 1 and bn >= 1, f"fp8_cast_tiles: tiles of {bm} x {bn}", "give at least 1 x 1")
    x, (m, n) = x.contiguous(), x.shape
    q, scales = x.new_empty((m, n), dtype=torch.uint8), x.new_empty((-(-m // bm), -(-n // bn)), dtype=torch.float32)
    run("fp8", "mm_fp8_cast_tiles", x, x, q, scales, m, n, bm, bn, rule, int(e5m2), DTYPES[x.dtype])
    return q, scales


@_cast_tiles.register_fake
def _(x: torch.Tensor, bm: int, bn: int, rule: int, e5m2: bool) -> tuple[torch.Tensor, torch.Tensor]:
    _check(x)
    m, n = x.shape
    return x.new_empty((m, n), dtype=torch.uint8), x.new_empty((-(-m // bm), -(-n // bn)), dtype=torch.float32)
