"""What tensor cores multiply: numbers of FP8 and of its tiles are numbers of bf16, so a product loses nothing more."""

from __future__ import annotations

import pytest
import torch

from minimegatron.comm.axis import ALONE
from minimegatron.comm.mesh import Mesh
from minimegatron.kernels import reference
from minimegatron.layers.fp8 import linear as fp8_linear
from minimegatron.layers.fp8 import matmul as fp8
from minimegatron.layers.fp8.matmul import E4M3, E5M2, Fp8Recipe, Quantised
from minimegatron.layers.fp8.scaling import scaling_of
from tests.layers.test_fp8 import layer_of, linear, normal


def all_numbers(dtype: torch.dtype) -> torch.Tensor:
    """Every code but NaNs and infinities, as a matrix of one row."""
    q = torch.arange(256, dtype=torch.uint8).view(dtype)
    return q[q.float().isfinite()][None]


def wide(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Rows of very different size."""
    return normal(rows, columns, seed=seed) * torch.exp2(torch.arange(rows)[:, None] % 60 - 30.0)


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_every_number_is_exact_in_bf16_with_every_scale_that_tiles_have(dtype):
    q = all_numbers(dtype)
    assert q.numel() >= 248 and torch.equal(Quantised(q, torch.tensor(0.3)).in_bf16().float(), q.float())
    lowest = -124 if dtype == E4M3 else -117  # times the format's smallest number: 2^-133, bf16's
    for power in range(lowest, 120 if dtype == E4M3 else 113):
        tile = Quantised(q, torch.tensor([[2.0**power]]), (1, 256))
        assert torch.equal(tile.in_bf16().float(), tile.dequantise()), power
        assert tile.dequantise().isfinite().all()


@pytest.mark.parametrize("kind, which", [("block", "input"), ("block", "weight"), ("mx", "input"), ("mx", "weight")])
def test_tiles_of_the_recipes_are_exact_in_bf16(kind, which):
    """Also where the last tile is not whole."""
    for fused in ("torch", "emulated"):
        quantised = scaling_of(Fp8Recipe(kind, kernels=fused), which, ALONE)(wide(150, 300, seed=1))
        assert (torch.frexp(quantised.inverse)[0] == 0.5).all(), "powers of two"
        assert torch.equal(quantised.in_bf16().float(), quantised.dequantise())


def test_a_scale_that_is_no_power_of_two_is_not_exact_in_bf16_and_refused():
    q, inverse = reference.fp8_cast_tiles(wide(8, 256, seed=1), (1, 128), E4M3, "float")
    tiles = Quantised(q, inverse, (1, 128))
    assert not torch.equal(tiles.in_bf16().float(), tiles.dequantise())
    with pytest.raises(AssertionError, match="powers of two"):
        fp8.cast_tiles(normal(8, 256), (1, 128), E4M3, "float", "torch")


def test_products_in_bf16_are_those_of_the_dequantised_factors(monkeypatch):
    """torch.mm with another dtype of the result is for GPUs alone; what it says: exact factors, summed in fp32."""
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: real(a.to(out_dtype), b.to(out_dtype)))
    x, w = wide(37, 160, seed=1), normal(48, 160, seed=2)
    for kind in fp8.RECIPES[1:]:
        a, b = scaling_of(Fp8Recipe(kind), "gradient", ALONE)(x), scaling_of(Fp8Recipe(kind), "weight", ALONE)(w)
        exact = fp8.product(a, b, torch.float32)
        got = fp8.product_in_bf16(a, b, torch.float32)
        if a.tile:
            assert torch.equal(got, exact)
        torch.testing.assert_close(got, exact, rtol=1e-5, atol=1e-6 * exact.abs().max().item())
        in_bf16 = fp8.product_in_bf16(a, b, torch.bfloat16)
        assert in_bf16.dtype == torch.bfloat16
        torch.testing.assert_close(in_bf16.float(), exact, rtol=2.0**-8, atol=1e-6 * exact.abs().max().item())


def test_which_product_a_gpu_is_asked_for(monkeypatch):
    asked: list[str] = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fp8, "scaled_mm", lambda a, b, dtype, fast: asked.append("fp8, fast" if fast else "fp8"))
    monkeypatch.setattr(fp8, "product_in_bf16", lambda a, b, dtype: asked.append("bf16"))
    fp8._takes_fp8.cache_clear()
    one = torch.ones(())
    for rows, k, n, tile, fast in [
        (5, 32, 16, None, True),
        (5, 32, 16, None, False),
        (32, 5, 16, None, False),  # dW of an expert that got five rows
        (32, 16, 5, None, False),
        (0, 32, 16, None, False),
        (5, 32, 16, (1, 32), True),
    ]:
        a, b = (Quantised(torch.zeros(m, k, dtype=torch.uint8), one, tile) for m in (rows, n))
        fp8.product(a, b, torch.bfloat16, fast)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    fp8._takes_fp8.cache_clear()
    a = Quantised(torch.zeros(16, 16, dtype=torch.uint8), one)
    fp8.product(a, a, torch.bfloat16)
    fp8._takes_fp8.cache_clear()
    assert asked == ["fp8, fast", "fp8", "fp8", "bf16", "bf16", "bf16", "bf16"]


def test_y_alone_is_summed_fast(monkeypatch):
    asked: list[bool] = []
    real = fp8_linear.product

    def seen(a, b, dtype, fast=False):
        asked.append(fast)
        return real(a, b, dtype, fast)

    monkeypatch.setattr(fp8_linear, "product", seen)
    x, w = normal(16, 32).requires_grad_(), normal(48, 32, seed=1).requires_grad_()
    linear(layer_of(Fp8Recipe("current"), Mesh.serial()), x, w).sum().backward()
    assert asked == [True, False, False]
