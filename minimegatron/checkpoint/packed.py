"""Quantised weights stay packed in memory, of an engine or under adapters that learn: 4 or 8 bits, and the scales.

The problem in a sentence: a model of 14 GB is a file of 4 GB in 4 bits, and 14 GB again once it is dequantised.

A rank's matrix is no matrix of the file: it interleaves rows of q, k and v, stacks gate and up, or has a range of
columns. So the quantised elements and the scale of each are read like ordinary weights
(`checkpoint/compressed_tensors.Words`) and packed again in the rank's order, one matrix at a time.

| stays packed                                     | is dequantised when it is loaded                             |
|--------------------------------------------------|--------------------------------------------------------------|
| linear layers of attention, MLP, shared experts, | experts (one grouped product), the up-projection of latents  |
| in int4 and int8                                 | (its halves are used separately), fp8                        |

A packed matrix has no gradient, and `Refit` refuses it. A model whose adapters learn beside packed matrices (QLoRA,
`--lora-base`; Dettmers et al. 2023, arXiv 2305.14314) is built with them (`layers/lora.pack_base`), and `read_base`
fills them. They are in none of its checkpoints: the manifest has the folder and a hash of its files, and whoever opens
the checkpoint gets the base's matrices from there (`conversion.open_model`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import nn

from minimegatron.checkpoint.compressed_tensors import Words
from minimegatron.checkpoint.disk import UNREADABLE, disk
from minimegatron.checkpoint.hf_folder import open_words, weight_files
from minimegatron.checkpoint.regions import regions
from minimegatron.config import TransformerConfig
from minimegatron.errors import CheckpointError, ConfigError
from minimegatron.kernels.quantized import Packed
from minimegatron.layers.linear import ParallelLinear
from minimegatron.layers.lora import NUMBERS, packed_of, scheme_of_base
from minimegatron.layers.param import ParamLayout, layout_of, logical_name, logical_parameters

BASE = "contents of lora_base"  # in the manifest of a checkpoint
QUANTIZE = "a folder that minimegatron quantize has written, with --scheme int4 or int8"


def keep_packed(model: Any, words: Words) -> list[str]:
    """Replace the weights of linear layers by packed ones, before the other parameters are allocated.

    Args:
        model: on the meta device.
        words: the quantised weights of the folder.

    Returns:
        The logical names of the weights replaced.
    """
    names = {id(param): name for name, param in logical_parameters(model)}
    kept = []
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(module, ParallelLinear) or not isinstance(weight, nn.Parameter):
            continue
        name = names[id(weight)]
        if name not in words.names or name.endswith(f"{NUMBERS}.weight") or module.fp8 is not None:
            continue
        packed = _packed(name, layout_of(weight), weight.dtype, words)
        if packed is not None:
            del module.weight
            module.weight = packed  # type: ignore[assignment]
            kept.append(name)
    return kept


def _packed(name: str, layout: ParamLayout, dtype: torch.dtype, words: Words) -> Packed | None:
    """A rank's part of a matrix, packed; None if the kernels do not support the dtype of its scales."""
    scheme, stored = words.scheme, words.scales.tensors[name].dtype
    if stored not in (torch.float32, torch.bfloat16):
        return None
    q, scale = (torch.empty(layout.local_shape, dtype=kind) for kind in (torch.int8, stored))
    for source, numbers in ((words.q, q), (words.scales, scale)):
        for part in regions(layout, numbers):
            part.data.copy_(source.read(name, part.box))
            first = part.box[1][0]
    columns, size = q.shape[1], scheme.group_size
    if size is None:
        packed = Packed(q, scale[:, :1], scheme, dtype)
    else:
        starts = [0, *range(size - first % size, columns, size)]
        packed = Packed(q, scale[:, starts], scheme, dtype, first)
    packed.param_layout = layout
    return packed


def _words_of(folder: Path) -> Words:
    words = open_words(folder)
    if words is None:
        raise ConfigError(f"lora_base {folder}: its weights are not packed", fix=QUANTIZE)
    return words


def fields_of_base(folder: str) -> dict[str, Any]:
    """The fields of a model's configuration that follow from `lora_base`.

    Raises:
        ConfigError, CheckpointError: the folder has no packed weights.
    """
    scheme = _words_of(Path(folder)).scheme
    return {"lora_base_bits": scheme.bits, "lora_base_group_size": scheme.group_size}


def contents_of_base(folder: str) -> str:
    """A hash of the files that `lora_base` names."""
    total = xxhash.xxh3_128()
    for file in weight_files(Path(folder)):
        with disk(file, UNREADABLE), file.open("rb") as opened:
            while block := opened.read(1 << 24):
                total.update(block)
    return str(total.hexdigest())


def read_base(model: Any, config: TransformerConfig) -> None:
    """Fill the packed matrices of a model that was built with `lora_base`; without it there are none.

    Raises:
        ConfigError: the folder's weights are packed otherwise than the model's.
        CheckpointError: a matrix is not packed there, or has another shape.
    """
    if config.lora_base is None:
        return
    words = _words_of(Path(config.lora_base))
    if words.scheme != scheme_of_base(config):
        raise ConfigError(
            f"lora_base_bits {config.lora_base_bits} and lora_base_group_size {config.lora_base_group_size}, and the "
            f"folder has {words.scheme.bits} and {words.scheme.group_size}",
            where=config.lora_base,
            fix="leave them out: they are read from the folder",
        )
    for where, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, Packed):
            continue
        name, layout = f"{logical_name(where)}.weight", layout_of(weight)  # type: ignore[arg-type]
        shape = words.q.tensors[name].shape if name in words.names else None
        packed = _packed(name, layout, weight.dtype, words) if shape == layout.shape else None
        if packed is None:
            what = "is not packed there" if shape is None else f"is {list(shape)} there, with scales in "
            what += "" if shape is None else str(words.scales.tensors[name].dtype)
            raise CheckpointError(
                f"{name} {list(layout.shape)} {what}", where=config.lora_base, fix=f"{QUANTIZE}, of this model"
            )
        module.weight = packed.to(model.mesh.device)


def memory(model: Any) -> str:
    """The bytes of a rank's weights, as a line for a log."""
    numbers = sum({p.data_ptr(): p.nbytes for p in model.parameters()}.values())
    packed = packed_of(model)
    if not packed:
        return f"weights: {numbers / 1e6:.1f} MB"
    kept, wide = sum(p.nbytes for p in packed), sum(p.shape[0] * p.shape[1] * p.dtype.itemsize for p in packed)
    scheme = packed[0].scheme
    group = f", groups of {scheme.group_size}" if scheme.group_size else ""
    return (
        f"weights: {(numbers + kept) / 1e6:.1f} MB, of which {kept / 1e6:.1f} MB in int{scheme.bits}{group}, "
        f"which would be {wide / 1e6:.1f} MB dequantised"
    )
