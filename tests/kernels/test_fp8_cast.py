"""Casts to FP8: against torch's own, and against a model that knows the formats only as lists of numbers."""

from __future__ import annotations

import pytest
import torch

from minimegatron.errors import ConfigError
from minimegatron.kernels import fp8, reference
from tests.kernels.compare import misaligned, random

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def numbers_of(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(positive numbers in order, their codes), from the definition: 1.m 2^(e - bias), 0.m 2^(1 - bias) for e = 0."""
    bits, bias, last = (3, 7, 0x7E) if dtype == torch.float8_e4m3fn else (2, 15, 0x7B)
    codes = torch.arange(last + 1)
    e, m = codes >> bits, (codes & (2**bits - 1)) / 2**bits
    return torch.where(e == 0, torch.ldexp(m, torch.tensor(1 - bias)), torch.ldexp(1 + m, e - bias)).double(), codes


def by_search(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes of the nearest numbers, the even code where two are equally near, the largest beyond it; NaN 0x7f."""
    values, codes = numbers_of(dtype)
    a = x.double().abs().clamp(max=values[-1].item())
    above = torch.searchsorted(values, a.nan_to_num(0.0)).clamp(max=len(values) - 1)
    below = (above - 1).clamp(min=0)
    up, down = values[above] - a, a - values[below]
    pick = torch.where((up < down) | ((up == down) & (codes[above] % 2 == 0)), above, below)
    pick = torch.where(a == values[above], above, pick)
    code = codes[pick] | (torch.signbit(x).long() << 7)
    return torch.where(x.isnan(), 0x7F, code).to(torch.uint8)


def samples(dtype: torch.dtype) -> torch.Tensor:
    """Every number of the format, every midpoint and its neighbours, beyond the top, tiny ones, random ones."""
    values, _ = numbers_of(dtype)
    middle = ((values[1:] + values[:-1]) / 2).float()
    near = torch.cat([middle, torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(1e9))])
    wild = torch.randn(3000, generator=torch.Generator().manual_seed(0)) * torch.exp2(torch.linspace(-20, 18, 3000))
    special = torch.tensor([0.0, 1e-30, 1e-45, 448.1, 464.0, 465.0, 480.0, 57344.0, 61440.0, 61441.0, 1e38, torch.inf])
    positive = torch.cat([values.float(), near, wild, special])
    return torch.cat([positive, -positive])


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_bit_of_the_cast(dtype):
    x = samples(dtype)
    want = by_search(x, dtype)
    one = torch.ones(())
    amax = torch.zeros(())
    got, *_ = fp8.cast(x[None], one, dtype, amax)
    assert torch.equal(got.view(torch.uint8)[0], want)
    assert torch.equal(reference.fp8_cast(x, 1.0, dtype).view(torch.uint8), want)
    inside = x.abs() <= reference.FP8_TOP[dtype]
    assert torch.equal(x[inside].to(dtype).view(torch.uint8), want[inside])
    assert amax == torch.inf


@pytest.mark.parametrize("dtype", FORMATS)
def test_nan_stays_and_is_seen_in_amax(dtype):
    x = random(3, 70)
    x[1, 69] = torch.nan
    amax = torch.zeros(())
    q, qt, _ = fp8.cast(x, torch.ones(()), dtype, amax, transpose=True)
    assert q.float().isnan().nonzero().tolist() == [[1, 69]] and qt.float().isnan().nonzero().tolist() == [[69, 1]]
    assert amax.isnan() and fp8.magnitudes(x).amax() == torch.inf
    q, _, inverse = fp8.cast_by(x, fp8.magnitudes(x), dtype)
    assert inverse == 1 and q.float().isnan().sum() == 1


