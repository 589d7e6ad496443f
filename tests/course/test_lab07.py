"""Lab 07's checks: their cast to FP8 is torch's."""

from __future__ import annotations

from importlib import import_module

import torch

FP8 = import_module("course.07_kernels_flash_fp8.checks.fp8")


def test_the_reference_of_the_cast_is_torchs_cast_for_every_bf16_number_and_many_others():
    bits = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    x = torch.cat((bits, torch.randn(20000) * torch.exp(4 * torch.randn(20000))))
    for format, dtype in ((FP8.E4M3, torch.float8_e4m3fn), (FP8.E5M2, torch.float8_e5m2)):
        want = x.clamp(-format["top"], format["top"]).to(dtype)
        assert torch.equal(
            FP8.to_fp8(x, **format).to(dtype).view(torch.uint8)[~x.isnan()], want.view(torch.uint8)[~x.isnan()]
        )
