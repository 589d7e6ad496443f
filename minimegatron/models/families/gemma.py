"""Gemma 2 and 3: norms before and after attention and MLP, a scaled embedding, windows in most layers.

| of its own                                        | field                                               | 2 | 3 |
|---------------------------------------------------|-----------------------------------------------------|---|---|
| gamma is stored minus one                         | `layernorm_zero_centered_gamma`                     | x | x |
| the embedding times sqrt(h)                       | `scale_embeddings`                                  | x | x |
| scores times query_pre_attn_scalar^-0.5           | `softmax_scale`                                     | x | x |
| every 2nd (3: 6th) layer sees all, others a window| `sliding_window`, `window_attn_skip_freq`           | x | x |
| scores are c tanh(x / c), logits too              | `attn_logit_softcapping`, `final_logit_softcapping` | x |   |
| a norm on each query and key                      | `qk_layernorm`                                      |   | x |
| layers with a window turn by a base of their own, | `rotary_base_local`                                 |   | x |
| which is never scaled                             |                                                     |   |   |

Of Gemma 3 the language model alone, as the 1B model is published (`gemma3_text`); the others have a vision tower.

Gemma team 2024, arXiv:2408.00118; Gemma team 2025, arXiv:2503.19786.
"""

from __future__ import annotations

from typing import Any

from minimegatron.config import TransformerConfig
from minimegatron.errors import ConfigError
from minimegatron.models.families import llama_like as like
from minimegatron.models.families.family import Family, Fields, Part, Row, named, one_of, only, register
from minimegatron.models.families.keys import Keys
from minimegatron.models.families.llama_like import FULL, WINDOWED, L, T, sizes


def _read_scale(keys: Keys) -> Fields:
    if keys["use_bidirectional_attention"] is not None:
        keys.only("use_bidirectional_attention", False)
    scalar = keys["query_pre_attn_scalar"]
    return {"softmax_scale": None if scalar == keys["head_dim"] else float(scalar) ** -0.5}


_SCALE = Part(_read_scale, lambda config: {"query_pre_attn_scalar": round(config.score_scale**-2)})
_ROPE = like.rope("linear", "llama3", "yarn")


def _read_two_bases(keys: Keys) -> Fields:
    """RoPE of both kinds of layers: a table each, or as before transformers 5, scaling in those that see all."""
    tables = keys.get("rope_parameters") or {}
    if others := tables.keys() - {FULL, WINDOWED}:
        raise ConfigError(
            f"rope_parameters of {keys.family} with {', '.join(sorted(others))} is not supported",
            fix=f"a table for {FULL}, and one for {WINDOWED}",
        )
    scaling = {**(tables.get(FULL) or {}), **(keys.get("rope_scaling") or {})}
    names = ("rope_theta", "max_position_embeddings", "partial_rotary_factor")
    flat = {name: keys[name] for name in names if name in keys}
    fields = _ROPE.read(Keys({**flat, "rope_parameters": scaling}, keys.family, flat))
    local = Keys(tables.get(WINDOWED) or {}, f"{keys.family} {WINDOWED}")
    local.only("rope_type", "default")
    local.only("partial_rotary_factor", 1.0)
    base = float(local.get("rope_theta", keys["rope_local_base_freq"]))
    local.finish()
    alike = base == fields["rotary_base"] and fields["rope_scaling_type"] == "none"
    return {**fields, "rotary_base_local": None if alike else base}


def _write_two_bases(config: TransformerConfig) -> Fields:
    keys = _ROPE.write(config)
    scaling = {**keys.get("rope_scaling", {"rope_type": "default"}), "rope_theta": keys["rope_theta"]}
    local = {"rope_type": "default", "rope_theta": config.rotary_base_local or config.rotary_base}
    return {"rope_parameters": {FULL: scaling, WINDOWED: local}}


