"""Lab 07's checks: their cast to FP8 is torch's, their scales are the largest that fit, in exact arithmetic."""

from __future__ import annotations

from fractions import Fraction
from importlib import import_module

import torch

from labkit.exercises import Draw
from tests.course.marked import LABS

FP8 = import_module("course.07_kernels_flash_fp8.checks.fp8")


def test_the_reference_of_the_cast_is_torchs_cast_for_every_bf16_number_and_many_others():
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = torch.cat((bits, torch.randn(20000) * torch.exp(4 * torch.randn(20000))))
    for format, dtype in ((FP8.E4M3, torch.float8_e4m3fn), (FP8.E5M2, torch.float8_e5m2)):
        want = x.clamp(-format["top"], format["top"]).to(dtype)
        assert torch.equal(
            FP8.to_fp8(x, **format).to(dtype).view(torch.uint8)[~x.isnan()], want.view(torch.uint8)[~x.isnan()]
        )


def test_a_scale_fits_to_the_last_bit_and_the_next_power_of_two_does_not():
    tried = 0
    for case in LABS["07_kernels_flash_fp8"].lab["tile_scales"].cases:
        for inputs in (case.inputs, *case.fixed):
            i = inputs(Draw(1)) if callable(inputs) else inputs
            amaxes, scales = FP8._amaxes(i["x"], i["tile"]), FP8.tile_scales(**i)
            for amax, scale in zip(amaxes.flatten().tolist(), scales.flatten().tolist(), strict=True):
                if amax == 0:
                    assert scale == 1
                    continue
                tried += 1
                assert Fraction(amax) * Fraction(scale) <= Fraction(i["top"])
                assert scale == 2.0**127 or Fraction(amax) * 2 * Fraction(scale) > Fraction(i["top"])
    assert tried > 100
