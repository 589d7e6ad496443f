"""Qwen 1.5 to 3, dense and as mixtures of experts.

| family      | attention                            | router                                                          |
|-------------|--------------------------------------|-----------------------------------------------------------------|
| `qwen2`     | biases on queries, keys and values   |                                                                 |
| `qwen3`     | a norm on each query and key         |                                                                 |
| `qwen2_moe` | as `qwen2`                           | softmax over all, or over the chosen; a shared expert, gated    |
| `qwen3_moe` | as `qwen3`                           | the same, without a shared expert                               |

A file may mix layers with and without a window; such a model is refused.

Qwen2: arXiv:2407.10671; Qwen2.5: arXiv:2412.15115; Qwen3: arXiv:2505.09388.
"""

from __future__ import annotations

from collections.abc import Callable

from minimegatron.config import TransformerConfig
from minimegatron.errors import ConfigError
from minimegatron.models.families import llama_like as like
from minimegatron.models.families.family import Family, Fields, Part, Row, register
from minimegatron.models.families.keys import Keys
from minimegatron.models.families.llama_like import L, T, sizes

_WINDOWED, _FULL = "sliding_attention", "full_attention"
_ROTARY_BASE = {"rotary_base": 1_000_000.0}
_EPSILON = {"layernorm_epsilon": 1e-6}
_NORMED_HEADS = {**like.FIELDS, **_ROTARY_BASE, **_EPSILON, "qk_layernorm": True}
_TIED = {"untie_embeddings_and_output_weights": False}


def _windows(windowed: Callable[[int, int], bool]) -> Part:
    """The part for a window of all layers, or of none.

    Args:
        windowed: (number of a layer, `max_window_layers`) -> whether it has a window, if the file does not list them.
    """

    def read(keys: Keys) -> Fields:
        window, layers, kinds = keys["sliding_window"], keys["num_hidden_layers"], keys["layer_types"]
        if unknown := sorted({*(kinds or ())} - {_WINDOWED, _FULL}):
            raise ConfigError(f"layer_types {unknown[0]!r} is not supported", fix=f"of {_WINDOWED}, {_FULL}")
        if not keys["use_sliding_window"]:
            return {"sliding_window": None}
        first = keys["max_window_layers"]
        kinds = set(kinds or (_WINDOWED if windowed(i, first) else _FULL for i in range(layers)))
        if len(kinds) > 1:
            raise ConfigError(
                f"layers with different attention ({', '.join(sorted(kinds))}) are not supported",
                fix="use a model with one kind",
            )
        return {"sliding_window": int(window) if kinds == {_WINDOWED} and window is not None else None}

    def write(config: TransformerConfig) -> Fields:
        keys = _write_window(config)
        if config.sliding_window is not None:
            keys |= {"layer_types": [_WINDOWED] * config.num_layers, "max_window_layers": 0}
        return keys

    return Part(read, write)


def _read_window(keys: Keys) -> Fields:
    """The window of Qwen3-MoE, whose class has no `layer_types`: all layers are alike."""
    window, windowed = keys["sliding_window"], keys["use_sliding_window"]
    keys.only("layer_types", [_WINDOWED if windowed else _FULL] * keys["num_hidden_layers"])
    return {"sliding_window": int(window) if windowed and window is not None else None}


def _write_window(config: TransformerConfig) -> Fields:
    return {"use_sliding_window": config.sliding_window is not None, "sliding_window": config.sliding_window}


def _read_experts(keys: Keys) -> Fields:
    layers, step = int(keys["num_hidden_layers"]), int(keys["decoder_sparse_step"])
    dense = keys["mlp_only_layers"] or []
    return {
        "num_experts": int(keys["num_experts"]),
        "moe_router_topk": int(keys["num_experts_per_tok"]),
        "moe_ffn_hidden_size": int(keys["moe_intermediate_size"]),
        "moe_layer_freq": like.pattern([i not in dense and (i + 1) % step == 0 for i in range(layers)]),
        "moe_router_pre_softmax": not keys["norm_topk_prob"],
    }


def _write_experts(config: TransformerConfig) -> Fields:
    return {
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "moe_intermediate_size": config.moe_ffn_hidden_size,
        "mlp_only_layers": [i for i, has in enumerate(config.expert_layers) if not has],
        "norm_topk_prob": not config.moe_router_pre_softmax,
    }


