"""A published model's folder: which files are its weights, opened under our names; and written.

| file                                     | read                                                                |
|------------------------------------------|---------------------------------------------------------------------|
| `config.json`                            | always                                                              |
| `model.safetensors`                      | the weights                                                         |
| or `model.safetensors.index.json`        | the names of the files with the weights                             |
| or `model-00001-of-00002.safetensors`    | the same without an index: its names are compared with the model's  |
| two of these                             | refused: transformers takes the first, others the second            |
| `adapter_config.json`                    | refused: transformers would add the adapter                         |
| `pytorch_model*.bin`, `consolidated*`, other `*.safetensors` | no, as in transformers                          |

Quantised weights are dequantised (`checkpoint/compressed_tensors`, `checkpoint/mxfp4`).

Opening a folder reads headers only. Written files are as large as `max_shard_size` allows, in the order of the model,
and no more than one tensor is in memory.

`checkpoint/huggingface` says which of their tensors are which of ours.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minimegatron.checkpoint.companions import copy_companions, to_json
from minimegatron.checkpoint.compressed_tensors import (
    Dequantised,
    Words,
    dequantised,
    is_mxfp4,
    linear_weights,
    scheme_of,
)
from minimegatron.checkpoint.disk import files_in, staged, write_bytes
from minimegatron.checkpoint.hf_config import QUANTIZED, read_config, read_json
from minimegatron.checkpoint.huggingface import as_ours
from minimegatron.checkpoint.sources import Renamed, SafetensorsFiles, Source, View, in_files, write_file
from minimegatron.config import TransformerConfig
from minimegatron.errors import CheckpointError
from minimegatron.models.families import FAMILIES

SINGLE, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def open_published(folder: Path) -> tuple[str, TransformerConfig, View]:
    """(family, config, its tensors under our names).

    Raises:
        CheckpointError: a file is missing, truncated or not what its name says; a tensor is missing or unexpected.
        ConfigError: a model that is not supported.
    """
    family, config = read_config(folder)
    weights: Source = SafetensorsFiles(weight_files(folder))
    weights = dequantised(weights, read_json(folder / "config.json", "a folder with config.json").get(QUANTIZED))
    prefix, older, words = FAMILIES[family].prefix, FAMILIES[family].older, FAMILIES[family].tensors[0].theirs[0]
    bare = prefix and words.removeprefix(prefix) in weights.tensors  # as OpenAI's is published: saved without its head
    if bare or older:
        weights = Renamed(weights, prefix if bare else "", older)
    return family, config, as_ours(weights, config, family)


def open_words(folder: Path) -> Words | None:
    """The packed weights of a published folder, as they are; None where none is packed.

    Raises:
        CheckpointError, ConfigError: as `open_published`.
    """
    keys = read_json(folder / "config.json", "a folder with config.json").get(QUANTIZED)
    if keys is None or is_mxfp4(keys) or not (scheme := scheme_of(keys)).packs:
        return None
    family, config = read_config(folder)
    files = SafetensorsFiles(weight_files(folder))
    q, scales = (Dequantised(files, scheme, part) for part in ("q", "scale"))
    quantised = {f"{stem}.weight" for stem in q.stems} & linear_weights(config, family)[0]
    names = {match.ours for match in FAMILIES[family].matches(config) if quantised.issuperset(match.theirs)}
    return Words(scheme, frozenset(names), as_ours(q, config, family), as_ours(scales, config, family))


def weight_files(folder: Path) -> list[Path]:
    """The files of the one set of weights.

    Raises:
        CheckpointError: there is none, or more than one; or there is an adapter.
    """
    if (folder / ADAPTER).exists():
        raise CheckpointError(
            f"{ADAPTER}: an adapter lies there, which transformers adds to the weights",
            where=str(folder),
            fix="merge it with peft (merge_and_unload, save_pretrained), or move the adapter's files away",
        )
    index, single = folder / INDEX, folder / SINGLE
    shards = [file for file in sorted(folder.glob("model-*.safetensors")) if _SHARD.fullmatch(file.name)]
    indexed = _named_by(index) if index.exists() else None
    second_set = index if indexed else next(iter(shards), None)
    if single.exists() and second_set is not None and indexed != [SINGLE]:  # some have an index of one file
        raise CheckpointError(
            f"two sets of weights: {single.name} and {second_set.name}",
            where=str(folder),
            fix="move away the one that is left from another download or save; transformers reads the first",
        )
    if indexed:
        return [folder / name for name in indexed]
    if single.exists():
        return [single]
    if not shards:
        others = [
            f.name for f in sorted(folder.glob("*")) if f.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf")
        ]
        listed = f": there are {', '.join(others[:3])}" if others else ""
        raise CheckpointError(
            f"no {SINGLE}, and no {INDEX}{listed}",
            where=str(folder),
            fix="give a folder as transformers' save_pretrained writes it: config.json and safetensors",
        )
    return shards


def _named_by(index: Path) -> list[str]:
    weight_map = read_json(index, "an index with a weight_map").get("weight_map")
    if not (isinstance(weight_map, dict) and weight_map and all(isinstance(name, str) for name in weight_map.values())):
        raise CheckpointError(f"{index} has no weight_map", fix="download the file again")
    names = sorted(set(weight_map.values()))
    if any(Path(name).name != name for name in names):
        raise CheckpointError(f"{index} names files outside of its folder", fix="download the file again")
    return names


def write_published(
    source: Source, config: Mapping[str, Any], folder: Path, max_shard_size: int, companions: Path | None = None
) -> list[str]:
    """Write a model's folder.

    Args:
        source: tensors under their names.
        config: contents of `config.json`.
        folder: must not exist.
        max_shard_size: bytes of a file.
        companions: folder whose tokenizer and other small files are copied.

    Returns:
        The names of the files.

    Raises:
        CheckpointError: the folder exists.
    """
    with staged(folder) as hidden:
        _write(source, config, hidden, max_shard_size)
        if companions is not None:
            copy_companions(companions, hidden)
    return files_in(folder)


def _write(source: Source, config: Mapping[str, Any], folder: Path, max_shard_size: int) -> None:
    files = in_files(source.tensors, max_shard_size)
    weight_map: dict[str, str] = {}
    for i, tensors in enumerate(files):
        name = SINGLE if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        write_file(folder / name, tensors, {"format": "pt"}, source.read)
        weight_map |= dict.fromkeys(tensors, name)
    if len(files) > 1:
        total = sum(d.nbytes for d in source.tensors.values())
        write_bytes(folder / INDEX, to_json({"metadata": {"total_size": total}, "weight_map": weight_map}))
    write_bytes(folder / "config.json", to_json(config))
