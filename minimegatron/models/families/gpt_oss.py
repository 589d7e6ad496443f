"""gpt-oss: sinks, every other layer with a window, biases everywhere, clamped experts, weights in MXFP4.

| of its own                                           | field                                                   |
|------------------------------------------------------|---------------------------------------------------------|
| a head's softmax has one more key, a learned sink    | `softmax_type`                                          |
| layers 0, 2, 4, ... see a window, the others all     | `sliding_window`, `window_attn_skip_freq`               |
| biases of attention, router and experts              | `add_bias_linear`                                       |
| gate sigmoid(1.702 gate) (up + 1), both clamped      | `activation` quick_geglu, `glu_linear_offset`,          |
|                                                      | `activation_func_clamp_value`                           |
| YaRN whose blend begins within a channel             | `yarn_correction_range_round_to_int`                    |

A published file stacks its experts, with the columns of gate and up in turn (`checkpoint/stacks`), and packs them in 4
bits (`checkpoint/mxfp4`).

OpenAI, arXiv:2508.10925. Megatron-LM: `examples/gptoss/01_convert_from_hf.py`.
"""

from __future__ import annotations

from minimegatron.config import TransformerConfig
from minimegatron.errors import ConfigError
from minimegatron.models.families import llama_like as like
from minimegatron.models.families.family import Family, Fields, Part, Row, only, register
from minimegatron.models.families.keys import Keys
from minimegatron.models.families.llama_like import L, T, sizes

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _read_experts(keys: Keys) -> Fields:
    k, limit = int(keys["num_experts_per_tok"]), keys["swiglu_limit"]
    if limit is None:
        raise ConfigError("swiglu_limit=None is not supported", fix="a number: gpt-oss clamps what its gates multiply")
    keys.only("experts_per_token", k)  # another name of it, which transformers does not read
    return {
        "num_experts": int(keys["num_local_experts"]),
        "moe_router_topk": k,
        "moe_ffn_hidden_size": int(keys["intermediate_size"]),
        "activation_func_clamp_value": float(limit),
    }


def _write_experts(config: TransformerConfig) -> Fields:
    return {
        "num_local_experts": config.num_experts,
        "num_experts_per_tok": config.moe_router_topk,
        "intermediate_size": config.moe_ffn_hidden_size,
        "swiglu_limit": config.activation_func_clamp_value,
    }


_ROPE = like.rope("linear", "llama3", "yarn")


def _read_rope(keys: Keys) -> Fields:
    fields = _ROPE.read(keys)
    if "rope_scaling_original_max_position_embeddings" in fields:  # said twice; transformers reads one of them
        keys.only("initial_context_length", fields["rope_scaling_original_max_position_embeddings"])
    return fields


def _write_rope(config: TransformerConfig) -> Fields:
    keys = _ROPE.write(config)
    scaling = keys.pop("rope_scaling", {"rope_type": "default"})
    return {"rope_parameters": {**scaling, "rope_theta": keys["rope_theta"]}}


_ONE = T + "mlp.experts.{e}."
_SHAPE = {
    "kv_channels": 64,
    "num_query_groups": 8,
    "ffn_hidden_size": 2880,
    "max_position_embeddings": 131_072,
}

register(
    Family(
        name="gpt_oss",
        architecture="GptOssForCausalLM",
        fields={
            **like.FIELDS,
            "add_bias_linear": True,
            "activation": "quick_geglu",
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 7.0,
            "softmax_type": "learnable",
            "sliding_window": 128,
            "window_attn_skip_freq": "2",
            "num_experts": 128,
            "moe_router_topk": 4,
            "rotary_base": 150_000.0,
            "rope_scaling_type": "yarn",
            "rope_scaling_factor": 32.0,
            "rope_scaling_original_max_position_embeddings": 4096,
            "yarn_correction_range_round_to_int": False,
        },
        presets={
            "gpt-oss-20b": sizes(24, 2880, 64, 201088, num_experts=32, **_SHAPE),
            "gpt-oss-120b": sizes(36, 2880, 64, 201088, num_experts=128, **_SHAPE),
        },
        defaults={
            **like.DEFAULTS,
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "layer_types": None,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "rope_parameters": _YARN,
            "max_position_embeddings": 131_072,
            "attention_bias": True,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        aliases={"num_experts": "num_local_experts"},
        parts=(
            like.SIZES,
            like.DROPOUT,
            only(hidden_act="silu", swiglu_alpha=1.702, attention_bias=True),
            like.layer_types(2),
            Part(_read_rope, _write_rope),
            Part(_read_experts, _write_experts),
        ),
        tensors=(
            *like.ENDS,
            *like.ATTENTION,
            Row(L + "self_attention.core_attention.softmax_offset", (T + "self_attn.sinks",)),
            Row(L + "mlp.router.weight", (T + "mlp.router.weight",), on="moe"),
            Row(L + "mlp.router.bias", (T + "mlp.router.bias",), on="moe"),
            Row(L + "mlp.experts.weight1", (_ONE + "gate_proj.weight", _ONE + "up_proj.weight"), on="moe"),
            Row(L + "mlp.experts.bias1", (_ONE + "gate_proj.bias", _ONE + "up_proj.bias"), on="moe"),
            Row(L + "mlp.experts.weight2", (_ONE + "down_proj.weight",), on="moe"),
            Row(L + "mlp.experts.bias2", (_ONE + "down_proj.bias",), on="moe"),
        ),
        stacks={
            "gate_up_proj": ("gate_proj.weight", "up_proj.weight"),
            "gate_up_proj_bias": ("gate_proj.bias", "up_proj.bias"),
            "down_proj": ("down_proj.weight",),
            "down_proj_bias": ("down_proj.bias",),
        },
    )
)
