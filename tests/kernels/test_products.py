"""Products are torch's, whichever library computes them, and the same numbers with and without gradients."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from minimegatron.comm.axis import ALONE
from minimegatron.kernels import ops, products
from minimegatron.layers.linear import LinearFunction
from tests.kernels.compare import close, random


@pytest.fixture(params=[False, True], ids=["mkl", "onednn"])
def onednn(request, monkeypatch):
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("torch has no oneDNN here")
    monkeypatch.setattr(products, "onednn_is_faster", lambda: request.param)
    return request.param


@pytest.mark.parametrize("rows, i, o", [(1, 3, 5), (7, 64, 33), (40, 100, 16)])
@pytest.mark.parametrize("biased", [False, True])
def test_both_products_are_torchs(onednn, rows, i, o, biased):
    wide = random(rows, 2, 2 * i, dtype=torch.float64), random(o, i, seed=1, dtype=torch.float64)
    x, weight = wide[0][..., ::2].float(), wide[1].float()
    bias = random(o, seed=2) if biased else None
    want = wide[0][..., ::2] @ wide[1].t() + (0 if bias is None else bias.double())
    close([products.linear(x, weight, bias)], [want], torch.float32)
    strided = wide[0].float()[..., ::2]
    close([products.linear(strided, weight, bias)], [want], torch.float32)
    dy = random(2, rows, o, seed=3).transpose(0, 1)
    close([products.dgrad(dy, weight)], [dy.double() @ wide[1]], torch.float32)


def test_no_rows(onednn):
    weight = random(3, 4)
    assert products.linear(torch.empty(0, 2, 4), weight).shape == (0, 2, 3)
    assert products.dgrad(torch.empty(0, 3), weight).shape == (0, 4)


def test_what_is_computed_again_is_the_same_number(onednn):
    x, weight = random(32, 2, 64), torch.nn.Parameter(random(48, 64, seed=1))
    with torch.no_grad():
        before = ops.linear(x, weight)
    again = LinearFunction.apply(x.requires_grad_(), weight, None, ALONE, False)
    assert torch.equal(before, again)


def test_other_dtypes_and_fake_tensors_are_torchs(monkeypatch):
    monkeypatch.setattr(products, "onednn_is_faster", lambda: True)
    x, weight = random(4, 8, dtype=torch.float64), random(3, 8, dtype=torch.float64)
    assert torch.equal(products.linear(x, weight), x @ weight.t())
    with FakeTensorMode():
        assert products.dgrad(torch.empty(4, 3), torch.empty(3, 8)).shape == (4, 8)
