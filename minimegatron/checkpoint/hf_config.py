"""What a Hugging Face `config.json` says, in our fields.

The problem in a sentence: nine families say the same things under other names, with other defaults, and a version of
transformers later in another place.

| of theirs                                  | here                                                                    |
|--------------------------------------------|-------------------------------------------------------------------------|
| sizes, norms, biases                       | a table of names, defaults of the family's own class (`hf_keys`)        |
| `rope_parameters`, or before transformers 5| RoPE's fields; lengths that the file leaves out are                     |
| `rope_theta` and `rope_scaling`            | `max_position_embeddings`, as there                                     |
| `sliding_window` and which layers have it  | one window for all layers; a mixture is refused                         |
| experts                                    | `mixtures`                                                              |

A key that is not read and is not known to be harmless is refused by its name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minimegatron.checkpoint.hf_keys import DEFAULTS, Keys
from minimegatron.checkpoint.mixtures import MIXTURES
from minimegatron.config import TransformerConfig
from minimegatron.errors import CheckpointError, ConfigError

COMMON = {
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
GPT2 = {
    "n_layer": "num_layers",
    "n_head": "num_attention_heads",
    "n_embd": "hidden_size",
    "n_inner": "ffn_hidden_size",
    "vocab_size": "vocab_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layernorm_epsilon",
}
ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
}
GATES = {"silu": "swiglu", "gelu": "geglu"}


def read_json(file: Path, wanted: str) -> dict[str, Any]:
    """A JSON file that holds a table; `wanted` says in the error what the folder should be.

    Raises:
        CheckpointError: there is no such file, or it is something else.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"no {file}", fix=f"give {wanted}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}", fix="download the file again") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds a {type(found).__name__}", fix="download the file again")
    return found


def is_published(folder: Path) -> bool:
    """Whether this is the folder of a published model.

    Raises:
        CheckpointError: it is, and one of checkpoints too: which of the two models is meant?
    """
    found = (folder / "config.json").is_file()
    beside = next((path.parent.name for path in folder.glob("iter_*/manifest.json")), None) if found else None
    if beside is not None:
        raise CheckpointError(
            f"two models: config.json of a published one, and the checkpoint {beside}",
            where=str(folder),
            fix="move one of them to a folder of its own",
        )
    return found


def read_config(folder: Path) -> tuple[str, TransformerConfig]:
    """(family, config) of a published model's folder.

    Raises:
        CheckpointError: `config.json` is missing or no table.
        ConfigError: see `config_from_huggingface`; or a pad token outside of the vocabulary.
    """
    hf = read_json(folder / "config.json", "a folder with config.json")
    family, config = config_from_huggingface(hf)
    check_pad_token(hf, config.vocab_size, folder)
    return family, config


def check_pad_token(hf: Mapping[str, Any], vocab_size: int, folder: Path) -> None:
    """The pad token, and every token that was added to the tokenizer, has a row in the embedding.

    A tokenizer that was given a new pad token, `add_special_tokens({"pad_token": "[PAD]"})`, has an id more than the
    model has rows; transformers cannot build such a model, and a batch that is padded with it reads outside of the
    matrix.

    Raises:
        ConfigError: one has none.
    """
    pad, ids = hf.get("pad_token_id"), f"the vocabulary has the ids 0 to {vocab_size - 1}"
    if isinstance(pad, int) and not -1 <= pad < vocab_size:
        raise ConfigError(
            f"pad_token_id is {pad}, and {ids}",
            where=str(folder / "config.json"),
            fix="set pad_token_id to an id that the model has (Qwen2.5: that of <|endoftext|>), or to null",
        )
    path = folder / "tokenizer.json"
    added = read_json(path, "a tokenizer").get("added_tokens") if path.is_file() else None
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and isinstance(token.get("id"), int) and token["id"] >= vocab_size:
            raise ConfigError(
                f"the token {str(token.get('content'))[:40]!r} has the id {token['id']}, and {ids}",
                where=str(path),
                fix="take the tokenizer as it was published, and for padding a token that it has "
                "(Qwen2.5: <|endoftext|>)",
            )


def config_from_huggingface(hf: Mapping[str, Any]) -> tuple[str, TransformerConfig]:
    """(family, config) from a `config.json`.

    Raises:
        ConfigError: a family, a key or a value that is not supported; nothing is ignored silently.
    """
    family = str(hf.get("model_type"))
    if family not in DEFAULTS:
        raise ConfigError(f"model_type {family!r} is not supported", fix=f"supported: {', '.join(DEFAULTS)}")
    keys = Keys(hf, family)
    fields = _gpt2(keys) if family == "gpt2" else _gated(keys)
    fields["untie_embeddings_and_output_weights"] = not keys["tie_word_embeddings"]
    keys.finish()
    return family, TransformerConfig.from_dict(fields)