_FIELDS: dict[str, Any] = {
    **like.FIELDS,
    "activation": "geglu_tanh",
    "layernorm_epsilon": 1e-6,
    "layernorm_placement": "both",
    "layernorm_zero_centered_gamma": True,
    "untie_embeddings_and_output_weights": False,
    "scale_embeddings": True,
}
_DEFAULTS: dict[str, Any] = {
    **{key: value for key, value in like.DEFAULTS.items() if key != "hidden_act"},
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_PARTS = (
    like.SIZES,
    one_of(
        "hidden_activation",
        {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu", "silu": "swiglu"},
        "activation",
        "a gated MLP",
    ),
    like.DROPOUT,
    like.biases("attention_bias"),
    named({"final_logit_softcapping": "final_logit_softcapping"}),
    _SCALE,
)
_TENSORS = (
    *like.WORDS,
    Row(L + "input_layernorm.weight", (T + "input_layernorm.weight",)),
    Row(L + "post_self_attn_layernorm.weight", (T + "post_attention_layernorm.weight",)),
    Row(L + "pre_mlp_layernorm.weight", (T + "pre_feedforward_layernorm.weight",)),
    Row(L + "post_mlp_layernorm.weight", (T + "post_feedforward_layernorm.weight",)),
    *like.HEAD,
    *like.ATTENTION,
    *like.MLP,
)

register(
    Family(
        name="gemma2",
        architecture="Gemma2ForCausalLM",
        fields={
            **_FIELDS,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "sliding_window": 4096,
            "window_attn_skip_freq": "2",
            "max_position_embeddings": 8192,
        },
        presets={
            "gemma2-2b": sizes(26, 2304, 8, 256000, num_query_groups=4, kv_channels=256, ffn_hidden_size=9216),
            "gemma2-9b": sizes(42, 3584, 16, 256000, num_query_groups=8, kv_channels=256, ffn_hidden_size=14336),
            "gemma2-27b": sizes(
                46, 4608, 32, 256000, num_query_groups=16, kv_channels=128, ffn_hidden_size=36864,
                softmax_scale=144**-0.5,
            ),
        },
        defaults={
            **_DEFAULTS,
            "vocab_size": 256000,
            "max_position_embeddings": 8192,
            "use_bidirectional_attention": None,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
        },
        parts=(
            *_PARTS,
            like.layer_types(2),
            like.rope("linear", "llama3", "yarn"),
            named({"attn_logit_softcapping": "attn_logit_softcapping"}),
        ),
        tensors=_TENSORS,
    )
)  # fmt: skip

_SCALED = {"rope_scaling_type": "linear", "rope_scaling_factor": 8.0, "max_position_embeddings": 131_072}

register(
    Family(
        name="gemma3_text",
        architecture="Gemma3ForCausalLM",
        fields={
            **_FIELDS,
            "qk_layernorm": True,
            "rotary_base": 1_000_000.0,
            "rotary_base_local": 10_000.0,
            "sliding_window": 1024,
            "window_attn_skip_freq": "6",
        },
        presets={
            "gemma3-1b": sizes(
                26, 1152, 4, 262144, num_query_groups=1, kv_channels=256, ffn_hidden_size=6912, sliding_window=512,
                max_position_embeddings=32768,
            ),
            "gemma3-4b": sizes(
                34, 2560, 8, 262208, num_query_groups=4, kv_channels=256, ffn_hidden_size=10240, **_SCALED,
            ),
            "gemma3-12b": sizes(
                48, 3840, 16, 262208, num_query_groups=8, kv_channels=256, ffn_hidden_size=15360, **_SCALED,
            ),
            "gemma3-27b": sizes(
                62, 5376, 32, 262208, num_query_groups=16, kv_channels=128, ffn_hidden_size=21504,
                softmax_scale=168**-0.5, **_SCALED,
            ),
        },
        defaults={
            **_DEFAULTS,
            "vocab_size": 262208,
            "max_position_embeddings": 131_072,
            "use_bidirectional_attention": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "sliding_window_pattern": 6,
        },
        parts=(
            *_PARTS,
            like.layer_types(6),
            Part(_read_two_bases, _write_two_bases),
            only(attn_logit_softcapping=None),  # their class has the key, and caps no scores
        ),
        tensors=_TENSORS,
    )
)  # fmt: skip
