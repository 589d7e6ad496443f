"""The folder of a model that Hugging Face has published: its configuration and its weights, or what is wrong with them.

| file                           | read                                                                          |
|--------------------------------|-------------------------------------------------------------------------------|
| `config.json`                  | always                                                                        |
| `model.safetensors.index.json` | which files hold the weights, where there is one                              |
| `model*.safetensors`           | else; not `consolidated*.safetensors`, the same weights in the author's names |

A download that broke off, an edit that broke the JSON, a weight that is not a number: each is an error that names the
file, before a model exists.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from minimegatron.checkpoint.hf_config import config_from_huggingface
from minimegatron.checkpoint.huggingface import state_from_huggingface
from minimegatron.config import TransformerConfig
from minimegatron.errors import CheckpointError


def read_folder(folder: Path) -> tuple[str, TransformerConfig, dict[str, torch.Tensor]]:
    """(family, config, logical tensors of ours) of a published model.

    Args:
        folder: with `config.json` and `*.safetensors`.

    Raises:
        CheckpointError: a file is missing, cut short or not what its name says, or a weight is not finite.
        ConfigError: a model that is not supported.
    """
    family, config = config_from_huggingface(_json(folder / "config.json", "a folder with config.json"))
    tensors: dict[str, torch.Tensor] = {}
    for file in _weight_files(folder):
        try:
            tensors.update(load_file(file))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{file} cannot be read ({file.stat().st_size:,} bytes): {error}" if file.exists() else f"no {file}",
                fix="download the file again; it is cut short or damaged",
            ) from error
    state = state_from_huggingface(tensors, config, family)
    broken = [name for name, tensor in state.items() if not tensor.isfinite().all()]
    if broken:
        raise CheckpointError(
            f"{folder}: {len(broken)} tensors hold numbers that are not finite, the first is {broken[0]}",
            fix="download the files again; the model cannot say anything but NaN",
        )
    return family, config, state


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        said = _json(index, "an index with a weight_map").get("weight_map")
        if isinstance(said, dict) and said:
            return [folder / name for name in sorted(set(said.values()))]
        raise CheckpointError(f"{index} has no weight_map", fix="download the file again")
    files = sorted(f for f in folder.glob("*.safetensors") if not f.name.startswith("consolidated"))
    if not files:
        raise CheckpointError(f"no *.safetensors in {folder}", fix="give a folder with config.json and *.safetensors")
    return files


def _json(file: Path, wanted: str) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"no {file}", fix=f"give {wanted}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}", fix="download the file again") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{file} holds a {type(found).__name__}", fix="download the file again")
    return found
