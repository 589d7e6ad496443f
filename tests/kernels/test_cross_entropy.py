"""Cross entropy kernels: one rank against torch, several ranks' columns put together against the whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from minimegatron.comm.axis import ALONE
from minimegatron.kernels import cross_entropy, operators, reference
from minimegatron.layers.loss import vocab_parallel_cross_entropy
from tests.kernels.compare import DTYPES, SIZES, both, close, misaligned, random

BY = pytest.mark.parametrize("native", [False, True], ids=["emulated", "native"])


@BY
@pytest.mark.parametrize("v", SIZES)
def test_equals_torch(v, native):
    known = operators.CPU_DTYPES if native else DTYPES
    for dtype in known if v == 33 else (torch.float64, torch.bfloat16):
        n = 5 if v < 100 else 2
        target = torch.randint(0, v, (n,), generator=torch.Generator().manual_seed(1))
        logits = random(n, v, dtype=dtype, scale=3.0)
        kernel = lambda z, t=target: cross_entropy.cross_entropy(z, t, native)  # noqa: E731
        wanted = lambda z, t=target: F.cross_entropy(z, t, reduction="none")  # noqa: E731
        got, want = both(kernel, wanted, [logits])
        assert got[0].dtype == torch.promote_types(dtype, torch.float32)
        close(got[:1], want[:1], got[0].dtype)
        close(got[1:], want[1:], dtype)


@BY
@pytest.mark.parametrize("width, total", [(8, 32), (9, 33), (16, 50), (24, 50)])
def test_a_cut_vocabulary(width, total, native):
    """Four ranks, the last of them with padding: statistics put together, gradients side by side."""
    n = 12
    for dtype in (torch.float64, torch.bfloat16):
        whole = random(n, 4 * width, dtype=dtype, scale=3.0)
        edges = [0, width - 1, width, 2 * width - 1, min(total, 2 * width), total - 1]
        target = torch.tensor([min(t, total - 1) for t in edges * 2])
        parts = [
            (whole[:, r * width : (r + 1) * width].contiguous(), r * width, max(0, min(width, total - r * width)))
            for r in range(4)
        ]
        found = [cross_entropy.statistics(z, target, first, real, native) for z, first, real in parts]
        for (z, first, real), got in zip(parts, found, strict=True):
            want = reference.cross_entropy_statistics(z.double(), target, first, real)
            keep = [i for i in range(4) if not (i == 0 and real == 0)]
            close([got[i] for i in keep], [want[i] for i in keep], got[0].dtype, factor=4)
        top = torch.stack([m for m, *_ in found]).amax(0)
        lse = top + torch.stack([(m - top).exp() * s for m, s, *_ in found]).sum(0).log()
        loss = lse - torch.stack([p for _, _, p, _ in found]).sum(0)
        real_logits = whole[:, :total].double().requires_grad_()
        want = F.cross_entropy(real_logits, target, reduction="none")
        close([loss], [want], loss.dtype, factor=4)
        dloss = random(n, seed=8, dtype=loss.dtype)
        (dwant,) = torch.autograd.grad(want, real_logits, dloss.double())
        grads = [cross_entropy.gradient(z, target, lse, dloss, first, real, native=native) for z, first, real in parts]
        got = torch.cat(grads, 1)
        close([got[:, :total]], [dwant], dtype)
        assert (got[:, total:] == 0).all()


@BY
def test_label_smoothing_terms(native):
    z, target = random(4, 10, dtype=torch.float64), torch.tensor([0, 3, 9, 3])
    eps = 0.1 * 10 / 9
    zg = z.clone().requires_grad_()
    logp = zg.log_softmax(-1)
    ((1 - eps) * F.nll_loss(logp, target, reduction="none") - eps * logp.mean(-1)).sum().backward()
    dloss = torch.ones(4).double()
    got = cross_entropy.gradient(z, target, z.logsumexp(-1), dloss, 0, 10, 1 - eps, eps / 10, native)
    close([got], [zg.grad], torch.float64)


@BY
def test_extreme_logits(native):
    z = torch.tensor([[1e4, -1e4, 0.0], [-torch.inf, 2.0, 2.0]])
    assert cross_entropy.cross_entropy(z, torch.tensor([0, 1]), native).tolist() == pytest.approx(
        [0.0, 0.693147], abs=1e-6
    )
    z[0, 1] = torch.nan
    loss = cross_entropy.cross_entropy(z, torch.tensor([0, 1]), native)
    assert loss[0].isnan() and loss[1].isfinite()


@BY
def test_strides_misaligned_memory_and_empty(native):
    z, target = random(6, 64), torch.tensor([1, 5, 9])
    for view in (z[::2], misaligned(z[::2].contiguous()), z[::2, ::2]):
        want = F.cross_entropy(view.double(), target, reduction="none")
        close([cross_entropy.cross_entropy(view, target, native)], [want], torch.float32)
    assert cross_entropy.cross_entropy(torch.empty(0, 7), torch.empty(0, dtype=torch.int64), native).shape == (0,)


def test_the_gradient_takes_the_logits_place_where_nobody_else_reads_them():
    target = torch.tensor([[1, 4, 0], [2, 2, 6]])

    def gradient(over, **backward):
        leaf = random(2, 3, 7).requires_grad_()
        logits = leaf * 2
        before = logits.detach().clone()
        vocab_parallel_cross_entropy(logits, target, ALONE, kernels="auto", over=over).sum().backward(**backward)
        return leaf.grad, torch.equal(logits, before)

    (plain, kept), (same, gone) = gradient(False), gradient(True)
    again, whole = gradient(True, retain_graph=True)
    assert kept and not gone and whole and torch.equal(plain, same) and torch.equal(plain, again)
