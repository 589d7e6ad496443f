"""Casts to FP8, with one scale a tensor or one a tile, and of tiles back. Kernels: `csrc/fp8.cu`.

What to scale by: `layers/fp8/matmul.py`; the same in torch: `reference.py`.
"""

from __future__ import annotations

import torch

from minimegatron.errors import require
from minimegatron.kernels import checks
from minimegatron.kernels.launch import DTYPES, run
from minimegatron.kernels.reference import FP8_TOP

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
RULES = {"float": 0, "power": 1, "mx": 2}
PARTS = 256


def cast(
    x: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    seen: torch.Tensor | None = None,
    transpose: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Cast x [m, n] times `scale`, an fp32 scalar on its device; one launch.

    Args:
        seen: fp32 scalar, not negative: becomes the largest magnitude of x where that is larger, NaN where x has one.

    Returns:
        (q [m, n]; its transposed copy [n, m], or None; 1 / scale).
    """
    _check_format(dtype)
    return _typed(torch.ops.minimegatron.fp8_cast(x, scale, 0.0, seen, dtype == E5M2, transpose), dtype, transpose)


def magnitudes(x: torch.Tensor) -> torch.Tensor:
    """fp32 [p], p <= 256: their maximum is the largest magnitude of x, infinity where x has a NaN; one launch."""
    return torch.ops.minimegatron.fp8_amax(x)  # type: ignore[no-any-return]


def cast_by(
    x: torch.Tensor, amaxes: torch.Tensor, dtype: torch.dtype, margin: int = 0, transpose: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Cast x [m, n] with the scale that follows from the largest of `amaxes`, see `reference.scale_for`; one launch.

    Args:
        amaxes: fp32 [p], p <= 256, of `magnitudes`.

    Returns:
        As `cast`.
    """
    _check_format(dtype)
    aim = FP8_TOP[dtype] / 2**margin
    return _typed(torch.ops.minimegatron.fp8_cast(x, amaxes, aim, None, dtype == E5M2, transpose), dtype, transpose)


def cast_both_ways(
    x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, seen: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """`cast`, with a transposed copy."""
    return cast(x, scale, dtype, seen, transpose=True)


def cast_by_both_ways(
    x: torch.Tensor, amaxes: torch.Tensor, dtype: torch.dtype, margin: int
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """`cast_by`, with a transposed copy."""
    return cast_by(x, amaxes, dtype, margin, transpose=True)


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


def dequantise(q: torch.Tensor, scales: torch.Tensor, tile: tuple[int, int]) -> torch.Tensor:
    """q [m, n] in FP8 times the scales of its tiles, as `cast_tiles` gives them, in bf16; one launch."""
    _check_format(q.dtype)
    return torch.ops.minimegatron.fp8_dequantise(  # type: ignore[no-any-return]
        q.view(torch.uint8), scales, tile[0], tile[1], q.dtype == E5M2
    )


def _typed(
    made: tuple[torch.Tensor, torch.Tensor, torch.Tensor], dtype: torch.dtype, transpose: bool
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    q, qt, inverse = made
    return q.view(dtype), qt.view(dtype) if transpose else None, inverse


def _check_format(dtype: torch.dtype) -> None:
    require(dtype in (E4M3, E5M2), f"fp8 format {dtype}", "choose torch.float8_e4m3fn or torch.float8_e5m2")


def _check(x: torch.Tensor) -> None:
    checks.float_tensor("fp8_cast", "x", x)
    require(x.dim() == 2, f"fp8_cast: x is {tuple(x.shape)}", "give a matrix")


def _check_numbers(op: str, name: str, numbers: torch.Tensor, most: int, x: torch.Tensor) -> None:
    require(
        numbers.dtype == torch.float32 and 1 <= numbers.numel() <= most and numbers.device == x.device,
        f"{op}: {name} is {numbers.dtype} {tuple(numbers.shape)} on {numbers.device}",
        f"give {'one fp32 number' if most == 1 else f'1 to {most} fp32 numbers'} on {x.device}",
    )


@torch.library.custom_op("minimegatron::fp8_cast", mutates_args=("seen",), device_types=("cpu", "cuda"))
def _cast(
    x: torch.Tensor, source: torch.Tensor, aim: float, seen: torch.Tensor | None, e5m2: bool, transpose: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`source`: the scale where `aim` is 0, else magnitudes."""
    _check(x)
    _check_numbers("fp8_cast", "amaxes" if aim else "scale", source, PARTS if aim else 1, x)
    if seen is not None:
        _check_numbers("fp8_cast", "seen", seen, 1, x)
    x, source, (m, n) = x.contiguous(), source.contiguous(), x.shape
    q, qt = x.new_empty((m, n), dtype=torch.uint8), x.new_empty((n, m) if transpose else (0,), dtype=torch.uint8)
    inverse = source.new_empty(())
    args = (x, source, source.numel(), aim, q, qt if transpose else None, seen, inverse, m, n, int(e5m2))
    run("fp8", "mm_fp8_cast", x, *args, DTYPES[x.dtype])
    return q, qt, inverse


@_cast.register_fake
def _(
    x: torch.Tensor, source: torch.Tensor, aim: float, seen: torch.Tensor | None, e5m2: bool, transpose: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _check(x)
    m, n = x.shape
    u8 = torch.uint8
    return (
        x.new_empty((m, n), dtype=u8),
        x.new_empty((n, m) if transpose else (0,), dtype=u8),
        source.new_empty(()),
    )


@torch.library.custom_op("minimegatron::fp8_amax", mutates_args=(), device_types=("cpu", "cuda"))
def _amax(x: torch.Tensor) -> torch.Tensor:
    checks.float_tensor("fp8_amax", "x", x)
    x = x.contiguous()
    if x.numel() == 0:
        return x.new_zeros(1, dtype=torch.float32)
    parts = x.new_empty(_parts(x.numel()), dtype=torch.float32)
    run("fp8", "mm_fp8_amax", x, x, parts, x.numel(), len(parts), DTYPES[x.dtype])
    return parts


@_amax.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    checks.float_tensor("fp8_amax", "x", x)
    return x.new_empty(_parts(x.numel()), dtype=torch.float32)


def _parts(size: int) -> int:
    """Blocks that share so many numbers: 32 a thread, and no more blocks than a block of the cast has threads."""
    return max(1, min(PARTS, -(-size // (32 * 512))))


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


@torch.library.custom_op("minimegatron::fp8_dequantise", mutates_args=(), device_types=("cpu", "cuda"))
def _dequantise(q: torch.Tensor, scales: torch.Tensor, bm: int, bn: int, e5m2: bool) -> torch.Tensor:
    require(bm >= 1 and bn >= 1, f"fp8_dequantise: tiles of {bm} x {bn}", "give at least 1 x 1")
    require(q.dim() == 2, f"fp8_dequantise: q is {tuple(q.shape)}", "give a matrix")
    m, n = q.shape
    checks.shape("fp8_dequantise", scales=(scales, (-(-m // bm), -(-n // bn))))
    require(scales.dtype == torch.float32, f"fp8_dequantise: scales are {scales.dtype}", "give them in float32")
    out = q.new_empty((m, n), dtype=torch.bfloat16)
    run("fp8", "mm_fp8_dequantise", q, q.contiguous(), scales.contiguous(), out, m, n, bm, bn, int(e5m2))
    return out


@_dequantise.register_fake
def _(q: torch.Tensor, scales: torch.Tensor, bm: int, bn: int, e5m2: bool) -> torch.Tensor:
    return q.new_empty(q.shape, dtype=torch.bfloat16)
