"""Casts to FP8, with one scale a tensor or one a tile, and dequantisation of tiles. Kernels: `csrc/fp8.cu`.

How scales are chosen: `layers/fp8/matmul.py`; the same in torch: `reference.py`.
"""

from __future__ import annotations

import torch

from minimegatron.errors import require
from minimegatron.kernels.operators import DTYPES, check_float, check_shape, operator, run
from minimegatron.kernels.reference import FP8_TOP

Tensor = torch.Tensor
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Cast = tuple[Tensor, Tensor | None, Tensor]
RULES = {"float": 0, "power": 1, "mx": 2}
PARTS = 256


def cast(
    x: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    seen: Tensor | None = None,
    transpose: bool = False,
) -> Cast:
    """Cast x [m, n] times `scale`, an fp32 scalar on its device; one launch.

    Args:
        seen: fp32 scalar, not negative: raised to the amax of x, NaN if x has one.

    Returns:
        (q [m, n]; its transposed copy [n, m], or None; 1 / scale).
    """
    _check_format(dtype)
    return _typed(_cast(x, scale, 0.0, seen, dtype == E5M2, transpose), dtype, transpose)


def magnitudes(x: Tensor) -> Tensor:
    """fp32 [p], p <= 256: their maximum is the amax of x, infinity if x has a NaN; one launch."""
    return _amax(x)  # type: ignore[no-any-return]


def cast_by(x: Tensor, amaxes: Tensor, dtype: torch.dtype, margin: int = 0, transpose: bool = False) -> Cast:
    """Cast x [m, n] with the scale that follows from the largest of `amaxes`, see `reference.scale_for`; one launch.

    Args:
        amaxes: fp32 [p], p <= 256, from `magnitudes`.

    Returns:
        As `cast`.
    """
    _check_format(dtype)
    aim = FP8_TOP[dtype] / 2**margin
    return _typed(_cast(x, amaxes, aim, None, dtype == E5M2, transpose), dtype, transpose)


def cast_both_ways(x: Tensor, scale: Tensor, dtype: torch.dtype, seen: Tensor | None) -> Cast:
    """`cast`, with a transposed copy."""
    return cast(x, scale, dtype, seen, transpose=True)


def cast_by_both_ways(x: Tensor, amaxes: Tensor, dtype: torch.dtype, margin: int) -> Cast:
    """`cast_by`, with a transposed copy."""
    return cast_by(x, amaxes, dtype, margin, transpose=True)


def cast_tiles(x: Tensor, tile: tuple[int, int], dtype: torch.dtype, rule: str = "float") -> tuple[Tensor, Tensor]:
    """Cast x [m, n] with a scale for every tile, see `reference.fp8_cast_tiles`.

    Returns:
        (q [m, n]; scales fp32 [ceil(m / tile[0]), ceil(n / tile[1])], by which q is multiplied to get x back).
    """
    _check_format(dtype)
    require(rule in RULES, f"rule {rule!r}", f"choose among {', '.join(RULES)}")
    q, scales = _cast_tiles(x, tile[0], tile[1], RULES[rule], dtype == E5M2)
    return q.view(dtype), scales


def dequantise(q: Tensor, scales: Tensor, tile: tuple[int, int]) -> Tensor:
    """q [m, n] in FP8 times the scales of its tiles, as `cast_tiles` gives them, in bf16; one launch."""
    _check_format(q.dtype)
    return _dequantise(q.view(torch.uint8), scales, *tile, q.dtype == E5M2)  # type: ignore[no-any-return]


def _typed(made: tuple[Tensor, Tensor, Tensor], dtype: torch.dtype, transpose: bool) -> Cast:
    q, qt, inverse = made
    return q.view(dtype), qt.view(dtype) if transpose else None, inverse


def _check_format(dtype: torch.dtype) -> None:
    require(dtype in (E4M3, E5M2), f"fp8 format {dtype}", "choose torch.float8_e4m3fn or torch.float8_e5m2")


def _check(x: Tensor) -> None:
    check_float("fp8_cast", "x", x)
    require(x.dim() == 2, f"fp8_cast: x is {tuple(x.shape)}", "give a matrix")


