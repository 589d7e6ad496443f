"""The two core attentions, masks, and where each head lives."""

from __future__ import annotations

import pytest
import torch

from minimegatron.comm.mesh import Axis, Mesh
from minimegatron.config import TransformerConfig
from minimegatron.kernels import ops
from minimegatron.layers.attention.mask import AttentionMask
from minimegatron.layers.attention.self_attention import AttentionContext, CoreAttention, SelfAttention
from minimegatron.layers.logical import initialize
from minimegatron.layers.rope import RotaryEmbedding


def make(**fields) -> TransformerConfig:
    base = {"hidden_size": 24, "num_attention_heads": 4, "num_query_groups": 2, "kv_channels": 6}
    return TransformerConfig(**{**base, **fields})


def qkv(s=9, b=2, a=4, g=2, d=6):
    gen = torch.Generator().manual_seed(0)
    return [torch.randn(s, b, n, d, generator=gen, dtype=torch.float64, requires_grad=True) for n in (a, g, g)]


DOCS = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0, 1, 1, 1, 2, 2, 3, 3, 3]])


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("documents", [None, DOCS], ids=["whole", "packed"])
def test_backends_equal_the_formula(window, documents, causal):
    mask = AttentionMask(causal, window, documents)
    results = []
    for backend in ("reference", "sdpa", "local"):
        inputs = qkv()
        out = CoreAttention(make(attention_backend=backend), Mesh.serial())(*inputs, mask)
        out.square().sum().backward()
        results.append([out.detach(), *(t.grad for t in inputs)])
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "local"])
def test_another_document_has_no_influence(backend):
    core = CoreAttention(make(attention_backend=backend), Mesh.serial())
    q, k, v = (t.detach() for t in qkv(b=1))
    mask = AttentionMask(document_ids=DOCS[:1])
    before = core(q, k, v, mask)
    k[:3], v[:3] = 99.0, -99.0  # document 0
    after = core(q, k, v, mask)
    assert torch.equal(before[3:], after[3:]) and not torch.equal(before[:3], after[:3])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("percent", [1.0, 0.5])
def test_rope_depends_on_the_distance_only(interleaved, percent):
    config = make(kv_channels=8, position_embedding_type="rope", rotary_percent=percent, rotary_interleaved=interleaved)
    rotary = RotaryEmbedding(config)
    q, k = (t.detach() for t in qkv(a=1, g=1, d=8)[:2])

    def scores(shift):
        angles = [t.double() for t in rotary(torch.arange(9).expand(2, 9) + shift)]
        a, b = (ops.rope(t, *angles, interleaved) for t in (q, k))
        return torch.einsum("sbhd,tbhd->bst", a, b)

    torch.testing.assert_close(scores(0), scores(37), rtol=0, atol=2e-5)
    assert (scores(0) - torch.einsum("sbhd,tbhd->bst", q, k)).abs().max() > 0.1


def test_the_two_rope_layouts_are_a_permutation_of_channels():
    angles = RotaryEmbedding(make(kv_channels=8, position_embedding_type="rope"))(torch.arange(9).expand(2, 9))
    x = qkv(d=8)[0].detach().float()
    halves_to_pairs = torch.arange(8).view(2, 4).t().flatten()
    halves = ops.rope(x, *angles)
    pairs = ops.rope(x[..., halves_to_pairs], *angles, interleaved=True)
    torch.testing.assert_close(pairs, halves[..., halves_to_pairs])


@pytest.mark.parametrize("groups,tp", [(4, 2), (2, 4), (1, 4), (1, 2), (4, 4)])
def test_each_rank_projects_its_own_heads(groups, tp, monkeypatch):
    """With the weights set so that row i yields i, a rank's q, k, v name the rows it used."""
    config = make(num_query_groups=groups, add_bias_linear=False, kv_channels=4, hidden_size=16)
    rows = (4 + 2 * groups) * 4
    per_group = 4 // groups
    for r in range(tp):
        axis = Axis("tp", tuple(range(tp)), r)
        mesh = Mesh.serial()
        mesh.tp = axis
        attention = SelfAttention(config, mesh)
        attention.linear_qkv.gather_output = False
        layout = attention.linear_qkv.weight.param_layout
        names = torch.arange(float(rows))
        packed = names if groups < tp else layout.take(names[:, None])[:, 0]
        monkeypatch.setattr(attention.linear_qkv, "forward", lambda x, packed=packed: packed.view(1, 1, -1))
        q, k, v = (t.flatten().tolist() for t in attention.project(torch.zeros(1, 1, 16)))
        heads = range(r * 4 // tp, (r + 1) * 4 // tp)
        row = lambda group, slot: [(group * (per_group + 2) + slot) * 4 + c for c in range(4)]  # noqa: E731
        mine = sorted({h // per_group for h in heads})
        assert q == [x for h in heads for x in row(h // per_group, h % per_group)]
        assert k == [x for g in mine for x in row(g, per_group)]
        assert v == [x for g in mine for x in row(g, per_group + 1)]


def test_selective_recompute_is_bit_equal_and_keeps_less():
    def run(granularity):
        config = make(recompute_granularity=granularity, attention_backend="reference")
        attention = SelfAttention(config, Mesh.serial())
        initialize(attention, 0)
        x = torch.randn(16, 2, 24, generator=torch.Generator().manual_seed(1), requires_grad=True)
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            out = attention(x, AttentionContext())
        out.square().sum().backward()
        return [out.detach(), x.grad, *(p.grad for p in attention.parameters())], sum(kept)

    plain, kept_plain = run(None)
    again, kept_again = run("selective")
    assert all(torch.equal(a, b) for a, b in zip(plain, again, strict=True))
    assert kept_again < kept_plain / 2
