"""The parts and rows that descendants of Llama share: RMSNorm before attention and MLP, RoPE, a gated MLP, no biases.

| name                                | contents                                                           |
|-------------------------------------|--------------------------------------------------------------------|
| `FIELDS`, `DEFAULTS`                | the fields of all; the defaults of most classes of transformers    |
| `SIZES`, `GATE`, `biases`, `WINDOW` | parts of their `config.json`                                       |
| `layer_types`                       | windows of some layers                                             |
| `rope`                              | RoPE and its scaling; transformers 5 keeps both in                 |
|                                     | `rope_parameters`, before that in `rope_theta` and `rope_scaling`  |
| `WORDS`, `HEAD`, `ENDS`,            | rows of their tensors; `ENDS` also has the norms of a layer,       |
| `ATTENTION`, `MLP`, `DENSE`         | `DENSE` is all of them                                             |
| `experts`, `shared_experts`         | the same of a mixture                                              |

Softmax over all experts and then dividing by the sum of the chosen, as Hugging Face has it, is the softmax over the
chosen. The weights of penalties (`router_aux_loss_coef`) are a choice of training and are not taken over; theirs is a
loss over all layers at once and k times ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from minimegatron.config import TransformerConfig
from minimegatron.errors import ConfigError
from minimegatron.models.families.family import Fields, Part, Row, named, noted, one_of
from minimegatron.models.families.keys import Keys

FIELDS: dict[str, Any] = {
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
}
DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "num_key_value_heads": 32,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "head_dim": None,
}


def sizes(layers: int, h: int, a: int, vocab: int, **more: Any) -> dict[str, Any]:
    """The fields of a preset: the sizes that every member has, and more."""
    return {"num_layers": layers, "hidden_size": h, "num_attention_heads": a, "vocab_size": vocab, **more}


# ------------------------------------------------------------------------------------------------- config.json

SIZES = named(
    {
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "num_attention_heads",
        "num_key_value_heads": "num_query_groups",
        "hidden_size": "hidden_size",
        "intermediate_size": "ffn_hidden_size",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "max_position_embeddings",
        "rms_norm_eps": "layernorm_epsilon",
        "head_dim": "kv_channels",
    }
)
GATE = one_of("hidden_act", {"silu": "swiglu", "gelu": "geglu"}, "activation", "a gated MLP")
DROPOUT = noted(attention_dropout="attention_dropout")
WINDOW = Part(
    lambda keys: {"sliding_window": None if keys["sliding_window"] is None else int(keys["sliding_window"])},
    lambda config: {"sliding_window": config.sliding_window},
)

WINDOWED, FULL = "sliding_attention", "full_attention"


def layer_types(period: int) -> Part:
    """The part for layers that have a window, but for every `period`-th, or as `layer_types` lists them."""

    def read(keys: Keys) -> Fields:
        layers, window = keys["num_hidden_layers"], keys["sliding_window"]
        said = int(keys.get("sliding_window_pattern", period))  # of files before `layer_types`
        kinds = keys["layer_types"] or [WINDOWED if (i + 1) % said else FULL for i in range(layers)]
        windowed = [kind == WINDOWED for kind in kinds]
        if len(kinds) != layers or not {*kinds} <= {WINDOWED, FULL} or (window is None and any(windowed)):
            raise ConfigError(
                f"layer_types={kinds} with sliding_window={window} in a model of {layers} layers is not supported",
                fix=f"{WINDOWED} or {FULL} for each layer, and a sliding_window",
            )
        in_turn = windowed == [(i + 1) % period != 0 for i in range(layers)]
        return {
            "sliding_window": int(window) if any(windowed) else None,
            "window_attn_skip_freq": (None if len({*windowed}) == 1 else str(period) if in_turn else pattern(windowed)),
        }

    def write(config: TransformerConfig) -> Fields:
        return {
            "sliding_window": config.sliding_window,
            "layer_types": [WINDOWED if windowed else FULL for windowed in config.windowed_layers],
        }

    return Part(read, write)


def biases(*names: str) -> Part:
    """The part for biases everywhere or nowhere; `names` are the family's keys among attention_bias and mlp_bias."""

    def read(keys: Keys) -> Fields:
        attention, mlp = bool(keys.get("attention_bias")), bool(keys.get("mlp_bias"))
        if attention != mlp:
            raise ConfigError(
                f"attention_bias={attention} with mlp_bias={mlp} is not supported",
                fix="use a model with both or neither",
            )
        return {"add_bias_linear": attention}

    return Part(read, lambda config: dict.fromkeys(names, config.add_bias_linear))