def _check_numbers(op: str, name: str, numbers: Tensor, most: int, x: Tensor) -> None:
    require(
        numbers.dtype == torch.float32 and 1 <= numbers.numel() <= most and numbers.device == x.device,
        f"{op}: {name} is {numbers.dtype} {tuple(numbers.shape)} on {numbers.device}",
        f"give {'one fp32 number' if most == 1 else f'1 to {most} fp32 numbers'} on {x.device}",
    )


def _cast_outputs(
    x: Tensor, source: Tensor, aim: float, seen: Tensor | None, e5m2: bool, transpose: bool
) -> tuple[Tensor, Tensor, Tensor]:
    _check(x)
    _check_numbers("fp8_cast", "amaxes" if aim else "scale", source, PARTS if aim else 1, x)
    if seen is not None:
        _check_numbers("fp8_cast", "seen", seen, 1, x)
    q = x.new_empty(x.shape, dtype=torch.uint8)
    return q, q.new_empty((x.shape[1], x.shape[0]) if transpose else (0,)), source.new_empty(())


@operator("fp8_cast", _cast_outputs, mutates=("seen",))
def _cast(
    x: Tensor, source: Tensor, aim: float, seen: Tensor | None, e5m2: bool, transpose: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The operator; `source` is the scale if `aim` is 0, else magnitudes."""
    q, qt, inverse = _cast_outputs(x, source, aim, seen, e5m2, transpose)
    x, source = x.contiguous(), source.contiguous()
    args = (x, source, source.numel(), aim, q, qt if transpose else None, seen, inverse, *x.shape, int(e5m2))
    run("fp8", "mm_fp8_cast", x, *args, DTYPES[x.dtype])
    return q, qt, inverse


def _amax_output(x: Tensor) -> Tensor:
    """An empty output, one number for each block: 32 elements a thread, and at most as many blocks as the cast has
    threads."""
    check_float("fp8_amax", "x", x)
    return x.new_empty(max(1, min(PARTS, -(-x.numel() // (32 * 512)))), dtype=torch.float32)


@operator("fp8_amax", _amax_output)
def _amax(x: Tensor) -> Tensor:
    parts, x = _amax_output(x), x.contiguous()
    if x.numel() == 0:
        return parts.zero_()
    run("fp8", "mm_fp8_amax", x, x, parts, x.numel(), len(parts), DTYPES[x.dtype])
    return parts


def _tiles_outputs(x: Tensor, bm: int, bn: int, rule: int, e5m2: bool) -> tuple[Tensor, Tensor]:
    _check(x)
    require(bm >= 1 and bn >= 1, f"fp8_cast_tiles: tiles of {bm} x {bn}", "give at least 1 x 1")
    m, n = x.shape
    return x.new_empty((m, n), dtype=torch.uint8), x.new_empty((-(-m // bm), -(-n // bn)), dtype=torch.float32)


@operator("fp8_cast_tiles", _tiles_outputs)
def _cast_tiles(x: Tensor, bm: int, bn: int, rule: int, e5m2: bool) -> tuple[Tensor, Tensor]:
    q, scales = _tiles_outputs(x, bm, bn, rule, e5m2)
    run("fp8", "mm_fp8_cast_tiles", x, x.contiguous(), q, scales, *x.shape, bm, bn, rule, int(e5m2), DTYPES[x.dtype])
    return q, scales


def _dequantise_output(q: Tensor, scales: Tensor, bm: int, bn: int, e5m2: bool) -> Tensor:
    require(bm >= 1 and bn >= 1, f"fp8_dequantise: tiles of {bm} x {bn}", "give at least 1 x 1")
    require(q.dim() == 2, f"fp8_dequantise: q is {tuple(q.shape)}", "give a matrix")
    check_shape("fp8_dequantise", scales=(scales, (-(-q.shape[0] // bm), -(-q.shape[1] // bn))))
    require(scales.dtype == torch.float32, f"fp8_dequantise: scales are {scales.dtype}", "give them in float32")
    return q.new_empty(q.shape, dtype=torch.bfloat16)


@operator("fp8_dequantise", _dequantise_output)
def _dequantise(q: Tensor, scales: Tensor, bm: int, bn: int, e5m2: bool) -> Tensor:
    out = _dequantise_output(q, scales, bm, bn, e5m2)
    run("fp8", "mm_fp8_dequantise", q, q.contiguous(), scales.contiguous(), out, *q.shape, bm, bn, int(e5m2))
    return out
