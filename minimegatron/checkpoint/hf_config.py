"""The `config.json` of a published model: found, and read by its family (`models/families`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minimegatron.config import TransformerConfig
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.models.families import FAMILIES


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
    if family not in FAMILIES:
        raise ConfigError(f"model_type {family!r} is not supported", fix=f"supported: {', '.join(FAMILIES)}")
    return family, FAMILIES[family].config_from_hf(hf)
