"""RoPE for longer contexts and for images, against Hugging Face's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig, TransformerConfig
from minimegatron.errors import ConfigError
from minimegatron.kernels import ops
from minimegatron.layers.rope import RotaryEmbedding, attention_factor, inverse_frequencies
from minimegatron.models.decoder import GPTModel, build_model


def ours(**fields: Any) -> TransformerConfig:
    base = {"hidden_size": 64, "num_attention_heads": 2, "kv_channels": 64, "position_embedding_type": "rope"}
    return TransformerConfig(**{**base, **fields})


YARN: dict[str, dict[str, Any]] = {
    "plain": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "betas": {"factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 16.0, "beta_slow": 2.0},
    "deepseek": {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 0.7},
    "not rounded": {"factor": 8.0, "original_max_position_embeddings": 512, "truncate": False},
    "short": {"factor": 2.0, "original_max_position_embeddings": 4},
}
NAMES = {
    "factor": "rope_scaling_factor",
    "original_max_position_embeddings": "rope_scaling_original_max_position_embeddings",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
    "mscale": "yarn_mscale",
    "mscale_all_dim": "yarn_mscale_all_dim",
    "truncate": "yarn_correction_range_round_to_int",
}


@pytest.mark.parametrize("base", [10000.0, 1e6])
@pytest.mark.parametrize("name", YARN)
def test_yarn_is_bit_equal_to_hugging_face(name, base):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {"rope_type": "yarn", "rope_theta": base, **YARN[name]}
    hf = LlamaConfig(hidden_size=128, num_attention_heads=2, head_dim=64, rope_parameters=scaling)
    theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](hf, "cpu")
    config = ours(rope_scaling_type="yarn", rotary_base=base, **{NAMES[k]: v for k, v in YARN[name].items()})
    assert torch.equal(inverse_frequencies(config), theirs)
    assert attention_factor(config) == factor
    cos, sin = RotaryEmbedding(config)(torch.tensor([[0, 5, 100_000]]))
    angle = torch.tensor([0.0, 5.0, 100_000.0])[:, None] * theirs
    assert torch.equal(cos[:, 0, 0], angle.cos() * factor) and torch.equal(sin[:, 0, 0], angle.sin() * factor)


def three_positions() -> torch.Tensor:
    return torch.randint(0, 50, (3, 2, 7), generator=torch.Generator().manual_seed(0))


def turned_by_ours(config: TransformerConfig, q: torch.Tensor) -> torch.Tensor:
    cos, sin = RotaryEmbedding(config)(three_positions())
    return ops.rope(q.permute(2, 0, 1, 3), cos, sin).permute(1, 2, 0, 3)


def test_mrope_is_that_of_qwen2_vl():
    from transformers.models.qwen2_vl import modeling_qwen2_vl as hf
    from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig

    q = torch.randn(2, 3, 7, 64, generator=torch.Generator().manual_seed(1))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    sizes: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 2, "rope_parameters": rope}
    cos, sin = hf.Qwen2VLRotaryEmbedding(Qwen2VLTextConfig(**sizes))(q, three_positions())
    theirs, _ = hf.apply_rotary_pos_emb(q, q, cos, sin)
    config = ours(position_embedding_type="mrope", mrope_section=(8, 12, 12))
    torch.testing.assert_close(turned_by_ours(config, q), theirs, rtol=0, atol=1e-6)


def test_interleaved_mrope_is_that_of_qwen3_vl():
    from transformers.models.qwen3_vl import modeling_qwen3_vl as hf
    from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig

    q = torch.randn(2, 3, 7, 64, generator=torch.Generator().manual_seed(1))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [12, 10, 10]}
    sizes: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 64, "rope_parameters": rope}
    cos, sin = hf.Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(**sizes))(q, three_positions())
    theirs, _ = hf.apply_rotary_pos_emb(q, q, cos, sin)
    config = ours(position_embedding_type="mrope", mrope_section=(12, 10, 10), mrope_interleaved=True)
    torch.testing.assert_close(turned_by_ours(config, q), theirs, rtol=0, atol=1e-6)


def test_mrope_on_text_is_rope():
    text = torch.arange(7).expand(2, 7)
    for a, b in zip(
        RotaryEmbedding(ours(position_embedding_type="mrope", mrope_section=(8, 12, 12)))(text),
        RotaryEmbedding(ours())(text),
        strict=True,
    ):
        assert torch.equal(a, b)


def test_sections_that_do_not_fill_a_head_are_refused():
    for section in (None, (16, 16), (8, 12, 13)):
        with pytest.raises(ConfigError, match="whose sum is the 32 pairs"):
            ours(position_embedding_type="mrope", mrope_section=section)
    with pytest.raises(ConfigError, match="without position_embedding_type mrope"):
        ours(mrope_section=(8, 12, 12))


def mrope_logits(rank: int, world: int) -> torch.Tensor:
    config = ours(position_embedding_type="mrope", mrope_section=(8, 12, 12), vocab_size=32)
    parallel = ParallelConfig(context_parallel_size=world)
    model: GPTModel = build_model(config, Mesh.build(parallel), seed=0)
    positions = torch.randint(0, 9, (3, 1, 16), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return model.full_logits(torch.arange(16)[None], positions)


def test_three_positions_are_cut_over_cp(ranks):
    torch.testing.assert_close(ranks(2).run(mrope_logits)[1], mrope_logits(0, 1), rtol=0, atol=1e-5)