def rope(*kinds: str, partial: bool = False) -> Part:
    """The part for RoPE; `kinds` are the scalings that the family's class supports, `partial` says whether it turns a
    part of a head.

    Lengths that a file leaves out are `max_position_embeddings`, as in transformers.
    """

    def read(keys: Keys) -> Fields:
        given, older = keys.get("rope_parameters"), keys.get("rope_scaling")
        scaling = Keys(dict(older or given or {}), "rope")
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        scaling.get("type")
        fields: Fields = {
            "rotary_base": float(scaling.get("rope_theta", keys["rope_theta"])),
            "rope_scaling_type": "none",  # also of a family whose members scale
        }
        if partial:
            fields["rotary_percent"] = float(scaling.get("partial_rotary_factor", keys["partial_rotary_factor"]))
        for table in () if partial else (scaling, keys):
            table.only(
                "partial_rotary_factor", 1.0, f"is not {keys.family}'s: transformers turns its heads whole or fails"
            )
        if kind not in ("default", *kinds):
            raise ConfigError(
                f"rope_type {kind!r} is not supported in {keys.family}",
                fix=f"supported: {', '.join(('default', *kinds))}",
            )
        if kind != "default":
            fields.update(rope_scaling_type=kind, rope_scaling_factor=float(scaling["factor"]))
        if kind in ("llama3", "yarn"):
            original = scaling.get("original_max_position_embeddings", keys["max_position_embeddings"])
            fields["rope_scaling_original_max_position_embeddings"] = int(original)
        if kind == "llama3":
            fields.update(
                rope_scaling_low_freq_factor=float(scaling["low_freq_factor"]),
                rope_scaling_high_freq_factor=float(scaling["high_freq_factor"]),
            )
        if kind == "yarn":
            fields.update(_read_yarn(scaling))
        scaling.finish()
        return fields

    def write(config: TransformerConfig) -> Fields:
        return _write_rope(config) | ({"partial_rotary_factor": config.rotary_percent} if partial else {})

    return Part(read, write)


def _read_yarn(scaling: Keys) -> Fields:
    if scaling.get("attention_factor") is not None:
        raise ConfigError(
            f"YaRN with attention_factor={scaling['attention_factor']} is not supported",
            fix="say it by mscale and mscale_all_dim, or leave it to the factor",
        )
    mscale, all_dim = (float(scaling.get(name) or 0.0) for name in ("mscale", "mscale_all_dim"))
    return {
        "yarn_beta_fast": float(scaling.get("beta_fast") or 32.0),
        "yarn_beta_slow": float(scaling.get("beta_slow") or 1.0),
        "yarn_mscale": mscale if all_dim else 0.0,  # transformers reads both, or neither
        "yarn_mscale_all_dim": all_dim,
        "yarn_correction_range_round_to_int": bool(scaling.get("truncate", True)),
    }


def _write_rope(config: TransformerConfig) -> Fields:
    keys: Fields = {"rope_theta": config.rotary_base}
    kind = config.rope_scaling_type
    if kind == "none":
        return keys
    scaling: dict[str, Any] = {"rope_type": kind, "factor": config.rope_scaling_factor}
    if kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = config.rope_scaling_original_max_position_embeddings
    if kind == "llama3":
        scaling["low_freq_factor"] = config.rope_scaling_low_freq_factor
        scaling["high_freq_factor"] = config.rope_scaling_high_freq_factor
    if kind == "yarn":
        scaling |= {"beta_fast": config.yarn_beta_fast, "beta_slow": config.yarn_beta_slow}
        scaling["truncate"] = config.yarn_correction_range_round_to_int
        if config.yarn_mscale or config.yarn_mscale_all_dim:
            scaling |= {"mscale": config.yarn_mscale, "mscale_all_dim": config.yarn_mscale_all_dim}
    return {**keys, "rope_scaling": scaling}


