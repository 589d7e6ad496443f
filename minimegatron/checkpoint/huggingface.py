"""Hugging Face's tensors under our names, and ours under theirs.

The problem in a sentence: the same weights are stored under other names, in other pieces, sometimes transposed.

Each row of a family's table (`models/families`) pairs one logical tensor of ours with the tensors of theirs that hold
the same numbers, and says how they are arranged. From that a list of `Copy` is made: these rows of ours are those rows
of theirs (`checkpoint/sources.py`). Read from right to left it imports, from left to right it exports, so the two
cannot disagree; and a rank that holds a part of ours reads that part of theirs.

| how         | our rows are                                                                                     |
|-------------|--------------------------------------------------------------------------------------------------|
| `stack`     | theirs, one after the other: gate [f, h] above up [f, h] is [2 f, h]; one alone is itself         |
| `pack`      | per group of q [a d, h], k [g d, h], v [g d, h]: its query heads, its key head, its value head    |
| `pack_gated`| the same, of q [2 a d, h]: a head's queries, then its gates; a group's gates follow its queries   |
| `delta`     | q, k, v, z, b and a of all heads, one after the other; theirs has two matrices, by key head       |
| `transpose` | the columns of theirs: GPT-2 stores `[in, out]` (Conv1D), we store `[out, in]`                    |
| `conv_pack` | columns of GPT-2's `[h, 3h]` of all q, all k, all v, packed                                       |
| `pack_rows` | rows of a vision encoder's `[3h, h]` of all q, all k, all v, packed                               |

The packing is what makes tensor parallelism a plain cut (`layers/attention/self_attention.py`). Hugging Face's Llama
weights are already in RoPE's half-split convention, so no permutation of rows is needed.

Folders with such tensors are read and written by `checkpoint/hf_folder`. Megatron's counterpart is Megatron-Bridge.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

import torch

from minimegatron.checkpoint.hf_config import QUANTIZED
from minimegatron.checkpoint.sources import (
    Copy,
    Described,
    InMemory,
    Rows,
    Source,
    View,
    blocks,
    shown,
    whole,
)
from minimegatron.checkpoint.stacks import Stacked, Unstacked
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


def _packed_gated(config: TransformerConfig) -> Iterator[tuple[int, int, int]]:
    """As `_packed`: the queries of a group, then its gates, which are the second half of every head of theirs."""
    d, each = config.kv_channels, config.queries_per_group
    for group in range(config.num_query_groups):
        heads = range(group * each, (group + 1) * each)
        yield from ((0, (2 * head + gate) * d, d) for gate in (0, 1) for head in heads)
        yield from ((1, group * d, d), (2, group * d, d))


def _delta(config: TransformerConfig) -> Iterator[tuple[int, int, int]]:
    """(which of qkvz and ba, its first row, rows) in our order."""
    groups = config.linear_num_key_heads
    each = config.linear_num_value_heads // groups
    k, v = config.linear_key_head_dim, each * config.linear_value_head_dim
    for which, sizes in enumerate(((k, k, v, v), (each, each))):
        for i, rows in enumerate(sizes):
            yield from ((which, group * sum(sizes) + sum(sizes[:i]), rows) for group in range(groups))


def _pieces(match: Match, rows: int) -> list[tuple[int, int, int]]:
    """(which of theirs, its first row, how many rows), one after the other in our tensor of `rows` rows."""
    config = match.of
    if match.how == "pack":
        return list(_packed(config, 0, 0))
    if match.how in ("pack_gated", "delta"):
        return list(_packed_gated(config) if match.how == "pack_gated" else _delta(config))
    if match.how in ("conv_pack", "pack_rows"):
        q, k = (n * config.kv_channels for n in (config.num_attention_heads, config.num_query_groups))
        return [(0, start, length) for _, start, length in _packed(config, q, q + k)]
    rows_each = rows // len(match.theirs)
    return [(i, 0, rows_each) for i in range(len(match.theirs))]


def copies(match: Match, shape: tuple[int, ...]) -> Iterator[Copy]:
    """The rows of theirs of which our rows consist.

    Args:
        match: a row of the table.
        shape: shape of our tensor.
    """
    stack = () if match.expert is None else (match.expert,)
    dims, at = shape[len(stack) :], 0
    columns = match.how in ("transpose", "conv_pack") and len(dims) == 2
    for which, start, length in _pieces(match, dims[0]):
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
    theirs = Unstacked(theirs, FAMILIES[family].stacks) if FAMILIES[family].stacks else theirs
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
        of_match = list(copies(match, shape))
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
    tied = FAMILIES[family].tied or {"lm_head.weight": FAMILIES[family].tensors[0].theirs[0]}
    tied = {name: of for name, of in tied.items() if name not in used and of in used}
    extra = (name for name in theirs.tensors if name not in used | tied.keys() and not name.endswith(_WITHOUT_WEIGHTS))
    extra = (name for name in extra if not name.startswith(FAMILIES[family].left_out(config)))
    problems += [f"left over {name}" for name in sorted(extra)]
    if problems:
        raise CheckpointError(
            f"this is not a {family} model of the given config:{shown(problems)}",
            fix="check model_type and config",
        )
    for name in sorted(tied.keys() & theirs.tensors.keys()):
        _check_tied(theirs, name, tied[name])
    return View(theirs, tensors, row_copies)


def _check_tied(theirs: Source, name: str, of: str) -> None:
    """Check that a tensor which is stored a second time equals the first: else it is unknown which model was meant."""
    head = theirs.tensors[name]
    boxes = [tuple(box) for box in blocks(whole(head.shape), head.dtype.itemsize)]
    if head.shape != theirs.tensors[of].shape or not all(
        torch.equal(theirs.read(name, box), theirs.read(of, box)) for box in boxes
    ):
        raise CheckpointError(
            f"tie_word_embeddings is true, and {name} differs from the embedding, {of}",
            fix=f"remove {name} from the file, or set tie_word_embeddings to false in config.json",
        )


def as_theirs(ours: Source, config: TransformerConfig, family: str) -> Source:
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
        of_match = list(copies(match, shape))
        tensors |= {name: Described(dtype, dims) for name, dims in _their_shapes(of_match, shape).items()}
        row_copies += [copy.turned() for copy in of_match]
    view = View(ours, tensors, row_copies)
    return Stacked(view, FAMILIES[family].stacks) if FAMILIES[family].stacks else view


_STACK = re.compile(r"model\.layers\.(\d+)\.(?:mlp|mixer)\.experts\.(gate_up_proj|up_proj|down_proj)")


def _as_published(state: Mapping[str, torch.Tensor], family: Family) -> dict[str, torch.Tensor]:
    """A state dict with the names that files have: stacks of experts taken apart (views), and what was renamed.

    | published                                               | in transformers 5 while a model is in memory |
    |---------------------------------------------------------|----------------------------------------------|
    | a gate, an up and a down projection of every expert     | `mlp.experts.gate_up_proj`, `down_proj`      |
    | an up and a down projection of every expert             | `mixer.experts.up_proj`, `down_proj`         |
    """
    rows = () if family.stacks else family.tensors  # their stacks are published
    stacks = [row.theirs for row in rows if "{e}" in row.theirs[0]]  # fc1, fc2
    found: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        stack = _STACK.fullmatch(name) if stacks else None
        if stack is None:
            for there, published in family.renamed.items():
                name = name.replace(there, published)
            found[name] = tensor
            continue
        theirs = stacks[stack[2] == "down_proj"]
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
