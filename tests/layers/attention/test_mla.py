"""Multi-latent attention: absorbed equals naive, the cache's bytes, and the same gradients in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import TransformerConfig
from minimegatron.errors import ConfigError
from minimegatron.inference.paged_cache import PagedCache
from minimegatron.layers.attention.mla import MultiLatentAttention
from minimegatron.layers.attention.self_attention import AttentionContext
from minimegatron.layers.logical import initialize
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.layers.rope import RotaryEmbedding
from tests.axes import CP, SP, TP
from tests.thorough import mostly_thorough
from tests.twin import Case

LATENT: dict[str, Any] = {
    "multi_latent_attention": True, "num_query_groups": 4, "kv_lora_rank": 12, "q_lora_rank": 10, "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 6, "v_head_dim": 10, "rotary_interleaved": True,
}  # fmt: skip
YARN = {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.8}


def config(**fields: Any) -> TransformerConfig:
    shared = {"position_embedding_type": "rope", "normalization": "RMSNorm", "add_bias_linear": False}
    return TransformerConfig(**{"hidden_size": 32, "init_method_std": 0.2, **shared, **LATENT, **fields})


@pytest.mark.parametrize("fields", [{}, {"q_lora_rank": None}, YARN], ids=str)
def test_absorbed_equals_naive(fields):
    model = config(**fields)
    attention = MultiLatentAttention(model, Mesh.serial())
    initialize(attention, 0)
    attention = attention.double().eval()
    s, b = 9, 2
    x = torch.randn(s, b, 32, dtype=torch.float64)
    cos, sin = RotaryEmbedding(model)(torch.arange(s).expand(b, s))
    context = AttentionContext((cos.double(), sin.double()))
    naive = attention(x, context)
    cache = PagedCache({0: attention.inference_state()}, 9, 3, 1, torch.float64, x.device)
    tables, found = [[7, 1, 4], [2, 8, 3]], []
    for begin, end in ((0, 5), (5, 8), (8, s)):  # a prompt, a chunk, one new token and all others from pages
        pages = cache.context([end - begin] * b, [begin] * b, tables, [0] * b)
        rotary = RotaryEmbedding(model)(pages.position_ids)
        row = x[begin:end].transpose(0, 1).reshape(-1, 1, 32)
        made = attention(row, AttentionContext(tuple(t.double() for t in rotary), inference=pages))
        found.append(made.view(b, end - begin, 32).transpose(0, 1))
    assert (torch.cat(found) - naive).abs().max() < 1e-12 < naive.abs().max()
    assert cache.nbytes == 9 * 3 * 8 * (model.kv_lora_rank + model.qk_pos_emb_head_dim) == 9 * 3 * 8 * 18


@pytest.mark.parametrize("double", mostly_thorough([True, False], [0]))
@pytest.mark.parametrize("layout", [{TP: 2}, {TP: 2, SP: True}, {TP: 4, SP: True}, {CP: 2}, {CP: 2, TP: 2}], ids=str)
def test_layouts(assert_same_as_serial, layout, double):
    assert_same_as_serial(Case(layout, LATENT, double=double))


@pytest.mark.parametrize("fields", mostly_thorough([{"q_lora_rank": None, "v_head_dim": 20}, YARN], [0]), ids=str)
def test_other_shapes(assert_same_as_serial, fields):
    again = {"recompute_granularity": "selective"}
    for layout in ({TP: 2, SP: True}, {CP: 2}):
        assert_same_as_serial(Case(layout, {**LATENT, **fields, **again}, double=True))


def test_down_projections_are_replicated_and_partial():
    attention = MultiLatentAttention(config(), Mesh.serial())
    partial = {name for name, p in logical_parameters(attention) if layout_of(p).partial == "sequence"}
    down = {"linear_q_down_proj.weight", "linear_kv_down_proj.weight", "q_layernorm.weight", "kv_layernorm.weight"}
    assert partial == down


@pytest.mark.parametrize(
    "fields, words",
    [
        ({"position_embedding_type": "none"}, "position_embedding_type=rope"),
        ({"qk_pos_emb_head_dim": 5}, "even"),
        ({"qk_layernorm": True}, "norms its latents"),
        ({"kv_lora_rank": 0}, "at least 1"),
    ],
    ids=str,
)
def test_what_is_no_latent_attention_is_refused(fields, words):
    with pytest.raises(ConfigError) as error:
        config(**fields)
    assert words in str(error.value)
