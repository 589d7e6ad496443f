"""Biases of relative positions beside transformers', and queries that see no key."""

from __future__ import annotations

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.layers.attention.relative import (
    BiasedMask,
    Buckets,
    CrossMask,
    RelativeAttention,
    relative_position_bucket,
)
from minimegatron.models.families import family_config


@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_are_those_of_transformers(bidirectional):
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = torch.arange(-1100, 1101)
    for buckets, far in ((32, 128), (8, 20), (4, 3), (64, 1000)):
        want = T5Attention._relative_position_bucket(distance, bidirectional, buckets, far)
        found = relative_position_bucket(distance, bidirectional, buckets, far)
        assert found.tolist() == want.tolist() and found.max() == (buckets - 1)


def test_the_square_of_biases_is_one_look_up_a_distance():
    table = torch.randn(8, 3, dtype=torch.float64, requires_grad=True)
    buckets, s = Buckets(table, True, 20), 9
    place = torch.arange(s)
    want = buckets.at(place - place[:, None]).permute(2, 0, 1)[None]
    weights = torch.randn_like(want)
    grads = [torch.autograd.grad((square * weights).sum(), table)[0] for square in (buckets.square(s), want)]
    assert torch.equal(buckets.square(s), want) and torch.allclose(*grads, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cross", [True, False])
def test_both_programs_agree_and_what_sees_nothing_is_zero(cross):
    def core(backend: str) -> RelativeAttention:
        sizes = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 9}
        return RelativeAttention(family_config("t5", attention_backend=backend, **sizes), Mesh.serial())

    torch.manual_seed(0)
    n, m, b = 5, 7 if cross else 5, 2
    q, k, v = (torch.randn(length, b, 2, 8, dtype=torch.float64, requires_grad=True) for length in (n, m, m))
    table = torch.randn(32, 2, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[0, 0, 1, 2, 2], [0, 0, 0, 0, 0]])  # the first row's document 1 has no source
    masks = {
        True: CrossMask(document_ids=ids, source_ids=torch.tensor([[0, 0, 2, 2, 2, 5, 5], [0] * 6 + [5]])),
        False: BiasedMask(document_ids=ids, buckets=Buckets(table, False, 128)),
    }
    outs, grads = [], []
    for backend in ("auto", "reference"):
        out = core(backend)(q, k, v, masks[cross])
        wanted = (q, k, v) if cross else (q, k, v, table)
        grads.append(torch.autograd.grad(out.square().sum(), wanted, retain_graph=True))
        outs.append(out)
    assert torch.allclose(*outs, rtol=0, atol=1e-12)
    for one, other in zip(*grads, strict=True):
        assert torch.isfinite(one).all() and torch.allclose(one, other, rtol=0, atol=1e-12)
    if cross:
        assert not outs[0][2, 0].any() and outs[0][1:2].all()