def pattern(has_experts: Sequence[bool]) -> str:
    """`moe_layer_freq` as a list, layer by layer."""
    return "[" + ",".join("1" if has else "0" for has in has_experts) + "]"


# ----------------------------------------------------------------------------------------------------- tensors


def has_bias(config: TransformerConfig) -> bool:
    return config.add_bias_linear


def has_qkv_bias(config: TransformerConfig) -> bool:
    return config.add_bias_linear or config.add_qkv_bias


def untied(config: TransformerConfig) -> bool:
    return config.untie_embeddings_and_output_weights


L, T = "decoder.layers.{}.", "model.layers.{}."  # before the name of a layer's tensor: ours, theirs


def qkv(kind: str) -> tuple[str, ...]:
    """Names of the three projections' weights or biases."""
    return tuple(T + f"self_attn.{x}_proj.{kind}" for x in "qkv")


GATED_MLP = ("mlp", "gate_proj", "up_proj", "down_proj")

WORDS = (Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),)
HEAD = (
    Row("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Row("output_layer.weight", ("lm_head.weight",), when=untied),
)
ENDS = (
    *WORDS,
    Row(L + "input_layernorm.weight", (T + "input_layernorm.weight",)),
    Row(L + "pre_mlp_layernorm.weight", (T + "post_attention_layernorm.weight",)),
    *HEAD,
)
ATTENTION = (
    Row(L + "self_attention.linear_qkv.weight", qkv("weight"), "pack"),
    Row(L + "self_attention.linear_qkv.bias", qkv("bias"), "pack", has_qkv_bias),
    Row(L + "self_attention.q_layernorm.weight", (T + "self_attn.q_norm.weight",), when=lambda c: c.qk_layernorm),
    Row(L + "self_attention.k_layernorm.weight", (T + "self_attn.k_norm.weight",), when=lambda c: c.qk_layernorm),
    Row(L + "self_attention.linear_proj.weight", (T + "self_attn.o_proj.weight",)),
    Row(L + "self_attention.linear_proj.bias", (T + "self_attn.o_proj.bias",), when=has_bias),
)
MLP = (
    Row(L + "mlp.linear_fc1.weight", (T + "mlp.gate_proj.weight", T + "mlp.up_proj.weight"), on="mlp"),
    Row(L + "mlp.linear_fc1.bias", (T + "mlp.gate_proj.bias", T + "mlp.up_proj.bias"), when=has_bias, on="mlp"),
    Row(L + "mlp.linear_fc2.weight", (T + "mlp.down_proj.weight",), on="mlp"),
    Row(L + "mlp.linear_fc2.bias", (T + "mlp.down_proj.bias",), when=has_bias, on="mlp"),
)
DENSE = (*ENDS, *ATTENTION, *MLP)


def on(part: str, rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows, of layers with this part alone."""
    return tuple(row._replace(on=part) for row in rows)


def experts(their_layer: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Rows of the router and of the experts, whose three matrices have these published names."""
    one = T + their_layer + ".experts.{e}."
    fc1 = (f"{one}{gate}.weight", f"{one}{up}.weight")
    return (
        Row(L + "mlp.router.weight", (T + their_layer + ".gate.weight",), on="moe"),
        Row(L + "mlp.experts.weight1", fc1, on="moe"),
        Row(L + "mlp.experts.weight2", (f"{one}{down}.weight",), on="moe"),
    )


def shared_experts(their_name: str) -> tuple[Row, ...]:
    """Rows of the MLP that every token passes."""
    return tuple(
        row._replace(
            ours=row.ours.replace("mlp.", "mlp.shared_experts."),
            theirs=tuple(name.replace("mlp.", f"mlp.{their_name}.") for name in row.theirs),
            when=lambda config: config.moe_shared_expert_intermediate_size is not None,
            on="moe",
        )
        for row in MLP
        if row.ours.endswith(".weight")
    )
