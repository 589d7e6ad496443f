"""Families and sizes as data: what GPT-2, Llama, Mistral and Qwen are, in one table each.

A *family* is what all its members share: norm, activation, positions, biases. A *preset* is a family and its sizes.
`--preset llama3-8b` on the command line starts from a preset; any other flag changes one of its fields.

Sources of the sizes: the model cards and `config.json` files published with the weights.
"""

from __future__ import annotations

from typing import Any

from minimegatron.config import TransformerConfig
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


def count_parameters(config: TransformerConfig) -> int:
    """Parameters of the logical model, padding of the vocabulary not counted."""
    h, f, d = config.hidden_size, config.ffn_hidden_size, config.kv_channels
    a, g = config.num_attention_heads, config.num_query_groups
    norm = h * (2 if config.normalization == "LayerNorm" else 1)
    qkv_rows, fc1_rows = (a + 2 * g) * d, f * (2 if config.gated_linear_unit else 1)
    layer = 2 * norm + h * qkv_rows + a * d * h + h * fc1_rows + f * h
    layer += qkv_rows if config.add_bias_linear or config.add_qkv_bias else 0
    layer += (h + fc1_rows + h) if config.add_bias_linear else 0
    layer += 2 * d * (2 if config.normalization == "LayerNorm" else 1) if config.qk_layernorm else 0
    tables = config.vocab_size * h * (2 if config.untie_embeddings_and_output_weights else 1)
    if config.position_embedding_type == "learned_absolute":
        tables += config.max_position_embeddings * h
    return config.num_layers * layer + norm + tables
