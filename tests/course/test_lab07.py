"""Lab 07's checks: their cast to FP8 is torch's, their scales are the largest that fit, in exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction
from importlib import import_module

import pytest
import torch
from course.lab07.tensor_cores import product
from course.lab07.text import indexed_at_run_time

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
                               (a.float(), b, r"a is float32 \[3, 5\], and no matrix in FP8")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            product(left, right)


LOCAL = "constexpr int PER = 16;\n__global__ void f(const float* x, int cols) {\n  float kept[PER];\n  %s\n}"


@pytest.mark.parametrize("loop", [
    "int n = 0; for (int i = threadIdx.x; i < cols; i += 256) kept[n++] = x[i];",
    "for (int i = threadIdx.x, n = 0; i < cols; i += 256, ++n) kept[n] = x[i];",
    "for (int i = threadIdx.x; i < cols; i += 256) kept[i / 256] = x[i];",
    "int count = (cols + 255) / 256; for (int k = 0; k < count; k++) kept[k] = x[k];",
    "for (int k = 0; k < PER; ++k) kept[k] = 0; for (int k = 0; k < cols / 256; ++k) kept[k] = x[k];",
    "for (int k = 0; k * 256 + threadIdx.x < cols; ++k) kept[k] = x[k];",
    "kept[threadIdx.x % PER] = 1;",
])  # fmt: skip
def test_an_index_that_only_the_run_knows_is_found(loop):
    assert indexed_at_run_time(LOCAL % loop)[0] == "kept"


@pytest.mark.parametrize("loop", [
    "for (int k = 0; k < PER && threadIdx.x + k * 256 < cols; ++k) kept[k] = x[k];",
    "for (int k = PER; k-- > 0;) kept[k] = x[k];",
    "int k = 0; while (k < PER) { kept[k] = x[k]; ++k; }",
    "for (int k = 0; k < PER; k += 4) for (int j = 0; j < 4; ++j) kept[k + j] = x[k];",
    "for (int k = 0, i = threadIdx.x; k < PER; ++k, i += 256) { if (i >= cols) break; kept[k] = x[i]; }",
    "const int N = 16; for (int k = 0; k != N; ++k) { const int j = k; kept[j] = x[k]; }",
    "__shared__ float all[4096]; for (int i = threadIdx.x; i < cols; i += 256) all[i] = x[i]; kept[0] = all[1];",
    "auto put = [&](int k, float v) { kept[k] = v; }; put(0, x[cols - 1]);",
])  # fmt: skip
def test_an_index_that_the_compiler_can_know_is_not(loop):
    assert indexed_at_run_time(LOCAL % loop) == ("", "")
