"""Families and sizes as data: what GPT-2, Llama, Mistral, Qwen, Mixtral and DeepSeek are, in one table each.

A *family* is what all its members share: norm, activation, positions, biases. A *preset* is a family and its sizes.
`--preset llama3-8b` on the command line starts from a preset; any other flag changes one of its fields.

Sources of the sizes: the model cards and `config.json` files published with the weights.
"""

from __future__ import annotations

from typing import Any

from minimegatron.config.model import TransformerConfig
from minimegatron.errors import ConfigError, did_you_mean

_LLAMA: dict[str, Any] = {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"normalization": "LayerNorm", "activation": "gelu_tanh", "position_embedding_type": "learned_absolute"},
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "sliding_window": 4096},
    "qwen2": {**_LLAMA, "add_qkv_bias": True, "rotary_base": 1_000_000.0},
    "qwen3": {**_LLAMA, "qk_layernorm": True, "rotary_base": 1_000_000.0, "layernorm_epsilon": 1e-6},
    "mixtral": {**_LLAMA, "rotary_base": 1_000_000.0, "num_experts": 8, "moe_router_topk": 2},
    "qwen2_moe": {
        **_LLAMA,
        "add_qkv_bias": True,
        "rotary_base": 1_000_000.0,
        "layernorm_epsilon": 1e-6,
        "num_experts": 60,
        "moe_router_topk": 4,
        "moe_router_pre_softmax": True,
        "moe_shared_expert_gate": True,
    },
    "qwen3_moe": {
        **_LLAMA,
        "qk_layernorm": True,
        "rotary_base": 1_000_000.0,
        "layernorm_epsilon": 1e-6,
        "num_experts": 128,
        "moe_router_topk": 8,
    },
    "deepseek_v3": {
        **_LLAMA,
        "multi_latent_attention": True,
        "rotary_interleaved": True,
        "layernorm_epsilon": 1e-6,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
}


def _sizes(layers: int, h: int, a: int, vocab: int, **more: Any) -> dict[str, Any]:
    return {"num_layers": layers, "hidden_size": h, "num_attention_heads": a, "vocab_size": vocab, **more}


_LLAMA3_ROPE = {
    "rotary_base": 500_000.0,
    "rope_scaling_type": "llama3",
    "rope_scaling_factor": 8.0,
    "max_position_embeddings": 131_072,
}

PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-124m": ("gpt2", _sizes(12, 768, 12, 50257)),
    "gpt2-355m": ("gpt2", _sizes(24, 1024, 16, 50257)),
    "gpt3-175b": ("gpt2", _sizes(96, 12288, 96, 50257, max_position_embeddings=2048)),
    "llama2-7b": ("llama", _sizes(32, 4096, 32, 32000, ffn_hidden_size=11008, max_position_embeddings=4096)),
    "llama2-70b": (
        "llama",
        _sizes(80, 8192, 64, 32000, num_query_groups=8, ffn_hidden_size=28672, max_position_embeddings=4096),
    ),
    "llama3-8b": ("llama", _sizes(32, 4096, 32, 128256, num_query_groups=8, ffn_hidden_size=14336, **_LLAMA3_ROPE)),
    "llama3-70b": ("llama", _sizes(80, 8192, 64, 128256, num_query_groups=8, ffn_hidden_size=28672, **_LLAMA3_ROPE)),
    "llama3-405b": (
        "llama",
        _sizes(126, 16384, 128, 128256, num_query_groups=8, ffn_hidden_size=53248, **_LLAMA3_ROPE),
    ),
    "mistral-7b": (
        "mistral",
        _sizes(32, 4096, 32, 32000, num_query_groups=8, ffn_hidden_size=14336, max_position_embeddings=32768),
    ),
    "qwen2.5-0.5b": (
        "qwen2",
        _sizes(
            24,
            896,
            14,
            151936,
            num_query_groups=2,
            ffn_hidden_size=4864,
            layernorm_epsilon=1e-6,
            untie_embeddings_and_output_weights=False,
            max_position_embeddings=32768,
        ),
    ),
    "qwen2.5-7b": (
        "qwen2",
        _sizes(
            28,
            3584,
            28,
            152064,
            num_query_groups=4,
            ffn_hidden_size=18944,
            layernorm_epsilon=1e-6,
            max_position_embeddings=131072,
        ),
    ),
    "qwen3-0.6b": (
        "qwen3",
        _sizes(
            28,
            1024,
            16,
            151936,
            num_query_groups=8,
            kv_channels=128,
            ffn_hidden_size=3072,
            untie_embeddings_and_output_weights=False,
            max_position_embeddings=40960,
        ),
    ),
    "qwen3-8b": (
        "qwen3",
        _sizes(
            36,
            4096,
            32,
            151936,
            num_query_groups=8,
            kv_channels=128,
            ffn_hidden_size=12288,
            max_position_embeddings=40960,
        ),
    ),
    "mixtral-8x7b": (
        "mixtral",
        _sizes(32, 4096, 32, 32000, num_query_groups=8, ffn_hidden_size=14336, max_position_embeddings=32768),
    ),
    "mixtral-8x22b": (
        "mixtral",
        _sizes(56, 6144, 48, 32000, num_query_groups=8, ffn_hidden_size=16384, max_position_embeddings=65536),
    ),
    "qwen1.5-moe-a2.7b": (
        "qwen2_moe",
        _sizes(
            24,
            2048,
            16,
            151936,
            ffn_hidden_size=5632,
            moe_ffn_hidden_size=1408,
            moe_shared_expert_intermediate_size=5632,
            max_position_embeddings=8192,
        ),
    ),
    "qwen3-30b-a3b": (
        "qwen3_moe",
        _sizes(
            48,
            2048,
            32,
            151936,
            num_query_groups=4,
            kv_channels=128,
            ffn_hidden_size=6144,
            moe_ffn_hidden_size=768,
            max_position_embeddings=40960,
        ),
    ),
    "qwen3-235b-a22b": (
        "qwen3_moe",
        _sizes(
            94,
            4096,
            64,
            151936,
            num_query_groups=4,
            kv_channels=128,
            ffn_hidden_size=12288,
            moe_ffn_hidden_size=1536,
            max_position_embeddings=40960,
        ),
    ),
    "deepseek-v3": (
        "deepseek_v3",
        _sizes(
            61,
            7168,
            128,
            129280,
            ffn_hidden_size=18432,
            q_lora_rank=1536,
            kv_lora_rank=512,
            num_experts=256,
            moe_layer_freq="([0]*3+[1]*58)",
            moe_ffn_hidden_size=2048,
            moe_shared_expert_intermediate_size=2048,
            moe_router_topk=8,
            moe_router_num_groups=8,
            moe_router_group_topk=4,
            moe_router_topk_scaling_factor=2.5,
            rope_scaling_type="yarn",
            rope_scaling_factor=40.0,
            rope_scaling_original_max_position_embeddings=4096,
            yarn_mscale=1.0,
            yarn_mscale_all_dim=1.0,
            max_position_embeddings=163840,
        ),
    ),
    # Small enough for a laptop: 8.9 M parameters with an 8 k vocabulary.
    "laptop-10m": (
        "llama",
        _sizes(6, 256, 8, 8192, num_query_groups=4, ffn_hidden_size=768, max_position_embeddings=1024),
    ),
}


