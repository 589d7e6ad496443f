"""Lab 07's checks: their cast to FP8 is torch's, their scales are the largest that fit, in exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction
from importlib import import_module

import pytest
import torch
from course.lab07.tensor_cores import product

from labkit.exercises import Draw
from minimegatron.errors import ConfigError
from minimegatron.kernels import reference
from tests.course.marked import LABS

FP8 = import_module("course.07_kernels_flash_fp8.checks.fp8")
BACKWARD = import_module("course.07_kernels_flash_fp8.checks.backward")


def test_the_reference_of_the_cast_is_torchs_cast_for_every_bf16_number_and_many_others():
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = torch.cat((bits, torch.randn(20000) * torch.exp(4 * torch.randn(20000))))
    for format, dtype in ((FP8.E4M3, torch.float8_e4m3fn), (FP8.E5M2, torch.float8_e5m2)):
        want = x.clamp(-format["top"], format["top"]).to(dtype)
        assert torch.equal(
            FP8.to_fp8(x, **format).to(dtype).view(torch.uint8)[~x.isnan()], want.view(torch.uint8)[~x.isnan()]
        )


def test_a_scale_fits_to_the_last_bit_and_the_power_of_two_below_does_not():
    tried = 0
    for case in LABS["07_kernels_flash_fp8"].lab["tile_scales"].cases:
        for inputs in (case.inputs, *case.fixed):
            i = inputs(Draw(1)) if callable(inputs) else inputs
            amaxes, codes = FP8._amaxes(i["x"].double(), i["tile"]), FP8.tile_scales(**i)
            for amax, code in zip(amaxes.flatten().tolist(), codes.flatten().tolist(), strict=True):
                if amax == 0 or not math.isfinite(amax):
                    assert code == (255 if amax else 0)
                    continue
                tried += 1
                power = Fraction(2) ** (code - 127)
                assert Fraction(amax) <= Fraction(i["top"]) * power
                assert code == 0 or Fraction(amax) > Fraction(i["top"]) * power / 2
    assert tried > 100


def test_the_bytes_of_a_scale_are_those_of_torchs_e8m0_and_a_tiles_numbers_are_the_packages():
    """With the package's rule "power", which rounds up, too; between the ends of its range."""
    x = torch.randn(7, 70, generator=torch.Generator().manual_seed(1)) * 10
    codes = FP8.tile_scales(x, (1, 32), 448.0)
    scales = reference.tile_scales(reference.tile_amax(x, (1, 32)), torch.float8_e4m3fn, "power")
    assert torch.equal(codes.view(torch.float8_e8m0fnu).float(), scales)


def test_dgamma_and_dx_are_those_of_torchs_norm():
    x, gamma, dy = torch.randn(5, 9).double(), torch.randn(9).double(), torch.randn(5, 9).double()
    leaves = [x.clone().requires_grad_(), gamma.clone().requires_grad_()]
    torch.nn.functional.rms_norm(leaves[0], (9,), leaves[1], 0.02).backward(dy)
    for mine, other in zip(BACKWARD.backward(dy, x, gamma, 0.02), leaves, strict=True):
        assert torch.allclose(mine, other.grad)


def test_a_product_takes_rows_that_lie_in_memory_whole():
    a, b = torch.randn(3, 5).to(torch.float8_e4m3fn), torch.randn(4, 5).to(torch.float8_e5m2)
    assert torch.allclose(product(a, b), a.float() @ b.float().T)
    for left, right, words in ((a.T, b, "no neighbours"), (a, b.T.contiguous(), "sums of 5 and 4"),
                               (a.float(), b, r"a is float32 \[3, 5\]")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            product(left, right)
