"""`config.json` of a published model, both ways.

The problem in a sentence: a folder whose export has forgotten a field loads, runs and computes something else.

Each family reads and writes its own keys (`models/families`). An export is accepted only after it has been read back:
every field of `TransformerConfig` whose kind is `MODEL` (`config/fields`) must have its old value. Fields about how the
model is computed, initialised and trained are not published.

    config --config_to_hf--> config.json --config_from_hf--> config'        differing(config, config') == []
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minimegatron.config import TransformerConfig
from minimegatron.config.same_model import differing
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.models.families import FAMILIES, family_named

QUANTIZED = "quantization_config"  # how weights are stored: `checkpoint/compressed_tensors`; no part of the model


def read_json(file: Path, wanted: str) -> dict[str, Any]:
    """A JSON file that holds a table; `wanted` says in the error what the folder should be.

    Raises:
        CheckpointError: the file does not exist, or holds something else.
    """
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"no {file}", fix=f"give {wanted}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}", fix="download the file again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{file} holds a {type(value).__name__}", fix="download the file again")
    return value


def is_published(folder: Path) -> bool:
    """Whether this is the folder of a published model.

    Raises:
        CheckpointError: it is also a folder of checkpoints: which of the two models is meant?
    """
    published = (folder / "config.json").is_file()
    checkpoint = next((path.parent.name for path in folder.glob("iter_*/manifest.json")), None) if published else None
    if checkpoint is not None:
        raise CheckpointError(
            f"two models: config.json of a published one, and the checkpoint {checkpoint}",
            where=str(folder),
            fix="move one of them to a folder of its own",
        )
    return published


def read_config(folder: Path) -> tuple[str, TransformerConfig]:
    """(family, config) of a published model's folder, however its weights are stored.

    Raises:
        CheckpointError: `config.json` is missing or no table.
        ConfigError: see `config_from_huggingface`; or a pad token outside of the vocabulary.
    """
    hf = read_json(folder / "config.json", "a folder with config.json")
    hf.pop(QUANTIZED, None)
    family, config = config_from_huggingface(hf)
    check_pad_token(hf, config.vocab_size, folder)
    return family, config


def check_pad_token(hf: Mapping[str, Any], vocab_size: int, folder: Path) -> None:
    """Check that the pad token, and every token that was added to the tokenizer, has a row in the embedding.

    A tokenizer that was given a new pad token, `add_special_tokens({"pad_token": "[PAD]"})`, has an id more than the
    model has rows; transformers cannot build such a model, and a batch that is padded with it reads outside of the
    matrix.

    Raises:
        ConfigError: a token has no row.
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
    if family not in FAMILIES:
        raise ConfigError(f"model_type {family!r} is not supported", fix=f"supported: {', '.join(FAMILIES)}")
    return family, FAMILIES[family].config_from_hf(hf)


TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def config_to_huggingface(
    config: TransformerConfig,
    family: str | None = None,
    like: Mapping[str, Any] | None = None,
    tokens: Mapping[str, Any] | None = None,
) -> tuple[str, dict[str, Any]]:
    """(family, contents of `config.json`).

    Args:
        config: the model.
        family: its `model_type`; default the first that can describe it.
        like: the earlier `config.json` of the model: keys that do not affect the model are kept.
        tokens: ids that begin, end and pad a document, if there is no `like`.

    Raises:
        ConfigError: naming the fields that the family, or every family, cannot describe.
    """
    if like is not None:
        like = {key: value for key, value in like.items() if key != QUANTIZED}  # what is written here is not quantised
        name_in_file, published = config_from_huggingface(like)
        differences = differing(config, published)
        if differences or family not in (None, name_in_file):
            raise ConfigError(
                f"the model is not the {name_in_file} that config.json describes:\n  "
                + "\n  ".join(differences or [str(family)]),
                fix="name the folder that the model came from, or --hf-model none for a config.json of its own",
            )
        keys = {
            **FAMILIES[name_in_file].kept(like, config),
            "torch_dtype": DTYPES[config.params_dtype],
            "dtype": DTYPES[config.params_dtype],
        }
        kept = config_from_huggingface(keys)[1].max_position_embeddings
        if config.max_position_embeddings != kept:  # it was trained on longer sequences
            keys["max_position_embeddings"] = config.max_position_embeddings
            if differences := differing(config, config_from_huggingface(keys)[1]):
                raise ConfigError(
                    "config.json with max_position_embeddings "
                    f"{config.max_position_embeddings} would be another model:\n  " + "\n  ".join(differences),
                    fix="--hf-model none for a config.json of its own",
                )
        return name_in_file, keys
    extra = {"torch_dtype": DTYPES[config.params_dtype], **{name: (tokens or {}).get(name) for name in TOKENS}}
    differences_of: dict[str, list[str]] = {}
    unreadable: dict[str, list[str]] = {}  # what a family cannot even write down
    candidates = [one for one in FAMILIES.values() if one.is_like(config)] if family is None else [family_named(family)]
    for candidate in candidates:
        name = candidate.name
        try:
            keys_of_family = {**candidate.config_to_hf(config), **extra}
            differences_of[name] = differing(config, config_from_huggingface(keys_of_family)[1])
        except ConfigError as error:
            unreadable[name] = [error.what]
        if differences_of.get(name) == []:
            return name, keys_of_family
    differences_of = differences_of or unreadable
    name = min(differences_of, key=lambda name: len(differences_of[name]))
    raise ConfigError(
        f"{'no published family is this model; the nearest, ' if family is None else ''}{name}, cannot say\n  "
        + "\n  ".join(differences_of[name]),
        fix="train with these fields as the family has them, or keep the model as it is: --to ours, --to torch_dist",
    )