_SHARED = Part(
    lambda keys: {
        "moe_shared_expert_intermediate_size": int(keys["shared_expert_intermediate_size"]),
        "add_qkv_bias": bool(keys["qkv_bias"]),
    },
    lambda config: {
        "shared_expert_intermediate_size": config.moe_shared_expert_intermediate_size or 0,
        "qkv_bias": config.add_qkv_bias,
    },
)
_PARTS = (like.SIZES, like.GATE, like.DROPOUT, like.rope("linear", "llama3", "yarn"))
WINDOWS = _windows(lambda i, first: i >= first)
EXPERTS = Part(_read_experts, _write_experts)
EXPERT_ROWS = like.experts(*like.GATED_MLP)
SHARED_ROWS = (
    *like.shared_experts("shared_expert"),
    Row(L + "mlp.shared_experts.gate_weight", (T + "mlp.shared_expert_gate.weight",), on="moe"),
)

_DEFAULTS = {
    **like.DEFAULTS,
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "use_sliding_window": False,
    "sliding_window": 4096,
}
_LAYERS = {"max_window_layers": 28, "layer_types": None}
EXPERT_DEFAULTS = {"decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": False}

register(
    Family(
        name="qwen2",
        architecture="Qwen2ForCausalLM",
        tensorrt_llm={"qwen_type": "qwen2", "use_logn_attn": False},
        fields={**like.FIELDS, **_ROTARY_BASE, "add_qkv_bias": True},
        presets={
            "qwen2.5-0.5b": sizes(
                24, 896, 14, 151936, num_query_groups=2, ffn_hidden_size=4864, max_position_embeddings=32768,
                **_EPSILON, **_TIED,
            ),
            "qwen2.5-7b": sizes(
                28, 3584, 28, 152064, num_query_groups=4, ffn_hidden_size=18944, max_position_embeddings=131072,
                **_EPSILON,
            ),
        },
        defaults={**_DEFAULTS, **_LAYERS},
        parts=(*_PARTS, WINDOWS),
        tensors=like.DENSE,
        tokenizer="Qwen2Tokenizer",
    )
)  # fmt: skip

register(
    Family(
        name="qwen3",
        architecture="Qwen3ForCausalLM",
        tensorrt_llm={"qwen_type": "qwen3", "use_logn_attn": False},
        fields=_NORMED_HEADS,
        presets={
            "qwen3-0.6b": sizes(
                28, 1024, 16, 151936, num_query_groups=8, kv_channels=128, ffn_hidden_size=3072,
                max_position_embeddings=40960, **_TIED,
            ),
            "qwen3-8b": sizes(
                36, 4096, 32, 151936, num_query_groups=8, kv_channels=128, ffn_hidden_size=12288,
                max_position_embeddings=40960,
            ),
        },
        defaults={**_DEFAULTS, **_LAYERS, "head_dim": 128, "attention_bias": False},
        parts=(*_PARTS, like.biases("attention_bias"), WINDOWS),
        tensors=like.DENSE,
    )
)  # fmt: skip

register(
    Family(
        name="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        fields={
            **like.FIELDS,
            **_ROTARY_BASE,
            **_EPSILON,
            "add_qkv_bias": True,
            "num_experts": 60,
            "moe_router_topk": 4,
            "moe_router_pre_softmax": True,
            "moe_shared_expert_gate": True,
        },
        presets={
            "qwen1.5-moe-a2.7b": sizes(
                24, 2048, 16, 151936, ffn_hidden_size=5632, moe_ffn_hidden_size=1408,
                moe_shared_expert_intermediate_size=5632, max_position_embeddings=8192,
            ),
        },
        defaults={
            **_DEFAULTS,
            **_LAYERS,
            **EXPERT_DEFAULTS,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "qkv_bias": True,
        },
        parts=(*_PARTS, _windows(lambda i, first: i % 2 == 0 and i < first), EXPERTS, _SHARED),
        tensors=(
            *like.DENSE,
            *EXPERT_ROWS,
            *SHARED_ROWS,
        ),
    )
)  # fmt: skip

register(
    Family(
        name="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        fields={**_NORMED_HEADS, "num_experts": 128, "moe_router_topk": 8},
        presets={
            "qwen3-30b-a3b": sizes(
                48, 2048, 32, 151936, num_query_groups=4, kv_channels=128, ffn_hidden_size=6144,
                moe_ffn_hidden_size=768, max_position_embeddings=40960,
            ),
            "qwen3-235b-a22b": sizes(
                94, 4096, 64, 151936, num_query_groups=4, kv_channels=128, ffn_hidden_size=12288,
                moe_ffn_hidden_size=1536, max_position_embeddings=40960,
            ),
        },
        defaults={
            **_DEFAULTS,
            **EXPERT_DEFAULTS,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_hidden_layers": 24,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "attention_bias": False,
        },
        aliases={"num_local_experts": "num_experts"},
        parts=(*_PARTS, like.biases("attention_bias"), Part(_read_window, _write_window), EXPERTS),
        tensors=(*like.DENSE, *EXPERT_ROWS),
    )
)  # fmt: skip
