"""FP8 recipes: scales as published, errors within what rounding allows, ranks that agree."""

from __future__ import annotations

import pytest
import torch

from minimegatron.comm.axis import ALONE
from minimegatron.comm.mesh import Mesh
from minimegatron.errors import ConfigError
from minimegatron.kernels import reference
from minimegatron.layers.fp8 import linear as fp8_linear
from minimegatron.layers.fp8 import matmul as fp8
from minimegatron.layers.fp8.enable import move_scales
from minimegatron.layers.fp8.linear import ParallelFp8
from minimegatron.layers.fp8.matmul import E4M3, E5M2, RECIPES, Fp8Recipe, Quantised
from minimegatron.layers.fp8.scaling import DelayedScale, scaling_of, together

SERIAL = Mesh.serial()


def layer_of(recipe: Fp8Recipe, mesh: Mesh = SERIAL) -> ParallelFp8:
    """A layer all of whose tensors are cut over tp."""
    return ParallelFp8(recipe, dict.fromkeys(("input", "weight", "gradient"), mesh.tp))


def linear(layer: ParallelFp8, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The part of x w^T that this rank's columns make."""
    return layer.linear(x, w)


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def step(state: DelayedScale, amax: float) -> None:
    """A step that sees one number."""
    state(torch.tensor([[-amax]]))
    together([state]).move(ALONE)


@pytest.mark.parametrize(
    "history, algorithm, used",
    [(4, "max", [1, 448, 448, 56, 56, 56, 56, 448]), (1, "most_recent", [1, 448, 448, 56, 448, 448, 448, 448])],
)
def test_the_trace_of_delayed_scales(history, algorithm, used):
    state, scales = DelayedScale(Fp8Recipe(history=history, algorithm=algorithm), E4M3), []
    for amax in (1, 1, 8, 1, 1, 1, 1, 1):
        scales.append(state.scale.item())
        step(state, amax)
    assert scales == used


def test_scales_of_zeros_of_huge_tiny_and_broken_tensors():
    state = DelayedScale(Fp8Recipe(history=2), E5M2)
    step(state, 2.0)
    assert state.scale == 57344 / 2
    for amax in (0.0, 0.0, torch.nan, torch.inf):  # nothing to go by: the scale stays
        state.amax_history.zero_()
        step(state, amax)
        assert state.scale == 57344 / 2 and state.amax_history.isfinite().all()
    assert (
        reference.scale_for(torch.tensor(1e-45), E4M3).isfinite() and reference.scale_for(torch.tensor(0.0), E4M3) == 1
    )
    assert (
        reference.scale_for(torch.tensor(3e38), E4M3) > 0
        and reference.scale_for(torch.tensor(1.0), E4M3, margin=2) == 112
    )


def run(recipe: Fp8Recipe, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, steps: int = 1):
    """y, dx, dw of the last step, and the layer."""
    layer = layer_of(recipe)
    for _ in range(steps):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = linear(layer, x, w)
        dx, dw = torch.autograd.grad(y, (x, w), dy)
        move_scales(layer, SERIAL)
    return y.detach(), dx, dw, layer


def bound(a: torch.Tensor, b: torch.Tensor, of_a: float, of_b: float) -> torch.Tensor:
    """Of every element of a b^T: the sum of |a| |b|, times what rounding both factors can add relatively."""
    return (a.abs() @ b.abs().t()) * ((1 + of_a) * (1 + of_b) - 1) + 1e-4


@pytest.mark.parametrize("kind", RECIPES)
def test_errors_are_within_what_rounding_allows(kind):
    """Numbers within a factor of 2^8 of each other, so that none is below the formats' normal numbers."""
    x, w, dy = (normal(m, n, seed=i) for i, (m, n) in enumerate([(48, 160), (96, 160), (48, 96)]))
    x, w, dy = (t.sign() * t.abs().clamp(0.03, 4.0) for t in (x, w, dy))
    y, dx, dw, layer = run(Fp8Recipe(kind, history=2), x, w, dy, steps=2)
    e4, e5 = 2.0**-4, (2.0**-3 if layer.recipe.dtype(True) == E5M2 else 2.0**-4)
    if kind == "mx":  # its rule saturates what is above 1.75 of the top's power of two: at most 1/8 is cut off
        e4 = e5 = 2.0**-3
    for got, a, b, of_a in ((y, x, w, e4), (dx, dy, w.t(), e5), (dw, dy.t(), x.t(), e5)):
        difference = (got - a @ b.t()).abs()
        assert (difference <= bound(a, b, of_a, e4)).all()
        assert 1e-4 < difference.norm() / (a @ b.t()).norm() < 0.1


def test_gradients_are_e5m2_and_the_rest_e4m3():
    hybrid, plain = Fp8Recipe("current"), Fp8Recipe("current", hybrid=False)
    assert (hybrid.dtype(False), hybrid.dtype(True), plain.dtype(True)) == (E4M3, E5M2, E4M3)
    assert Fp8Recipe("block").dtype(True) == E4M3
    x, w, dy = normal(8, 16), normal(4, 16, seed=1), normal(8, 4, seed=2)
    _, dx, _, _ = run(hybrid, x, w, dy)
    scale_w, scale_dy = reference.scale_for(w.abs().max(), E4M3), reference.scale_for(dy.abs().max(), E5M2)
    want = ((dy * scale_dy).to(E5M2).float() / scale_dy) @ ((w * scale_w).to(E4M3).float() / scale_w)
    torch.testing.assert_close(dx, want, rtol=1e-6, atol=1e-6)


def test_tiles_keep_small_rows_that_one_scale_loses():
    x, w = normal(4, 256), normal(8, 256, seed=1)
    x[0] *= 1e6
    exact, dy = x @ w.t(), torch.ones(4, 8)
    errors = {kind: (run(Fp8Recipe(kind), x, w, dy)[0] - exact)[1:].norm() / exact[1:].norm() for kind in RECIPES[1:]}
    assert errors["current"] > 0.9 and errors["block"] < 0.08 and errors["mx"] < 0.08


@pytest.mark.parametrize("kind", RECIPES)
def test_zeros_huge_numbers_and_overflow_stay_finite(kind):
    w, dy = normal(4, 64), normal(3, 4, seed=1)
    for x in (torch.zeros(3, 64), normal(3, 64, scale=1e30), normal(3, 64, scale=1e-30)):
        y, dx, dw, _ = run(Fp8Recipe(kind, history=3), x, w, dy)
        assert all(t.isfinite().all() for t in (y, dx, dw))


def test_a_second_forward_of_a_step_changes_no_scale_and_evaluation_no_history():
    x, w, dy = normal(8, 16), normal(4, 16, seed=1), normal(8, 4, seed=2)
    _, _, _, once = run(Fp8Recipe(history=3), x, w, dy)
    layer = layer_of(Fp8Recipe(history=3))
    a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
    linear(layer, a, b)
    torch.autograd.grad(linear(layer, a, b), (a, b), dy)
    move_scales(layer, SERIAL)
    before = {k: v.clone() for k, v in layer.state_dict().items()}
    assert before.keys() == once.state_dict().keys()
    assert all(torch.equal(before[k], v) for k, v in once.state_dict().items())
    layer.eval()
    with torch.no_grad():
        linear(layer, 100 * x, w)
    assert all(torch.equal(before[k], v) for k, v in layer.state_dict().items())


def test_refusals():
    for arguments, message in [
        ({"kind": "int8"}, "fp8 recipe"),
        ({"history": 0}, "history"),
        ({"algorithm": "x"}, "amax"),
    ]:
        with pytest.raises(ConfigError, match=message):
            Fp8Recipe(**arguments)
    with pytest.raises(ConfigError, match="one dtype"):
        linear(layer_of(Fp8Recipe()), normal(2, 4), normal(3, 4).bfloat16())


# ------------------------------------------------------------------------------------------------------------- products


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
