"""The folder of a model as Hugging Face publishes it: opened, with what is wrong with it; and written.

| file                                     | read                                                                |
|------------------------------------------|---------------------------------------------------------------------|
| `config.json`                            | always                                                              |
| `model.safetensors`                      | the weights                                                         |
| or `model.safetensors.index.json`        | which files hold them                                               |
| or `model-00001-of-00002.safetensors`    | the same without an index: its names are compared with the model's  |
| two of these                             | refused: transformers takes the first, others the second            |
| `adapter_config.json`                    | refused: transformers would add the adapter                         |
| `pytorch_model*.bin`, `consolidated*`, other `*.safetensors` | no, as in transformers                          |

A download that broke off, an edit that broke the JSON, a weight that is not a number: each is an error that names the
file. Opening reads headers only; the numbers are read as they are asked for.

What is written has files as large as `max_shard_size` allows, in the order of the model, and no more than one tensor is
in memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from minimegatron.checkpoint.disk import write_durable
from minimegatron.checkpoint.hf_config import read_config, read_json
from minimegatron.checkpoint.huggingface import as_ours
from minimegatron.checkpoint.origin import copy_companions
from minimegatron.checkpoint.shard_file import write_shard
from minimegatron.checkpoint.sources import Described, Prefixed, SafetensorsFiles, Source, View
from minimegatron.checkpoint.staged import files_in, staged
from minimegatron.config import TransformerConfig
from minimegatron.errors import CheckpointError
from minimegatron.models.families import FAMILIES

SINGLE, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def open_published(folder: Path) -> tuple[str, TransformerConfig, View]:
    """(family, config, its tensors under our names).

    Raises:
        CheckpointError: a file is missing, cut short or not what its name says; a tensor is missing or left over.
        ConfigError: a model that is not supported.
    """
    family, config = read_config(folder)
    weights: Source = SafetensorsFiles(_weight_files(folder))
    prefix, words = FAMILIES[family].prefix, FAMILIES[family].tensors[0].theirs[0]
    if prefix and words.removeprefix(prefix) in weights.tensors:  # as OpenAI's is published: saved without its head
        weights = Prefixed(weights, prefix)
    return family, config, as_ours(weights, config, family)


def _weight_files(folder: Path) -> list[Path]:
    """The files of the one set of weights that there is.

    Raises:
        CheckpointError: there is none, or more than one; or an adapter is to be added to it.
    """
    if (folder / ADAPTER).exists():
        raise CheckpointError(
            f"{ADAPTER}: an adapter lies there, which transformers adds to the weights",
            where=str(folder),
            fix="merge it with peft (merge_and_unload, save_pretrained), or move the adapter's files away",
        )
    index, single = folder / INDEX, folder / SINGLE
    shards = [file for file in sorted(folder.glob("model-*.safetensors")) if _SHARD.fullmatch(file.name)]
    named = _named_by(index) if index.exists() else None
    beside = index if named else next(iter(shards), None)
    if single.exists() and beside is not None and named != [SINGLE]:  # some have an index of one file
        raise CheckpointError(
            f"two sets of weights: {single.name} and {beside.name}",
            where=str(folder),
            fix="move away the one that is left from another download or save; transformers reads the first",
        )
    if named:
        return [folder / name for name in named]
    if single.exists():
        return [single]
    if not shards:
        others = [
            f.name for f in sorted(folder.glob("*")) if f.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
        ]
        there = f": there are {', '.join(others[:3])}" if others else ""
        raise CheckpointError(
            f"no {SINGLE}, and no {INDEX}{there}",
            where=str(folder),
            fix="give a folder as transformers' save_pretrained writes it: config.json and safetensors",
        )
    return shards


def _named_by(index: Path) -> list[str]:
    said = read_json(index, "an index with a weight_map").get("weight_map")
    if not (isinstance(said, dict) and said and all(isinstance(name, str) for name in said.values())):
        raise CheckpointError(f"{index} has no weight_map", fix="download the file again")
    names = sorted(set(said.values()))
    if any(Path(name).name != name for name in names):
        raise CheckpointError(f"{index} names files outside of its folder", fix="download the file again")
    return names


# ---------------------------------------------------------------------------------------------------- writing


def in_files(tensors: Iterable[tuple[str, Described]], most: int) -> Iterator[list[tuple[str, Described]]]:
    """Tensors in their order, as many to a file as `most` bytes allow; one that is larger has a file of its own."""
    file: list[tuple[str, Described]] = []
    filled = 0
    for name, described in tensors:
        if file and filled + described.nbytes > most:
            yield file
            file, filled = [], 0
        file.append((name, described))
        filled += described.nbytes
    if file:
        yield file


def write_published(
    source: Source, config: Mapping[str, Any], folder: Path, max_shard_size: int, companions: Path | None = None
) -> list[str]:
    """Write a model's folder.

    Args:
        source: tensors under their names.
        config: of `config.json`.
        folder: which is not there yet.
        max_shard_size: bytes of a file.
        companions: folder whose tokenizer and other small files are copied.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: the folder is there.
    """
    with staged(folder) as hidden:
        _write(source, config, hidden, max_shard_size)
        if companions is not None:
            copy_companions(companions, hidden)
    return files_in(folder)


def _write(source: Source, config: Mapping[str, Any], folder: Path, max_shard_size: int) -> None:
    files = list(in_files(source.tensors.items(), max_shard_size))
    weight_map: dict[str, str] = {}
    for i, tensors in enumerate(files):
        name = SINGLE if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        described = dict(tensors)
        write_durable(
            folder / name,
            sum(one.nbytes for one in described.values()),
            lambda file, of=described: write_shard(file, of, {"format": "pt"}, source.read),  # type: ignore[misc]
        )
        weight_map |= dict.fromkeys(described, name)
    if len(files) > 1:
        total = sum(d.nbytes for d in source.tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / INDEX, index)
    _write_json(folder / "config.json", config)


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    text = (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()
    write_durable(path, len(text), lambda file: file.write(text))
