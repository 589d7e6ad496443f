"""The flash attention kernels against the formula in fp64 and torch's own attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minimegatron.kernels import flash, operators, reference
from tests.kernels.compare import both, close, misaligned, random


def case(b, a, g, n, m, d, dtype):
    return [random(b, h, s, d, dtype=dtype, seed=i) for i, (h, s) in enumerate([(a, n), (g, m), (g, m)])]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 1, 1, 1), (2, 4, 2, 33, 33, 8), (1, 2, 1, 31, 32, 64), (1, 2, 2, 70, 70, 33), (1, 3, 1, 5, 100, 128)],
    ids=str,
)
def test_forward_and_backward(shape, causal):
    for dtype in (torch.float64, torch.bfloat16) if shape[3] != 33 else (torch.float64, torch.float32, torch.float16):
        scale = shape[-1] ** -0.5
        kernel = lambda q, k, v, s=scale: flash.flash_attention(q, k, v, s, causal)[0]  # noqa: E731
        wanted = lambda q, k, v, s=scale: reference.attention(q, k, v, s, causal)[0]  # noqa: E731
        tensors = case(*shape, dtype)
        got, want = both(kernel, wanted, tensors)
        if shape[:5] == (1,) * 5:  # softmax of one score: dq = dk = 0, the difference of equal numbers
            assert got[1].abs().max() < 1e-2 and got[2].abs().max() < 1e-2
            got, want = [got[0], got[3]], [want[0], want[3]]
        close(got, want, dtype, factor=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tensor_cores_over_several_tiles_of_queries_and_keys(dtype):
    """Rounding of P alone tells it from fp64: half a unit in the last place of the largest weight of a row."""
    library = operators.library("flash_attention", "emulated")
    for causal, (b, a, g, n, m, d) in [
        (False, (1, 1, 1, 20, 70, 64)),
        (True, (1, 4, 2, 130, 150, 32)),
        (False, (2, 2, 1, 65, 200, 40)),
    ]:
        q, k, v = case(b, a, g, n, m, d, dtype)
        results = []
        for order in (0, 7):
            library.order(order)
            results.append(flash.flash_attention(q, k, v, 0.3, causal))
        library.order(0)
        results.append(flash.flash_attention(q, misaligned(k), misaligned(v), 0.3, causal))
        for other in results[1:]:
            assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True)), (
                "order and addresses change nothing"
            )
        out, lse = reference.attention(q.double(), k.double(), v.double(), 0.3, causal)
        close([results[0][1]], [lse], torch.float32)
        close([results[0][0]], [out], dtype, factor=1)
    broken = k.clone()
    broken[0, 0, 100, 3] = torch.nan
    out, _ = flash.flash_attention(q, broken, v, 0.3, True)
    assert out[0].isnan().all(-1).sum(-1).tolist() == [n - max(0, 100 - (m - n))] * a and out[1].isfinite().all()


def test_torchs_own_attention_and_its_lse():
    q, k, v = case(1, 4, 4, 64, 64, 16, torch.float32)
    out, lse = flash.flash_attention(q, k, v, 0.25, True)
    close([out], [F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)], torch.float32)
    close([lse], [reference.attention(q.double(), k.double(), v.double(), 0.25)[1]], torch.float32)


def test_queries_that_see_nothing():
    q, k, v = (t.requires_grad_() for t in case(1, 1, 1, 40, 4, 8, torch.float32))
    out, lse = flash.flash_attention(q, k, v, 0.3, True)
    grads = torch.autograd.grad(out, [q, k, v], torch.ones_like(out))
    assert (out[0, 0, :36] == 0).all() and (lse[0, 0, :36] == -torch.inf).all() and lse[0, 0, 36:].isfinite().all()
    assert (grads[0][0, 0, :36] == 0).all() and all(g.isfinite().all() for g in grads)


def test_large_scores_strides_and_numbers_that_are_not_finite():
    q, k, v = case(1, 2, 2, 40, 40, 8, torch.float32)
    out, _ = flash.flash_attention(1e3 * q, 1e3 * k, v, 1.0, True)
    assert out.isfinite().all()
    packed = random(40, 1, 6, 8).permute(1, 2, 0, 3)
    views = packed[:, 0:2], packed[:, 2:4], packed[:, 4:6]
    want = reference.attention(*(t.double() for t in views), 0.5)[0]
    close([flash.flash_attention(*views, 0.5)[0]], [want], torch.float32)
    k[0, 0, 20, 3] = torch.nan
    out, _ = flash.flash_attention(q, k, v, 1.0, True)
    assert out[0, 0, 20:].isnan().all() and out[0, 0, :20].isfinite().all() and out[0, 1].isfinite().all()