@pytest.mark.parametrize("shape", [(1, 1), (31, 33), (64, 64), (1, 1023), (129, 65), (68, 132), (4097, 2)])
def test_cast_transpose_and_amax(shape):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x, scale, amax = random(*shape, dtype=dtype), torch.tensor(17.3), torch.zeros(())
        q, qt, inverse = fp8.cast(x, scale, fp8.E4M3, amax, transpose=True)
        want = reference.fp8_cast(x.float(), scale, fp8.E4M3)
        assert torch.equal(q.view(torch.uint8), want.view(torch.uint8))
        assert torch.equal(qt.view(torch.uint8), want.view(torch.uint8).t())
        assert amax == x.abs().max().float() and inverse == 1 / scale
        fp8.cast(x / 2, scale, fp8.E4M3, amax)
        assert amax == x.abs().max().float(), "what was seen before and is larger stays"


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (31, 33), (68, 132), (200, 1024)])
def test_a_cast_by_the_tensors_own_magnitude(shape, dtype):
    """Two launches; one number of each block goes from the first to the second."""
    for x in (random(*shape), random(*shape, dtype=torch.bfloat16) * 1e-30, torch.zeros(shape), random(*shape) * 1e-44):
        x[-1, -1] *= 3  # the largest is in the last block
        parts = fp8.magnitudes(x)
        assert parts.numel() == -(-x.numel() // 16384) and parts.amax() == x.abs().max().float()
        for margin in (0, 2):
            scale = reference.scale_for(x.abs().max().float(), dtype, margin)
            q, qt, inverse = fp8.cast_by(x, parts, dtype, margin, transpose=True)
            want = reference.fp8_cast(x.float(), scale, dtype).view(torch.uint8)
            assert torch.equal(q.view(torch.uint8), want) and torch.equal(qt.view(torch.uint8), want.t())
            assert torch.equal(inverse, 1 / scale)


@pytest.mark.parametrize("rule", list(fp8.RULES))
@pytest.mark.parametrize("tile", [(1, 128), (128, 128), (1, 32), (32, 1)])
def test_tiles(tile, rule):
    for shape in [(1, 1), (5, 300), (130, 129)]:
        x = random(*shape) * torch.exp2(torch.arange(shape[0])[:, None] % 40 - 20.0)
        x[0, 0] = 0.0
        if shape[0] > 3:
            x[3] = 0.0
        for dtype in FORMATS:
            q, scales = fp8.cast_tiles(x, tile, dtype, rule)
            want, wanted = reference.fp8_cast_tiles(x, tile, dtype, rule)
            assert torch.equal(scales, wanted) and torch.equal(q.view(torch.uint8), want.view(torch.uint8))
            if rule == "power":
                spread = reference.spread_tiles(scales, tile, x.shape)
                assert ((x / spread).abs() <= reference.FP8_TOP[dtype]).all() and (torch.frexp(scales)[0] == 0.5).all()


@pytest.mark.parametrize("tile", [(1, 128), (128, 128), (1, 32), (3, 5)])
@pytest.mark.parametrize("dtype", FORMATS)
def test_tiles_back_to_bf16(tile, dtype):
    """Every code, NaNs and infinities too; rows of whole packs and others."""
    codes = torch.arange(256, dtype=torch.uint8)
    for shape in [(1, 256), (131, 300), (2, 7), (0, 8)]:
        q = codes.repeat(-(-shape[0] * shape[1] // 256))[: shape[0] * shape[1]].view(shape).view(dtype)
        tiles = [-(-size // of) for size, of in zip(shape, tile, strict=True)]
        scales = torch.exp2(torch.arange(tiles[0] * tiles[1]) % 100 - 60.0).view(tiles)
        want = q.bfloat16() * reference.spread_tiles(scales, tile, q.shape).bfloat16()
        got = fp8.dequantise(q, scales, tile)
        assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
    for call, message in [
        (lambda: fp8.dequantise(torch.zeros(2, 8), torch.ones(2, 1), (1, 8)), "fp8 format"),
        (lambda: fp8.dequantise(torch.zeros(2, 8).to(dtype), torch.ones(1, 2), (1, 8)), r"scales is \(1, 2\)"),
        (lambda: fp8.dequantise(torch.zeros(2, 8).to(dtype), torch.ones(2, 1).double(), (1, 8)), "in float32"),
    ]:
        with pytest.raises(ConfigError, match=message):
            call()


def test_tiles_of_numbers_that_are_not_finite():
    x = random(2, 64)
    x[0, 3], x[1, 40] = torch.inf, torch.nan
    q, scales = fp8.cast_tiles(x, (1, 32), fp8.E4M3)
    assert scales[0, 0] == scales[1, 1] == 1 and q[0, 3].float() == 448 and q[1, 40].float().isnan()


def test_strides_misaligned_memory_empty_and_refusals():
    x, one = random(8, 64), torch.ones(())
    for view in (x[:, ::2], misaligned(x), x.t()):
        want = reference.fp8_cast(view, 1.0, fp8.E5M2).view(torch.uint8)
        assert torch.equal(fp8.cast(view, one, fp8.E5M2)[0].view(torch.uint8), want)
    amax = torch.zeros(())
    q, qt, inverse = fp8.cast(torch.empty(0, 5), one / 2, fp8.E4M3, amax, transpose=True)
    assert q.shape == (0, 5) and qt.shape == (5, 0) and amax == 0 and inverse == 2
    assert fp8.magnitudes(torch.empty(0, 5)).tolist() == [0.0]
    half = misaligned(random(8, 64, dtype=torch.bfloat16))
    assert fp8.magnitudes(half).amax() == half.abs().max().float()
    for call, message in [
        (lambda: fp8.cast(random(3), one, fp8.E4M3), "give a matrix"),
        (lambda: fp8.cast(x, one.double(), fp8.E4M3), "one fp32 number"),
        (lambda: fp8.cast(x, one, fp8.E4M3, torch.zeros(2)), "(?s)seen is .*one fp32 number"),
        (lambda: fp8.cast_by(x, torch.ones(257), fp8.E4M3), "1 to 256 fp32 numbers"),
        (lambda: fp8.cast(x, one, torch.float16), "fp8 format"),
        (lambda: fp8.cast_tiles(x, (0, 3), fp8.E4M3), "at least 1 x 1"),
        (lambda: fp8.cast_tiles(x, (1, 3), fp8.E4M3, "e8"), "choose among"),
    ]:
        with pytest.raises(ConfigError, match=message):
            call()
