"""Norms, SwiGLU and RoPE by the kernel for CPUs are torch's, for any shape and strides; 16 bits stay torch's own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.kernels import choice, few_rows, ops, plain
from tests.kernels.compare import close, random

ROWS, WIDTHS = st.sampled_from([1, 2, 17, 40]), st.sampled_from([1, 5, 16, 64, 100, 515])


@settings(max_examples=40)
@given(ROWS, WIDTHS, st.sampled_from([1e-6, 1e-2]), st.booleans())
def test_norms_are_torchs(rows, n, eps, dense):
    x, residual = (random(rows, 1, 2 * n, seed=i)[..., : 2 * n if dense else n] for i in range(2))
    weight = random(x.shape[-1], seed=2)
    wide = [t.double() for t in (x, residual, weight)]
    close([few_rows.norm(x, weight, None, eps)], [plain.norm(wide[0], wide[2], None, eps)], torch.float32)
    found = few_rows.add_norm(x, residual, weight, None, eps)
    close(found, plain.add_norm(*wide, None, eps), torch.float32)


@settings(max_examples=40)
@given(ROWS, WIDTHS, st.sampled_from([1.0, 40.0]))
def test_swiglu_is_torchs(rows, n, spread):
    x = random(rows, 1, 2 * n) * spread
    close([few_rows.swiglu(x)], [plain.swiglu(x.double())], torch.float32)


@settings(max_examples=60)
@given(ROWS, st.integers(1, 3), st.sampled_from([(8, 8), (64, 64), (80, 20), (6, 4)]), st.booleans(), st.booleans())
def test_rope_is_torchs(rows, heads, channels, interleaved, packed):
    d, rotated = channels
    x = random(rows, 1, heads, 3 * d)[..., d : 2 * d] if packed else random(rows, 1, heads, d)
    angle = random(rows, 1, 1, rotated // 2, seed=1) * 9
    expected = plain.rope(x.double(), angle.double().cos(), angle.double().sin(), interleaved)
    close([few_rows.rope(x, angle.cos(), angle.sin(), interleaved)], [expected], torch.float32)


@settings(max_examples=60)
@given(st.integers(0, 5), st.sampled_from([1, 3, 16, 37]), WIDTHS, st.booleans())
def test_products_are_torchs(rows, o, i, biased):
    x, weight, bias = random(2, rows, i)[1:], random(o, i, seed=1), random(o, seed=2) if biased else None
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert few_rows.fits(x, weight) == (0 < rows <= few_rows.MOST)
    with torch.inference_mode():
        close([ops.linear(x, weight, bias)], [wanted], torch.float32)


def test_what_is_no_number_stays_none():
    x = torch.tensor([[torch.nan, torch.inf, 1.0, 1.0, 1.0, torch.nan]])
    assert few_rows.swiglu(x).isfinite().tolist() == [[False, False, False]]
    assert few_rows.norm(x, torch.ones(6), None, 1e-6).isnan().all()


def test_threads_share_rows_and_change_nothing():
    x, weight, found = random(3000, 1, 512), random(512, seed=1), []
    threads = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append((few_rows.norm(x, weight, None, 1e-6), few_rows.swiglu(x)))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_are_torchs_own(dtype):
    x, weight = random(3, 1, 8, dtype=dtype), random(8, dtype=dtype, seed=1)
    angle = torch.ones(3, 1, 1, 2)
    with torch.inference_mode():
        assert torch.equal(ops.norm(x, weight, None, 1e-6), plain.norm(x, weight, None, 1e-6))
        assert torch.equal(ops.swiglu(x), plain.swiglu(x))
        turned = ops.rope(x[:, :, None], angle, angle, False)
        assert torch.equal(turned, plain.rope(x[:, :, None], angle, angle, False))


def test_training_recompute_and_inference_are_the_same_numbers():
    """Where a layer is computed again in the backward pass; and where a trainer compares with what was generated."""
    x, weight, row = random(5, 1, 64), random(64, seed=1), choice.TABLE["norm"]
    for grad in (torch.enable_grad, torch.no_grad):
        with grad():
            assert choice.choose("norm", "auto", x, weight) is row.native
            assert torch.equal(ops.norm(x, weight, None, 1e-6), few_rows.norm(x, weight, None, 1e-6))
    with torch.inference_mode():
        assert choice.choose("norm", "auto", x, weight) is few_rows.norm


@settings(max_examples=40)
@given(
    ROWS,
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([(8, 8), (80, 20), (6, 4)]),
    st.booleans(),
    st.booleans(),
)
def test_turning_and_keeping_at_once_is_torchs(n, groups, shared, channels, interleaved, by_head):
    d, rotated = channels
    packed, angle = random(n, 1, groups, shared + 2, d), random(n, 1, 1, rotated // 2, seed=1) * 9
    rows = torch.randperm(15 * 4, generator=torch.Generator().manual_seed(n))[:n]
    found = []
    for kernels in ("auto", "torch"):
        pages = [torch.full((15, groups, 4, d), 7.0).transpose(1, 2) for _ in "kv"]
        pages = pages if by_head else [page.contiguous() for page in pages]
        with torch.inference_mode():
            q = ops.rope_and_keep(packed, angle.cos(), angle.sin(), interleaved, *pages, rows, kernels=kernels)
        found.append((q, *pages))
    assert torch.equal(found[0][2], found[1][2])  # values are copied
    close(found[0], [t.double() for t in found[1]], torch.float32)