def _named(keys: Keys, names: Mapping[str, str]) -> dict[str, Any]:
    return {ours: keys[theirs] for theirs, ours in names.items() if keys[theirs] is not None}


def _gpt2(keys: Keys) -> dict[str, Any]:
    keys.only("scale_attn_by_inverse_layer_idx", False)
    keys.only("scale_attn_weights", True)
    keys.only("reorder_and_upcast_attn", False)
    return {
        **_named(keys, GPT2),
        "normalization": "LayerNorm",
        "position_embedding_type": "learned_absolute",
        "activation": _activation(keys["activation_function"], ACTIVATIONS, "the MLP of GPT-2"),
    }


def _gated(keys: Keys) -> dict[str, Any]:
    """Everything but GPT-2: RMSNorm, RoPE, a gated MLP."""
    family = keys.family
    fields = {
        **_named(keys, COMMON),
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "activation": _activation(keys["hidden_act"], GATES, "a gated MLP"),
        "add_bias_linear": _bias(keys),
        "add_qkv_bias": family == "qwen2" or (family == "qwen2_moe" and bool(keys["qkv_bias"])),
        "qk_layernorm": family in ("qwen3", "qwen3_moe"),
        "sliding_window": _window(keys),
        **_rope(keys),
    }
    return {**fields, **(MIXTURES[family](keys) if family in MIXTURES else {})}


def _bias(keys: Keys) -> bool:
    """Biases everywhere or nowhere."""
    attention, mlp = bool(keys.get("attention_bias")), bool(keys.get("mlp_bias"))
    if attention != mlp:
        raise ConfigError(
            f"attention_bias={attention} with mlp_bias={mlp} is not supported", fix="use a model with both or neither"
        )
    return attention


def _activation(name: str, known: Mapping[str, str], where: str) -> str:
    if name not in known:
        raise ConfigError(f"activation {name!r} is not supported in {where}", fix=f"supported: {', '.join(known)}")
    return known[name]


def _window(keys: Keys) -> int | None:
    """One window for all layers, or none. Qwen can mix layers with and without; that is refused."""
    window = keys.get("sliding_window")
    if keys.family.startswith("qwen"):
        layers, windowed = keys["num_hidden_layers"], keys["use_sliding_window"]
        if keys.family == "qwen3_moe":  # its class has no `layer_types`: all layers are alike
            keys.only("layer_types", ["sliding_attention" if windowed else "full_attention"] * layers)
            return int(window) if windowed and window is not None else None
        said = keys["layer_types"]
        if not windowed:
            return None
        kinds = set(said or _windowed_layers(keys.family, layers, keys["max_window_layers"]))
        if len(kinds) > 1:
            raise ConfigError(
                f"layers with different attention ({', '.join(sorted(kinds))}) are not supported",
                fix="use a model with one kind",
            )
        window = window if kinds == {"sliding_attention"} else None
    return None if window is None else int(window)


def _windowed_layers(family: str, layers: int, first: int) -> list[str]:
    """Which layers see a window where the file does not say; by `max_window_layers`, in each family differently."""
    seen = [i >= first for i in range(layers)]
    if family == "qwen2_moe":
        seen = [i % 2 == 0 and i < first for i in range(layers)]
    return ["sliding_attention" if windowed else "full_attention" for windowed in seen]


def _rope(keys: Keys) -> dict[str, Any]:
    """RoPE's fields; transformers 5 keeps them in `rope_parameters`, before that in `rope_theta` and `rope_scaling`."""
    given, older = keys.get("rope_parameters"), keys.get("rope_scaling")
    scaling = Keys(dict(older or given or {}), "rope")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    scaling.get("type")
    fields: dict[str, Any] = {"rotary_base": float(scaling.get("rope_theta", keys["rope_theta"]))}
    for table in (scaling, keys):
        table.only("partial_rotary_factor", 1.0, f"is not {keys.family}'s: transformers turns its heads whole or fails")
    kinds = ("default", "yarn") if keys.family == "deepseek_v3" else ("default", "linear", "llama3", "yarn")
    if kind not in kinds:
        raise ConfigError(f"rope_type {kind!r} is not supported in {keys.family}", fix=f"supported: {', '.join(kinds)}")
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
        fields.update(_yarn(scaling))
    scaling.finish()
    return fields


def _yarn(scaling: Keys) -> dict[str, Any]:
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
