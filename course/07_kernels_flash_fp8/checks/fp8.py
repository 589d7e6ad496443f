"""Checks of lab 07, third part: rounding to eight bits, and scales of tiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise

E4M3: dict[str, Any] = {"mantissa": 3, "lowest": -6, "top": 448.0}
E5M2: dict[str, Any] = {"mantissa": 2, "lowest": -14, "top": 57344.0}
# Small formats that no dtype of torch has: what is rounded by asking torch is wrong there.
OTHERS = (
    {"mantissa": 1, "lowest": 0, "top": 6.0}, {"mantissa": 3, "lowest": 0, "top": 7.5},
    {"mantissa": 2, "lowest": -2, "top": 28.0}, {"mantissa": 4, "lowest": -2, "top": 15.5},
)  # fmt: skip

# --------------------------------------------------------------------------------------------------------- rounding


def grid(mantissa: int, lowest: int, top: float) -> torch.Tensor:
    """All numbers of a format that are not negative, ascending, in float64. Even places have an even last bit."""
    steps = 2**mantissa
    numbers = [m / steps * 2.0**lowest for m in range(steps)]
    exponent = lowest
    while 2.0**exponent <= top:
        numbers += [(1 + m / steps) * 2.0**exponent for m in range(steps)]
        exponent += 1
    return torch.tensor([n for n in numbers if n <= top], dtype=torch.float64)


def to_fp8(x: torch.Tensor, mantissa: int, lowest: int, top: float) -> torch.Tensor:
    """The reference cast: the nearer of the two neighbours in the grid. `tests/course/test_lab07.py` compares it with
    torch's."""
    numbers = grid(mantissa, lowest, top)
    a = x.double().abs().clamp(max=top).nan_to_num(0.0)
    above = torch.searchsorted(numbers, a.contiguous()).clamp(1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    up = (a - low > high - a) | ((a - low == high - a) & (above % 2 == 0))
    nearest = torch.where(up, high, low).to(torch.float32)
    return torch.where(x.isnan(), x.float(), torch.copysign(nearest, x.float()))


def _awkward(draw: Draw, mantissa: int, lowest: int, top: float) -> dict[str, Any]:
    """Draw ties, numbers below the lowest exponent and beyond the top, of both signs, and zeros."""
    numbers = grid(mantissa, lowest, top)
    ties = (numbers[1:] + numbers[:-1]) / 2
    pick = torch.randint(len(ties), (12,), generator=draw.generator)
    x = torch.cat((
        ties[pick].float(), draw.tensor(12).abs() * 2.0 ** (lowest - 1), draw.tensor(12) * 2.0 ** (lowest + 2),
        draw.tensor(6) * top, torch.tensor([top, 1.2 * top, 100 * top, 0.0, ties[0].item(), 3 * ties[0].item()]),
    ))  # fmt: skip
    signs = torch.randint(2, x.shape, generator=draw.generator) * 2 - 1
    order = torch.randperm(len(x), generator=draw.generator)
    return {"x": (x * signs)[order].view(4, -1), "mantissa": mantissa, "lowest": lowest, "top": top}


def _every(format: dict[str, Any]) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: _awkward(draw, **format)


def _every_tie(format: dict[str, Any]) -> dict[str, Any]:
    """All ties, the float32 numbers next to each, and numbers beyond the top, infinities and NaN."""
    numbers = grid(**format)
    ties = ((numbers[1:] + numbers[:-1]) / 2).float()
    beside = [torch.nextafter(ties, torch.full_like(ties, end)) for end in (0.0, torch.inf)]
    top = format["top"]
    odd = torch.tensor([top * 1.0001, 3e38, torch.inf, torch.nan, 0.0, 1e-45, 1e-38, 2.0 ** (format["lowest"] - 30)])
    x = torch.cat((ties, *beside, numbers.float(), odd))
    return {"x": torch.stack((x, -x)), **format}


_BY_HAND = torch.tensor([17.0, -19.0, 21.0, 0.3, -1.06, 420.0, 1000.0, 0.001])

TO_FP8 = Exercise(
    "to_fp8",
    reference=to_fp8,
    rtol=0.0,
    atol=0.0,
    cases=[
        Case("eight numbers in E4M3", {"x": _BY_HAND, **E4M3}),
        Case("E4M3: ties, tiny ones, too large ones", _every(E4M3), hidden=True, points=2, fixed=[_every_tie(E4M3)]),
        Case("E5M2", _every(E5M2), hidden=True, fixed=[_every_tie(E5M2)]),
        Case("other formats", lambda draw: _awkward(draw, **draw.choice(OTHERS)), hidden=True, points=2, fixed=[
            _every_tie(format) for format in OTHERS]),
        # Numbers of the format stay as they are; alone they would be right in an answer that does nothing.
        Case("numbers of the format, and those half-way between", lambda draw: {
            "x": torch.cat((g := grid(**E4M3), -g, (g[:-1] + g[1:]) / 2)).float(), **E4M3}, hidden=True),
    ],
    idea="Between two powers of two all steps are equal: find the step at each number, and round to a multiple of it.",
    hint="x = clamp(x, ±top); e = the exponent of |x| (torch.frexp(x)[1] - 1), at least lowest; the steps there are "
    "2.0 ** (e - mantissa); the answer is round(x / step) * step.",
)  # fmt: skip

# ----------------------------------------------------------------------------------------------------- scales of tiles


def _amaxes(x: torch.Tensor, tile: Sequence[int]) -> torch.Tensor:
    m, n = tile
    rows = [x[i : i + m] for i in range(0, x.shape[0], m)]
    return torch.stack([torch.stack([r[:, j : j + n].abs().amax() for j in range(0, x.shape[1], n)]) for r in rows])


def _smallest_power(top: float, amax: float) -> int:
    """The smallest e such that amax <= top * 2**e, exactly: no logarithm is rounded."""
    (fraction, exponent), (of_top, at) = math.frexp(amax), math.frexp(top)
    return exponent - at + (fraction > of_top)


def tile_scales(x: torch.Tensor, tile: Sequence[int], top: float) -> torch.Tensor:
    """The codes in E8M0."""
    rows = _amaxes(x.double(), tile).tolist()
    codes = [[255 if not math.isfinite(a) else max(0, 127 + _smallest_power(top, a)) if a else 0 for a in row]
             for row in rows]  # fmt: skip
    return torch.tensor(codes, dtype=torch.uint8)


def _tiles(draw: Draw) -> dict[str, Any]:
    tile = [draw.choice([1, 2, 3]), draw.integer(2, 5)]
    x = draw.tensor(tile[0] * draw.integer(2, 4), tile[1] * draw.integer(2, 4))
    return {"x": x * torch.exp(3 * draw.tensor(*x.shape)), "tile": tile, "top": draw.choice([448.0, 57344.0])}


def _ragged(draw: Draw) -> dict[str, Any]:
    inputs = _tiles(draw)
    return {**inputs, "x": inputs["x"][:, :-1].clone()}


def _ragged_both(draw: Draw) -> dict[str, Any]:
    x = draw.tensor(7, 11)
    x[-1, -1] = 100.0
    return {"x": x, "tile": [3, 4], "top": 448.0}


def _larger_tile(draw: Draw) -> dict[str, Any]:
    return {"x": draw.tensor(3, 5), "tile": [4, 128], "top": 448.0}


def _at_the_edge(top: float) -> dict[str, Any]:
    """The top times a power of two and its neighbours, as largest magnitudes: a logarithm in float32 rounds across the
    edge."""
    at = torch.tensor([top * 2.0**e for e in (-30, -9, -1, 0, 1, 7, 30)])
    beside = [torch.nextafter(at, torch.full_like(at, end)) for end in (0.0, torch.inf)]
    x = torch.stack((at, *beside))
    plain = torch.full((3, 2), top / 224)  # where neither amax / top nor the nearest power of two is right
    return {"x": torch.cat((torch.stack((x, -x / 3), -1).flatten(1), plain), 1), "tile": [1, 2], "top": top}


# 2**-127 is the smallest that E8M0 has.
_TINY_NUMBERS = {
    "x": torch.tensor([[1e-30, -3e-37, 1e-40, 1e-45], [3.0, 2e-38, 3e38, -1.0]]),
    "tile": [1, 2],
    "top": 448.0,
}


def _not_finite(draw: Draw) -> dict[str, Any]:
    """Draw a tile with infinity and one with NaN, not as their first number, beside ordinary ones."""
    x = draw.tensor(3, 8)
    x[0, 1], x[1, 6], x[2, 3] = -torch.inf, torch.nan, torch.inf
    return {"x": x, "tile": [1, 4], "top": 448.0}


def _mx(draw: Draw) -> dict[str, Any]:
    x = draw.tensor(4, 32 * draw.integer(2, 4) - draw.integer(0, 9))
    return {"x": x * torch.exp(3 * draw.tensor(*x.shape)), "tile": [1, 32], "top": 448.0}


def _with_zeros(draw: Draw) -> dict[str, Any]:
    inputs = _tiles(draw)
    inputs["x"][: inputs["tile"][0], : inputs["tile"][1]] = 0.0
    return inputs


def _negative(draw: Draw) -> dict[str, Any]:
    inputs = _tiles(draw)
    return {**inputs, "x": -inputs["x"].abs()}


TILE_SCALES = Exercise(
    "tile_scales",
    reference=tile_scales,
    cases=[
        Case("2 x 4, tiles of 1 x 2", {"x": torch.tensor([[1.0, -2.0, 0.1, 0.2], [3.0, 0.0, 448.0, 449.0]]),
             "tile": [1, 2], "top": 448.0}),
        Case("the whole tensor as one tile", lambda draw: {**(i := _tiles(draw)), "tile": list(i["x"].shape)},
             hidden=True),
        Case("a tile of zeros has the code 0", {"x": torch.tensor([[0.0, 0.0, 7.0, -1.0]]), "tile": [1, 2],
             "top": 448.0}),
        Case("other tiles, and negative numbers", _tiles, hidden=True, draws=3, fixed=[_negative, _mx, _with_zeros]),
        Case("a last tile that is not full", _ragged, hidden=True, fixed=[_ragged_both, _larger_tile]),
        Case("NaN and infinity", _not_finite, hidden=True),
        Case("fits to the last bit; tiny numbers", _at_the_edge(448.0), hidden=True, fixed=[
            _at_the_edge(57344.0), _at_the_edge(6.0), _TINY_NUMBERS]),
    ],
    idea="The largest magnitude of a tile decides alone: how often must the top be doubled, or may it be halved, "
    "so that it still reaches amax?",
    hint="For each tile amax = largest |x|, in float64; code = ceil(log2(amax / top)) + 127, at least 0; 255 where "
    "amax is not finite; then .to(torch.uint8). Cut rows with x.split(m), columns with .split(n, dim=1): the "
    "last piece may be smaller. log2(0) is -inf, which clamp(min=...) makes a number.",
)  # fmt: skip