def preset(name: str) -> dict[str, Any]:
    """The fields of `TransformerConfig` that a preset sets.

    Raises:
        ConfigError: there is none with this name.
    """
    if name not in PRESETS:
        raise ConfigError(
            f"there is no preset {name!r}", fix=did_you_mean(name, PRESETS) or f"choose among {', '.join(PRESETS)}"
        )
    family, sizes = PRESETS[name]
    return {**FAMILIES[family], **sizes}


def family_config(family: str, **sizes: Any) -> TransformerConfig:
    """A `TransformerConfig` of a family with these sizes.

    Raises:
        ConfigError: unknown family, or the sizes do not make a model.
    """
    if family not in FAMILIES:
        raise ConfigError(
            f"there is no family {family!r}",
            fix=did_you_mean(family, FAMILIES) or f"choose among {', '.join(FAMILIES)}",
        )
    return TransformerConfig.from_dict({**FAMILIES[family], **sizes})


def count_parameters(config: TransformerConfig, active: bool = False) -> int:
    """Parameters of the logical model, padding of the vocabulary not counted.

    Args:
        config: the model.
        active: of the experts count only the k that a token passes.
    """
    h, layers = config.hidden_size, config.num_layers
    norm = h * (2 if config.normalization == "LayerNorm" else 1)
    with_experts = sum(config.expert_layers)
    layer = 2 * norm + (_latent_attention(config) if config.multi_latent_attention else _attention(config))
    depths = config.mtp_num_layers or 0  # each a layer like the last, three more norms and the projection
    tail = depths * (layer + 3 * norm + 2 * h * h)
    layers, with_experts = layers + depths, with_experts + depths * config.has_experts(layers)
    mlps = (layers - with_experts) * _mlp(config, config.ffn_hidden_size) + with_experts * _experts(config, active)
    tables = config.vocab_size * h * (2 if config.untie_embeddings_and_output_weights else 1)
    if config.position_embedding_type == "learned_absolute":
        tables += config.max_position_embeddings * h
    return config.num_layers * layer + tail + mlps + norm + tables


def _attention(config: TransformerConfig) -> int:
    h, d = config.hidden_size, config.kv_channels
    a, rows = config.num_attention_heads, (config.num_attention_heads + 2 * config.num_query_groups) * d
    count = h * rows + a * d * h
    count += rows if config.add_bias_linear or config.add_qkv_bias else 0
    count += h if config.add_bias_linear else 0
    return count + (2 * d * (2 if config.normalization == "LayerNorm" else 1) if config.qk_layernorm else 0)


def _latent_attention(config: TransformerConfig) -> int:
    h, a, d, r = config.hidden_size, config.num_attention_heads, config.kv_channels, config.kv_lora_rank
    per_norm = 2 if config.normalization == "LayerNorm" else 1
    q = config.q_lora_rank
    count = h * a * d if q is None else h * q + per_norm * q + q * a * d
    count += h * (r + config.qk_pos_emb_head_dim) + per_norm * r
    return count + r * a * (config.qk_head_dim + config.v_head_dim) + a * config.v_head_dim * h


def _mlp(config: TransformerConfig, f: int) -> int:
    h, rows = config.hidden_size, f * (2 if config.gated_linear_unit else 1)
    return h * rows + f * h + (rows + h if config.add_bias_linear else 0)


def _experts(config: TransformerConfig, active: bool) -> int:
    """Of one layer; the bias that no gradient moves is not counted."""
    if config.num_experts is None:
        return 0
    many = config.moe_router_topk if active else config.num_experts
    shared = config.moe_shared_expert_intermediate_size
    count = many * _mlp(config, config.moe_ffn_hidden_size) + config.num_experts * config.hidden_size
    return count + (_mlp(config, shared) + config.hidden_size * config.moe_shared_expert_gate if shared else 0)
