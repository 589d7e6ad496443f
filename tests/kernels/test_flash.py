"""The flash attention kernels against the formula in fp64 and torch's own attention."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.kernels import flash, operators, reference
from tests.kernels.compare import both, close, misaligned, random

BY = pytest.mark.parametrize("native", [False, True], ids=["emulated", "native"])


def case(b, a, g, n, m, d, dtype):
    return [random(b, h, s, d, dtype=dtype, seed=i) for i, (h, s) in enumerate([(a, n), (g, m), (g, m)])]


@BY
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 1, 1, 1), (2, 4, 2, 33, 33, 8), (1, 2, 1, 31, 32, 64), (1, 2, 2, 70, 70, 33), (1, 3, 1, 5, 100, 128)],
    ids=str,
)
def test_forward_and_backward(shape, causal, native):
    for dtype in (torch.float64, torch.bfloat16) if shape[3] != 33 else (torch.float64, torch.float32, torch.float16):
        if native and dtype not in operators.CPU_DTYPES:
            continue
        scale = shape[-1] ** -0.5
        kernel = lambda q, k, v, s=scale: flash.flash_attention(q, k, v, s, causal, native)[0]  # noqa: E731
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


BORDERS = st.sampled_from([1, 2, 5, 6, 7, 11, 12, 13, 31, 32, 33, 255, 256, 257, 300, 513])


@given(
    b=st.integers(1, 2),
    g=st.integers(1, 2),
    shared=st.integers(1, 3),
    n=BORDERS,
    m=BORDERS,
    d=st.sampled_from([1, 3, 8, 15, 16, 17, 32, 48, 100, 128]),
    causal=st.booleans(),
    packed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_a_cpus_kernel_at_the_borders_of_its_tiles(b, g, shared, n, m, d, causal, packed, seed):
    """In fp64 nothing but the order of sums differs from the formula; in fp32 vectors and powers are others."""
    m = n if packed else m
    heads = [random(s, b, h, d, dtype=torch.float64, seed=seed + h) for s, h in ((n, g * shared), (m, g), (m, g))]
    if packed:  # views of one projection, as in a layer
        q, k, v = torch.cat([t.unflatten(2, (g, -1)) for t in heads], 3).split([shared, 1, 1], 3)
        heads = [t.flatten(2, 3) if t.shape[3] > 1 else t.squeeze(3) for t in (q, k, v)]
    q, k, v = (t.permute(1, 2, 0, 3) for t in heads)
    kernel = lambda q, k, v: flash.flash_attention(q, k, v, d**-0.5, causal, True)  # noqa: E731
    wanted = lambda q, k, v: reference.attention(q, k, v, d**-0.5, causal)  # noqa: E731
    got, want = both(lambda *t: kernel(*t)[0], lambda *t: wanted(*t)[0], [q, k, v])
    top = max(t.abs().max() for t in want)  # of all: a gradient can be a small difference of large numbers
    assert all((x - y).abs().max() <= 1e-12 * max(top, 1e-3) for x, y in zip(got, want, strict=True))
    close([kernel(q, k, v)[1].exp()], [wanted(q, k, v)[1].exp()], torch.float64)  # 0 where nothing is seen
    got, want = both(lambda *t: kernel(*t)[0], lambda *t: wanted(*t)[0], [t.float() for t in (q, k, v)])
    top = max(t.abs().max() for t in want)  # of all, for the same reason
    assert all((x - y).abs().max() < 1e-5 * top for x, y in zip(got, want, strict=True))


def test_threads_share_the_work_and_not_the_sums():
    q, k, v = case(3, 4, 2, 300, 300, 32, torch.float32)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out, lse = flash.flash_attention(q, k, v, 0.2, True, True)
            results.append((out, lse, *flash.attention_backward(q, q, k, v, out, lse, 0.2, True, True)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(results[0], other, strict=True))


@BY
def test_torchs_own_attention_and_its_lse(native):
    q, k, v = case(1, 4, 4, 64, 64, 16, torch.float32)
    out, lse = flash.flash_attention(q, k, v, 0.25, True, native)
    close([out], [F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)], torch.float32)
    close([lse], [reference.attention(q.double(), k.double(), v.double(), 0.25)[1]], torch.float32)


@BY
def test_queries_that_see_nothing(native):
    q, k, v = (t.requires_grad_() for t in case(1, 1, 1, 40, 4, 8, torch.float32))
    out, lse = flash.flash_attention(q, k, v, 0.3, True, native)
    grads = torch.autograd.grad(out, [q, k, v], torch.ones_like(out))
    assert (out[0, 0, :36] == 0).all() and (lse[0, 0, :36] == -torch.inf).all() and lse[0, 0, 36:].isfinite().all()
    assert (grads[0][0, 0, :36] == 0).all() and all(g.isfinite().all() for g in grads)


@BY
def test_large_scores_strides_and_numbers_that_are_not_finite(native):
    q, k, v = case(1, 2, 2, 40, 40, 8, torch.float32)
    out, _ = flash.flash_attention(1e3 * q, 1e3 * k, v, 1.0, True, native)
    assert out.isfinite().all()
    packed = random(40, 1, 6, 8).permute(1, 2, 0, 3)
    views = packed[:, 0:2], packed[:, 2:4], packed[:, 4:6]
    want = reference.attention(*(t.double() for t in views), 0.5)[0]
    close([flash.flash_attention(*views, 0.5, True, native)[0]], [want], torch.float32)
    k[0, 0, 20, 3] = torch.nan
    out, _ = flash.flash_attention(q, k, v, 1.0, True, native)
    assert out[0, 0, 20:].isnan().all() and out[0, 0, :20].isfinite().all() and out[0, 1].isfinite().all()
