"""Mamba-2: layers of one part each, all of them state-space layers (`layers/ssm/mixer`).

There are no positions and no MLP. What is said of how it is trained (`residual_in_fp32`, the range of initial time
steps) or computed (`chunk_size`) does not change logits, and is not read.

Dao and Gu, arXiv:2405.21060. Megatron-LM: `megatron/core/models/mamba/mamba_model.py`.
"""

from __future__ import annotations

from typing import Any

from minimegatron.config import TransformerConfig
from minimegatron.errors import ConfigError
from minimegatron.models.families.family import Family, Fields, Part, Row, named, only, register
from minimegatron.models.families.keys import Keys
from minimegatron.models.families.llama_like import L, untied

FIELDS: dict[str, Any] = {
    "normalization": "RMSNorm",
    "position_embedding_type": "none",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
# Those that its layers read, and those that change nothing.
DEFAULTS: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 4096,
    "layer_norm_epsilon": 1e-5,
    "conv_kernel": 4,
    "n_groups": 8,
    "use_bias": False,
    "use_conv_bias": True,
    "time_step_min": 0.001,
    "tie_word_embeddings": False,
}
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "layer_norm_epsilon": "layernorm_epsilon",
    "conv_kernel": "mamba_conv_kernel",
    "n_groups": "mamba_num_groups",
}
BIASES = only(use_bias=False, use_conv_bias=True)
WITHOUT_EFFECT = (
    "chunk_size", "residual_in_fp32", "rescale_prenorm_residual", "time_step_max", "time_step_floor",
)  # fmt: skip


def without_effect(*names: str) -> Part:
    """The part for keys that transformers does not read, or for how a model is begun and computed."""
    how = {"chunk_size": "mamba_chunk_size", "residual_in_fp32": "fp32_residual_connection"}
    return Part(
        lambda keys: {name: keys[name] for name in names} and {},
        lambda config: {name: getattr(config, ours) for name, ours in how.items()},
    )


T = "backbone.layers.{}."
ENDS = (
    Row("embedding.word_embeddings.weight", ("backbone.embeddings.weight",)),
    Row("decoder.final_layernorm.weight", ("backbone.norm_f.weight",)),
    Row("output_layer.weight", ("lm_head.weight",), when=untied),
)
MAMBA = (
    Row(L + "input_layernorm.weight", (T + "norm.weight",), on="mamba"),
    *(
        Row(L + f"self_attention.{name}", (T + f"mixer.{name}",), on="mamba")
        for name in ("in_proj.weight", "conv1d.weight", "conv1d.bias", "A_log", "dt_bias", "D", "norm.weight",
                     "out_proj.weight")
    ),
)  # fmt: skip


def _read(keys: Keys) -> Fields:
    h, heads, width = (int(keys[name]) for name in ("hidden_size", "num_heads", "head_dim"))
    keys.only("hidden_act", "silu")
    keys["time_step_min"]
    for key in ("rms_norm", "norm_before_gate"):  # in files, and not in the class, whose norm is after the gate
        keys.only(key, True)
    if keys["expand"] * h != heads * width:
        raise ConfigError(
            f"expand ({keys['expand']}) * hidden_size ({h}) with {heads} heads of {width} is not supported",
            fix="num_heads * head_dim must be expand * hidden_size",
        )
    low, high = (float("inf") if isinstance(limit, dict) else float(limit) for limit in keys["time_step_limit"])
    layers = int(keys["num_hidden_layers"])
    return {
        "num_layers": layers,
        "hybrid_override_pattern": "M" * layers,
        "mamba_num_heads": heads,
        "mamba_head_dim": width,
        "mamba_state_dim": int(keys["state_size"]),
        "mamba_dt_limit_min": low,
        "mamba_dt_limit_max": None if high == float("inf") else high,
    }


def _write(config: TransformerConfig) -> Fields:
    high = config.mamba_dt_limit_max
    heads, width = config.mamba_num_heads or 1, config.mamba_head_dim
    return {
        "num_hidden_layers": (config.hybrid_override_pattern or "").count("M"),
        "num_heads": heads,
        "head_dim": width,
        "state_size": config.mamba_state_dim,
        "expand": heads * width // config.hidden_size,
        "time_step_limit": [config.mamba_dt_limit_min, {"__float__": "Infinity"} if high is None else high],
    }


def _sizes(layers: int, h: int) -> dict[str, Any]:
    tied = {"untie_embeddings_and_output_weights": False}
    return {"num_layers": layers, "hybrid_override_pattern": "M" * layers, "hidden_size": h, "vocab_size": 50288,
            "mamba_num_groups": 1, **tied}  # fmt: skip


register(
    Family(
        name="mamba2",
        architecture="Mamba2ForCausalLM",
        fields={**FIELDS, "max_position_embeddings": 8192},
        presets={"mamba2-130m": _sizes(24, 768), "mamba2-1.3b": _sizes(48, 2048), "mamba2-2.7b": _sizes(64, 2560)},
        defaults={
            **DEFAULTS,
            **dict.fromkeys(WITHOUT_EFFECT),
            "num_heads": 128,
            "head_dim": 64,
            "state_size": 128,
            "num_hidden_layers": 64,
            "expand": 2,
            "hidden_act": "silu",
            "time_step_limit": (0.0, float("inf")),
        },
        parts=(named(SIZES), BIASES, without_effect(*WITHOUT_EFFECT), Part(_read, _write)),
        tensors=(*ENDS, *MAMBA),
    )
)
