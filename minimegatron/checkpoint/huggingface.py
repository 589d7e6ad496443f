"""Hugging Face models as ours, and ours as theirs: a table for each family and six reversible transforms.

The problem in a sentence: the same mathematics is stored under other names, in other pieces, sometimes transposed.

Each row of a table (`checkpoint/tables.py`) pairs one logical tensor of ours with the tensors of theirs that hold the
same numbers, and names the transform between them. A transform is a pair of functions that undo each other, so import
and export cannot disagree.

| transform  | theirs -> ours                                                                                     |
|------------|----------------------------------------------------------------------------------------------------|
| same       | unchanged                                                                                          |
| transpose  | GPT-2 stores `[in, out]` (Conv1D), we store `[out, in]`                                            |
| pack       | q [a d, h], k [g d, h], v [g d, h] -> per group: its query heads, its key head, its value head     |
| conv_pack  | GPT-2's `[h, 3h]` of all q, all k, all v, transposed and packed                                    |
| stack      | gate [f, h] and up [f, h] -> [2 f, h]                                                              |
| experts    | gate, up of every expert -> [E, 2 f, h]; down of every expert -> [E, h, f]                         |

The packing is what makes tensor parallelism a plain cut (`layers/attention.py`). Hugging Face's Llama weights are
already in RoPE's half-split convention, so no permutation of rows is needed.

Megatron's counterpart lives outside Megatron-LM, in Megatron-Bridge.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from minimegatron.checkpoint.mixtures import MIXTURES
from minimegatron.checkpoint.tables import TABLES, published, rows
from minimegatron.config import TransformerConfig
from minimegatron.errors import CheckpointError, ConfigError

Tensors = list[torch.Tensor]


# -------------------------------------------------------------------------------------------------- transforms


def pack_qkv(qkv: Sequence[torch.Tensor], config: TransformerConfig) -> torch.Tensor:
    """q [a d, ...], k and v [g d, ...] -> [g (a/g + 2) d, ...], per group its queries, its key, its value."""
    g, d = config.num_query_groups, config.kv_channels
    q, k, v = qkv
    rest = q.shape[1:]
    parts = [q.reshape(g, config.queries_per_group * d, *rest), k.reshape(g, d, *rest), v.reshape(g, d, *rest)]
    return torch.cat(parts, 1).flatten(0, 1)


def unpack_qkv(packed: torch.Tensor, config: TransformerConfig) -> Tensors:
    """The inverse of `pack_qkv`."""
    g, d = config.num_query_groups, config.kv_channels
    grouped = packed.unflatten(0, (g, -1))
    return [t.flatten(0, 1).contiguous() for t in grouped.split([config.queries_per_group * d, d, d], 1)]


def _import(transform: str, tensors: Tensors, config: TransformerConfig) -> torch.Tensor:
    match transform:
        case "same":
            return tensors[0]
        case "transpose":
            return tensors[0].t().contiguous()
        case "pack":
            return pack_qkv(tensors, config)
        case "conv_pack":
            matrix = tensors[0].t() if tensors[0].dim() == 2 else tensors[0]
            return pack_qkv(matrix.chunk(3), config)
        case "stack":
            return torch.cat(tensors)
        case "experts":
            each = len(tensors) // (config.num_experts or 1)
            return torch.stack([torch.cat(tensors[i : i + each]) for i in range(0, len(tensors), each)])
    raise AssertionError(f"unknown transform {transform}")


def _export(transform: str, tensor: torch.Tensor, config: TransformerConfig, count: int) -> Tensors:
    """`count`: how many tensors of theirs this is."""
    match transform:
        case "same":
            return [tensor]
        case "transpose":
            return [tensor.t().contiguous()]
        case "pack":
            return unpack_qkv(tensor, config)
        case "conv_pack":
            joined = torch.cat(unpack_qkv(tensor, config))
            return [joined.t().contiguous() if joined.dim() == 2 else joined]
        case "stack":
            return [t.contiguous() for t in tensor.chunk(2)]
        case "experts":
            return [t.contiguous() for expert in tensor for t in expert.chunk(count // len(tensor))]
    raise AssertionError(f"unknown transform {transform}")


# -------------------------------------------------------------------------------------------------- conversion


def state_from_huggingface(
    state: Mapping[str, torch.Tensor], config: TransformerConfig, family: str
) -> dict[str, torch.Tensor]:
    """Logical tensors of ours from a Hugging Face state dict.

    Raises:
        CheckpointError: listing every missing tensor and every one left over.
    """
    ours, used, missing = {}, set(), []
    if config.num_experts is not None:
        state = published(state, family)
    for name, theirs, transform in rows(config, family):
        absent = [t for t in theirs if t not in state]
        missing += absent
        if not absent:
            ours[name] = _import(transform, [state[t] for t in theirs], config)
            used.update(theirs)
    tied = set() if config.untie_embeddings_and_output_weights else {"lm_head.weight"}
    buffers = {t for t in state if t.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))}
    extra = sorted(set(state) - used - tied - buffers)
    if missing or extra:
        lines = [f"missing {t}" for t in missing] + [f"left over {t}" for t in extra]
        raise CheckpointError(
            f"this is not a {family} model of the given config:\n  " + "\n  ".join(lines),
            fix="check model_type and config",
        )
    return ours


def state_to_huggingface(
    state: Mapping[str, torch.Tensor], config: TransformerConfig, family: str
) -> dict[str, torch.Tensor]:
    """A Hugging Face state dict from our logical tensors; a tied output layer is written once, as they do."""
    theirs: dict[str, torch.Tensor] = {}
    for name, names, transform in rows(config, family):
        if name not in state:
            raise CheckpointError(f"missing {name}", fix="gather the logical tensors of all ranks first")
        theirs.update(zip(names, _export(transform, state[name], config, len(names)), strict=True))
    return theirs


_COMMON = {
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
_GPT2 = {
    "n_layer": "num_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_inner": "ffn_hidden_size",
    "vocab_size": "vocab_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layernorm_epsilon",
}
_ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
}


def config_from_huggingface(hf: Mapping[str, Any]) -> tuple[str, TransformerConfig]:
    """(family, config) from a `config.json`.

    Raises:
        ConfigError: a family or an option that is not supported; nothing is ignored silently.
    """
    family = str(hf.get("model_type"))
    if family not in TABLES:
        raise ConfigError(f"model_type {family!r} is not supported", fix=f"supported: {', '.join(TABLES)}")
    names = _GPT2 if family == "gpt2" else _COMMON
    fields: dict[str, Any] = {ours: hf[theirs] for theirs, ours in names.items() if hf.get(theirs) is not None}
    fields["untie_embeddings_and_output_weights"] = not hf.get("tie_word_embeddings", family == "gpt2")
    if family == "gpt2":
        for option, wanted in (
            ("scale_attn_by_inverse_layer_idx", False),
            ("scale_attn_weights", True),
            ("reorder_and_upcast_attn", False),
        ):
            if hf.get(option, wanted) is not wanted:
                raise ConfigError(f"{option}={hf[option]} is not supported", fix="use a model without it")
        fields.update(
            normalization="LayerNorm",
            position_embedding_type="learned_absolute",
            activation=_activation(hf["activation_function"]),
        )
        return family, TransformerConfig.from_dict(fields)
    fields.update(normalization="RMSNorm", position_embedding_type="rope", **_rope(hf))
    gated = {"silu": "swiglu", "gelu": "geglu"}
    if hf["hidden_act"] not in gated:
        raise ConfigError(
            f"hidden_act {hf['hidden_act']!r} is not supported in a gated MLP", fix=f"supported: {', '.join(gated)}"
        )
    bias = bool(hf.get("attention_bias", False))
    if bias != bool(hf.get("mlp_bias", False)):
        raise ConfigError(
            f"attention_bias={bias} with mlp_bias={not bias} is not supported", fix="use a model with both or neither"
        )
    fields.update(activation=gated[hf["hidden_act"]], add_bias_linear=bias)
    fields.update(add_qkv_bias=family == "qwen2" or (family == "qwen2_moe" and bool(hf.get("qkv_bias", True))))
    fields.update(qk_layernorm=family in ("qwen3", "qwen3_moe"), sliding_window=_window(hf, family))
    if family in MIXTURES:
        fields.update(MIXTURES[family](hf))
    return family, TransformerConfig.from_dict(fields)


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not supported", fix=f"supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _window(hf: Mapping[str, Any], family: str) -> int | None:
    """One window for all layers, or none. Qwen can mix layers with and without; that is refused."""
    window = hf.get("sliding_window")
    if family == "llama" or window is None or (family.startswith("qwen") and not hf.get("use_sliding_window", False)):
        return None
    kinds = set(hf.get("layer_types") or ["sliding_attention"])
    if kinds == {"full_attention"}:
        return None
    if kinds != {"sliding_attention"}:
        raise ConfigError(
            f"layers with different attention ({', '.join(sorted(kinds))}) are not supported",
            fix="use a model with one kind",
        )
    return int(window)


def _rope(hf: Mapping[str, Any]) -> dict[str, Any]:
    """RoPE's fields; transformers 5 keeps them in `rope_parameters`, before that in `rope_theta` and `rope_scaling`."""
    scaling = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    base = float(scaling.get("rope_theta", hf.get("rope_theta", 10000.0)))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    fields: dict[str, Any] = {"rotary_base": base}
    if "partial_rotary_factor" in scaling:
        fields["rotary_percent"] = float(scaling["partial_rotary_factor"])
    if kind == "default":
        return fields
    if kind not in ("linear", "llama3", "yarn"):
        raise ConfigError(f"rope_type {kind!r} is not supported", fix="supported: default, linear, llama3, yarn")
    fields.update(rope_scaling_type=kind, rope_scaling_factor=float(scaling["factor"]))
    if kind == "llama3":
        fields.update(
            rope_scaling_low_freq_factor=float(scaling["low_freq_factor"]),
            rope_scaling_high_freq_factor=float(scaling["high_freq_factor"]),
            rope_scaling_original_max_position_embeddings=int(scaling["original_max_position_embeddings"]),
        )
    if kind == "yarn":
        fields.update(_yarn(scaling))
    return fields


def _yarn(scaling: Mapping[str, Any]) -> dict[str, Any]:
    if scaling.get("attention_factor") is not None:
        raise ConfigError(
            f"YaRN with attention_factor={scaling['attention_factor']} is not supported",
            fix="say it by mscale and mscale_all_dim, or leave it to the factor",
        )
    all_dim = float(scaling.get("mscale_all_dim") or 0.0)
    return {
        "rope_scaling_original_max_position_embeddings": int(scaling["original_max_position_embeddings"]),
        "yarn_beta_fast": float(scaling.get("beta_fast") or 32.0),
        "yarn_beta_slow": float(scaling.get("beta_slow") or 1.0),
        "yarn_mscale": float(scaling.get("mscale") or 0.0) if all_dim else 0.0,  # transformers reads both, or neither
        "yarn_mscale_all_dim": all_dim,
        "yarn_correction_range_round_to_int": bool(scaling.get("truncate", True)),
    }
