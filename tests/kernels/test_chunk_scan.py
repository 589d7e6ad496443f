"""Mamba-2 within chunks: against the formula in fp64, with documents, and in the layer."""

from __future__ import annotations

import pytest
import torch

from minimegatron.errors import ConfigError
from minimegatron.kernels import chunk_scan, operators, reference
from minimegatron.layers.ssm.scan import Scan
from tests.kernels.compare import both, close, random


def inputs(m: int, length: int, heads: int, groups: int, p: int, dtype: torch.dtype) -> list[torch.Tensor]:
    logs = -random(m, heads, length, seed=1, dtype=dtype).abs().cumsum(-1)
    return [random(m, groups, length, length, dtype=dtype), logs, random(m, length, heads, p, seed=2, dtype=dtype)]


def ids(m: int, length: int) -> torch.Tensor:
    return (torch.rand(m, length, generator=torch.Generator().manual_seed(3)) < 0.2).cumsum(1)


@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 1, 1), (2, 5, 4, 2, 3), (1, 32, 2, 1, 32), (2, 33, 2, 2, 40), (1, 100, 3, 1, 65)]
)
def test_values_and_gradients_are_the_formulas(sizes):
    for dtype in (torch.float64, torch.float32):
        for documents in (None, ids(*sizes[:2])):
            compare = [lambda *t, of=of, d=documents: of.chunk_scan(*t, d) for of in (chunk_scan, reference)]
            # logs gather the products of a chunk and lose them again
            close(*both(*compare, inputs(*sizes, dtype)), dtype, factor=4)


def test_what_is_above_the_diagonal_is_not_read_and_no_fading_overflows():
    scores, logs, x = inputs(1, 40, 2, 1, 8, torch.float32)
    scores[..., *torch.triu_indices(40, 40, 1)] = torch.nan
    logs *= 100
    y = chunk_scan.chunk_scan(scores, logs, x)
    assert y.isfinite().all()
    torch.testing.assert_close(y[0, 0, :, :], scores[0, 0, 0, 0] * x[0, 0])


def test_any_order_of_threads():
    given = inputs(1, 70, 2, 2, 40, torch.float32)
    library, found = operators.library("chunk_scan", "emulated"), []
    for order in (0, 1, 7):
        library.order(order)
        try:
            tensors = [t.clone().requires_grad_() for t in given]
            y = chunk_scan.chunk_scan(*tensors)
            found.append([y.detach(), *torch.autograd.grad(y.square().sum(), tensors)])
        finally:
            library.order(0)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(other, found[0], strict=True))


@pytest.mark.parametrize("documents", [False, True])
def test_the_layers_scan_is_the_same_by_the_kernel(documents):
    s, b, heads, p, groups, n = 50, 2, 4, 6, 2, 5  # the last chunk of 16 is not full
    x, B, C = random(s, b, heads, p), random(s, b, groups, n, seed=1), random(s, b, groups, n, seed=2)
    dt = random(s, b, heads, seed=3).abs()
    segments = ids(b, s + 1) if documents else None
    results = []
    for kernels in ("torch", "emulated"):
        given = [t.clone().requires_grad_() for t in (x, dt, -dt, B, C)]
        y, state = Scan(*given, 16, segments, kernels=kernels).outputs()
        results.append([y.detach(), state.detach(), *torch.autograd.grad([y.square().sum(), state.sum()], given)])
    close(results[1], results[0], torch.float32, factor=4)


def test_what_does_not_fit_is_refused():
    scores, logs, x = inputs(2, 5, 4, 2, 3, torch.float32)
    for given, message in (
        ((scores, logs, x.bfloat16()), "in fp32 or fp64"),
        ((scores[:, :1].expand(2, 3, 5, 5), logs, x), "groups divide the heads"),
        ((scores, logs[:, :1], x), "logs is"),
        ((scores.double(), logs, x), "scores is"),
        ((scores, logs, x, torch.zeros(2, 4, dtype=torch.int64)), "documents is"),
        ((scores, logs, x, torch.zeros(2, 5)), "documents are"),
    ):
        with pytest.raises(ConfigError, match=message):
            chunk_scan.chunk_scan(*given)
