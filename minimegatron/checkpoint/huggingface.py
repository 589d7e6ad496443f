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

import torch

from minimegatron.checkpoint.tables import published, rows
from minimegatron.config import TransformerConfig
from minimegatron.errors import CheckpointError

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
    if tied:
        _check_tied(state, ours)
    buffers = {t for t in state if t.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))}
    extra = sorted(set(state) - used - tied - buffers)
    if missing or extra:
        lines = [f"missing {t}" for t in missing] + [f"left over {t}" for t in extra]
        raise CheckpointError(
            f"this is not a {family} model of the given config:\n  " + "\n  ".join(lines),
            fix="check model_type and config",
        )
    return ours


def _check_tied(state: Mapping[str, torch.Tensor], ours: Mapping[str, torch.Tensor]) -> None:
    """A head that lies beside a tied embedding must be equal to it: else it is unknown which model was meant."""
    head, words = state.get("lm_head.weight"), ours.get("embedding.word_embeddings.weight")
    if head is not None and words is not None and not torch.equal(head, words):
        raise CheckpointError(
            "tie_word_embeddings is true, and lm_head.weight differs from the embedding",
            fix="remove lm_head.weight from the file, or set tie_word_embeddings to false in config.json",
        )


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
