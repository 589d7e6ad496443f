"""Numbers kept in fewer bits: what rounding may change, what a scale must reach, what comes back unchanged."""

from __future__ import annotations

import math

import pytest
import torch

from minimegatron.optim.stored import DTYPES, RANGE, Remainder, Stored, scale_of

STEP = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp8": 2.0**-4}  # the most that rounding changes a number by, of itself
LOW = [name for name in DTYPES if name != "fp32"]


def numbers(seed: int, spread: float = 2.0, magnitude: float = 1e-6) -> torch.Tensor:
    """Both signs, over several powers of ten, some zeros."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4000, generator=generator) * 10.0 ** (spread * torch.rand(4000, generator=generator))
    x[::97] = 0.0
    return x * magnitude


@pytest.mark.parametrize("name", LOW)
@pytest.mark.parametrize("magnitude", [1e-12, 1e-4, 1.0, 1e6])
def test_rounding_changes_a_number_by_at_most_half_a_step(name: str, magnitude: float) -> None:
    x = numbers(0, magnitude=magnitude)
    off = (Stored(x, DTYPES[name]).read().double() - x.double()).abs()
    if name == "fp8":  # numbers far below the largest one have fewer bits
        off = torch.where(x.abs() > x.abs().max() * 2.0**-14, off, 0.0)
    assert 0.9 * STEP[name] < (off / x.double().abs().clamp(min=1e-300)).max() <= STEP[name]


@pytest.mark.parametrize("name", LOW)
def test_what_is_read_and_kept_again_is_the_same(name: str) -> None:
    for seed in range(20):
        kept = Stored(numbers(seed, spread=6.0, magnitude=10.0**-seed), DTYPES[name], positive=False)
        once = kept.read().clone()
        kept.write(once)
        assert torch.equal(kept.read(), once)


@pytest.mark.parametrize("most", RANGE.values())
def test_the_scale_is_the_smallest_power_of_two_that_is_enough(most: float) -> None:
    for largest in (most, math.nextafter(most, 0), most * 1.0001, 1e-20, 3e-7, 1.0, 1e20, most * 2.0**-100):
        scale = scale_of(torch.tensor([0.0, -largest, largest / 3]), most).item()
        assert math.frexp(scale)[0] == 0.5
        assert largest <= most * scale * (1 + 2**-23) and largest > most * scale / 2 * (1 - 2**-23)
    assert scale_of(torch.zeros(3), most) == 1 and scale_of(torch.zeros(0), most) == 1


@pytest.mark.parametrize("name", ["fp16", "fp8"])
def test_a_second_moment_that_is_not_zero_stays_so(name: str) -> None:
    x = torch.tensor([1.0, 1e-9, 1e-15, 0.0])
    assert (Stored(x, DTYPES[name]).read() > 0).tolist() == [True, name == "fp16", False, False]
    kept = Stored(x, DTYPES[name], positive=True)
    assert (kept.read() > 0).tolist() == [True, True, True, False]
    once = kept.read().clone()
    kept.write(once)
    assert torch.equal(kept.read(), once)


def test_fp32_numbers_stay_where_they_are() -> None:
    x = numbers(1)
    kept = Stored(x, torch.float32)
    assert kept.read() is x and kept.data is x


def test_a_weight_and_its_remainder_are_the_main_parameter() -> None:
    """All lower halves, of numbers of either sign, of the largest and the smallest ones."""
    lower = torch.arange(1 << 16, dtype=torch.int32)
    for upper in (0x3F80, 0x3F81, 0x3FFF, 0x0000, 0x0001, 0x7F00, 0x4049):
        for sign in (0, -(1 << 31)):
            x = ((upper << 16) + lower + sign).view(torch.float32)
            main = Remainder(torch.zeros(1 << 16, dtype=torch.bfloat16))
            main.write(x)
            assert torch.equal(main.read().view(torch.int32), x.view(torch.int32))
            tie = lower == 1 << 15
            assert torch.equal(main.weight[~tie], x.bfloat16()[~tie])
            away = x[tie].abs() < main.weight[tie].abs().float()
            assert away.all() and main.data.dtype == torch.int16
