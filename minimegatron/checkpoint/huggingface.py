"""A published model's folder: Hugging Face's tensors under our names, ours under theirs; read and written.

The problem in a sentence: the same weights are stored under other names, in other pieces, sometimes transposed.

Each row of a family's table (`models/families`) pairs one logical tensor of ours with the tensors of theirs that hold
the same numbers, and says how they are arranged. From that a list of `Copy` is made: these rows of ours are those rows
of theirs (`checkpoint/sources.py`). Read from right to left it imports, from left to right it exports, so the two
cannot disagree; and a rank that holds a part of ours reads that part of theirs.

| how         | our rows are                                                                                     |
|-------------|--------------------------------------------------------------------------------------------------|
| `stack`     | theirs, one after the other: gate [f, h] above up [f, h] is [2 f, h]; one alone is itself         |
| `pack`      | per group of q [a d, h], k [g d, h], v [g d, h]: its query heads, its key head, its value head    |
| `transpose` | the columns of theirs: GPT-2 stores `[in, out]` (Conv1D), we store `[out, in]`                    |
| `conv_pack` | columns of GPT-2's `[h, 3h]` of all q, all k, all v, packed                                       |

The packing is what makes tensor parallelism a plain cut (`layers/attention/self_attention.py`). Hugging Face's Llama
weights are already in RoPE's half-split convention, so no permutation of rows is needed.

| file                                     | read                                                                |
|------------------------------------------|---------------------------------------------------------------------|
| `config.json`                            | always                                                              |
| `model.safetensors`                      | the weights                                                         |
| or `model.safetensors.index.json`        | the names of the files with the weights                             |
| or `model-00001-of-00002.safetensors`    | the same without an index: its names are compared with the model's  |
| two of these                             | refused: transformers takes the first, others the second            |
| `adapter_config.json`                    | refused: transformers would add the adapter                         |
| `pytorch_model*.bin`, `consolidated*`, other `*.safetensors` | no, as in transformers                          |

Quantised weights are dequantised (`checkpoint/compressed_tensors`).

Opening a folder reads headers only. Written files are as large as `max_shard_size` allows, in the order of the model,
and no more than one tensor is in memory. Megatron's counterpart is Megatron-Bridge.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from minimegatron.checkpoint.companions import copy_companions, to_json
from minimegatron.checkpoint.compressed_tensors import Dequantised, Words, dequantised, linear_weights, scheme_of
from minimegatron.checkpoint.disk import files_in, staged, write_bytes
from minimegatron.checkpoint.hf_config import QUANTIZED, read_config, read_json
from minimegatron.checkpoint.sources import (
    Copy,
    Described,
    InMemory,
    Prefixed,
    Rows,
    SafetensorsFiles,
    Source,
    View,
    blocks,
    in_files,
    shown,
    whole,
    write_file,
)
from minimegatron.config import TransformerConfig
from minimegatron.errors import CheckpointError
from minimegatron.models.families import FAMILIES
from minimegatron.models.families.family import Family, Match

_WITHOUT_WEIGHTS = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")  # buffers that old files have
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _packed(config: TransformerConfig, at_k: int, at_v: int) -> Iterator[tuple[int, int, int]]:
    """(which of q, k and v, its first row, rows) in our order; k and v begin at the rows `at_k` and `at_v`."""
    d, queries = config.kv_channels, config.queries_per_group * config.kv_channels
    for group in range(config.num_query_groups):
        yield from ((0, group * queries, queries), (1, at_k + group * d, d), (2, at_v + group * d, d))


def _pieces(match: Match, rows: int, config: TransformerConfig) -> list[tuple[int, int, int]]:
    """(which of theirs, its first row, how many rows), one after the other in our tensor of `rows` rows."""
    if match.how == "pack":
        return list(_packed(config, 0, 0))
    if match.how == "conv_pack":
        q, k = (n * config.kv_channels for n in (config.num_attention_heads, config.num_query_groups))
        return [(0, start, length) for _, start, length in _packed(config, q, q + k)]
    rows_each = rows // len(match.theirs)
    return [(i, 0, rows_each) for i in range(len(match.theirs))]


def copies(match: Match, shape: tuple[int, ...], config: TransformerConfig) -> Iterator[Copy]:
    """The rows of theirs of which our rows consist.

    Args:
        match: a row of the table.
        shape: shape of our tensor.
    """
    stack = () if match.expert is None else (match.expert,)
    dims, at = shape[len(stack) :], 0
    columns = match.how in ("transpose", "conv_pack") and len(dims) == 2
    for which, start, length in _pieces(match, dims[0], config):
        theirs = Rows(match.theirs[which], start, start + length, columns=columns)
        yield Copy(Rows(match.ours, at, at + length, stack), theirs)
        at += length


def _their_shapes(row_copies: Iterable[Copy], shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """The shapes of their tensors, given that these copies are all of them."""
    shapes: dict[str, list[int]] = {}
    for ours, theirs in row_copies:
        dims = list(shape[len(ours.matrix) :])
        dims[0] = max(theirs.stop, shapes.get(theirs.name, [0])[-1 if theirs.columns else 0])
        shapes[theirs.name] = dims[::-1] if theirs.columns else dims
    return {name: tuple(dims) for name, dims in shapes.items()}


def _our_shape(match: Match, source: Source) -> tuple[int, ...]:
    """The shape of our tensor, from the shape of their first tensor and the rows of all."""
    dims = list(source.tensors[match.theirs[0]].shape)
    if match.how in ("transpose", "conv_pack"):
        dims.reverse()
    if len(match.theirs) > 1:
        dims[0] = sum(source.tensors[name].shape[0] for name in match.theirs)
    return tuple(dims) if match.expert is None else (match.stacked, *dims)


def as_ours(theirs: Source, config: TransformerConfig, family: str) -> View:
    """Their tensors under our names.

    Raises:
        CheckpointError: listing every tensor that is missing, unexpected, of a shape that does not fit the others, or
            of a dtype that no weight has.
    """
    tensors: dict[str, Described] = {}
    row_copies: list[Copy] = []
    problems: list[str] = []
    used: set[str] = set()
    for match in FAMILIES[family].matches(config):
        missing = [name for name in match.theirs if name not in theirs.tensors or not theirs.tensors[name].shape]
        problems += [f"missing {name}" for name in missing]  # what is a single number is none of these tensors
        used.update(match.theirs)
        if missing:
            continue
        shape = _our_shape(match, theirs)
        of_match = list(copies(match, shape, config))
        for name, wanted in _their_shapes(of_match, shape).items():
            dtype, stored_shape = theirs.tensors[name]
            if stored_shape != wanted:
                problems.append(f"{name} has shape {stored_shape}, and {wanted} fits the others and the configuration")
            if dtype not in _FLOATS:
                problems.append(f"{name} is {dtype}, and config.json has no {QUANTIZED} that says what it means")
        dtypes = {theirs.tensors[name].dtype for name in match.theirs}
        if len(dtypes) > 1:
            problems.append(f"{', '.join(match.theirs)} have different dtypes")
        described = Described(dtypes.pop(), shape)
        if tensors.setdefault(match.ours, described) != described:
            problems.append(f"{match.theirs[0]} is not like the same matrix of expert 0")
        row_copies += of_match
    tied = set() if config.untie_embeddings_and_output_weights else {"lm_head.weight"}
    extra = (name for name in theirs.tensors if name not in used | tied and not name.endswith(_WITHOUT_WEIGHTS))
    problems += [f"left over {name}" for name in sorted(extra)]
    if problems:
        raise CheckpointError(
            f"this is not a {family} model of the given config:{shown(problems)}",
            fix="check model_type and config",
        )
    if tied:
        _check_tied(theirs, FAMILIES[family].matches(config))
    return View(theirs, tensors, row_copies)


def _check_tied(theirs: Source, table: Iterable[Match]) -> None:
    """Check that a head that is stored beside a tied embedding equals it: else it is unknown which model was meant."""
    words = next(match.theirs[0] for match in table if match.ours == "embedding.word_embeddings.weight")
    head = theirs.tensors.get("lm_head.weight")
    if head is None:
        return
    boxes = [tuple(box) for box in blocks(whole(head.shape), head.dtype.itemsize)]
    if head.shape != theirs.tensors[words].shape or not all(
        torch.equal(theirs.read("lm_head.weight", box), theirs.read(words, box)) for box in boxes
    ):
        raise CheckpointError(
            "tie_word_embeddings is true, and lm_head.weight differs from the embedding",
            fix="remove lm_head.weight from the file, or set tie_word_embeddings to false in config.json",
        )


def as_theirs(ours: Source, config: TransformerConfig, family: str) -> View:
    """Our logical tensors under their names; a tied output layer is written once, as they do.

    Raises:
        CheckpointError: naming every tensor that is missing, or for which the family has no place.
    """
    tensors: dict[str, Described] = {}
    row_copies: list[Copy] = []
    table = list(FAMILIES[family].matches(config))
    known = {match.ours for match in table}
    problems = [f"missing {name}" for name in sorted(known - ours.tensors.keys())]
    problems += [f"{name}: a {family} model has no place for it" for name in sorted(ours.tensors.keys() - known)]
    if problems:
        raise CheckpointError(
            f"these tensors are not a {family} model:{shown(problems)}",
            fix="give all logical tensors of the model, and the configuration that it was trained with",
        )
    for match in table:
        dtype, shape = ours.tensors[match.ours]
        of_match = list(copies(match, shape, config))
        tensors |= {name: Described(dtype, dims) for name, dims in _their_shapes(of_match, shape).items()}
        row_copies += [copy.turned() for copy in of_match]
    return View(ours, tensors, row_copies)


_STACK = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up_proj|down_proj)")


def _as_published(state: Mapping[str, torch.Tensor], family: Family) -> dict[str, torch.Tensor]:
    """A state dict with the names that files have: stacks of experts taken apart (views), and what was renamed.

    | published                                               | in transformers 5 while a model is in memory |
    |---------------------------------------------------------|----------------------------------------------|
    | a gate, an up and a down projection of every expert     | `mlp.experts.gate_up_proj`, `down_proj`      |
    """
    matrices = {len(row.theirs): row.theirs for row in family.tensors if "{e}" in row.theirs[0]}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        stack = _STACK.fullmatch(name) if matrices else None
        if stack is None:
            for there, published in family.renamed.items():
                name = name.replace(there, published)
            found[name] = tensor
            continue
        theirs = matrices[1 if stack[2] == "down_proj" else 2]
        for e, matrix in enumerate(tensor):
            for one, part in zip(theirs, matrix.chunk(len(theirs)), strict=True):
                found[one.replace("{}", stack[1]).replace("{e}", str(e))] = part
    return found


def state_from_huggingface(
    state: Mapping[str, torch.Tensor], config: TransformerConfig, family: str
) -> dict[str, torch.Tensor]:
    """Our logical tensors from a Hugging Face state dict, also that of a model in memory.

    Raises:
        CheckpointError: see `as_ours`.
    """
    view = as_ours(InMemory(_as_published(state, FAMILIES[family])), config, family)
    return {name: view.read(name) for name in view.tensors}


def state_to_huggingface(
    state: Mapping[str, torch.Tensor], config: TransformerConfig, family: str
) -> dict[str, torch.Tensor]:
    """A Hugging Face state dict from our logical tensors.

    Raises:
        CheckpointError: see `as_theirs`.
    """
    view = as_theirs(InMemory(state), config, family)
    return {name: view.read(name).contiguous() for name in view.tensors}


SINGLE, INDEX, ADAPTER = "model.safetensors", "model.safetensors.index.json", "adapter_config.json"
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


def open_published(folder: Path) -> tuple[str, TransformerConfig, View]:
    """(family, config, its tensors under our names).

    Raises:
        CheckpointError: a file is missing, truncated or not what its name says; a tensor is missing or unexpected.
        ConfigError: a model that is not supported.
    """
    family, config = read_config(folder)
    weights: Source = SafetensorsFiles(_weight_files(folder))
    weights = dequantised(weights, read_json(folder / "config.json", "a folder with config.json").get(QUANTIZED))
    prefix, words = FAMILIES[family].prefix, FAMILIES[family].tensors[0].theirs[0]
    if prefix and words.removeprefix(prefix) in weights.tensors:  # as OpenAI's is published: saved without its head
        weights = Prefixed(weights, prefix)
    return family, config, as_ours(weights, config, family)


def open_words(folder: Path) -> Words | None:
    """The packed weights of a published folder, as they are; None where none is packed.

    Raises:
        CheckpointError, ConfigError: as `open_published`.
    """
    keys = read_json(folder / "config.json", "a folder with config.json").get(QUANTIZED)
    if keys is None or not (scheme := scheme_of(keys)).packs:
        return None
    family, config = read_config(folder)
    files = SafetensorsFiles(_weight_files(folder))
    q, scales = (Dequantised(files, scheme, part) for part in ("q", "scale"))
    quantised = {f"{stem}.weight" for stem in q.stems} & linear_weights(config, family)[0]
    names = {match.ours for match in FAMILIES[family].matches(config) if quantised.issuperset(match.theirs)}
    return Words(scheme, frozenset(names), as_ours(q, config, family), as_ours(scales, config, family))


def _weight_files(folder: Path) -> list[Path]:
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


# ---------------------------------------------------------------------------------------------------- writing


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
