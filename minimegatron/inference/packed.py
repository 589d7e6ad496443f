"""Quantised weights stay packed in an engine's memory: 4 or 8 bits a weight, and the scales.

The problem in a sentence: a model of 14 GB is a file of 4 GB in 4 bits, and 14 GB again once it is dequantised.

A rank's matrix is no matrix of the file: it interleaves rows of q, k and v, stacks gate and up, or has a range of
columns. So the quantised elements and the scale of each are read like ordinary weights
(`checkpoint/compressed_tensors.Words`) and packed again in the rank's order, one matrix at a time.

| stays packed                                     | is dequantised when it is loaded                             |
|--------------------------------------------------|--------------------------------------------------------------|
| linear layers of attention, MLP, shared experts, | experts (one grouped product), the up-projection of latents  |
| in int4 and int8                                 | (its halves are used separately), fp8                        |

A model with packed weights only generates: it has no gradients, and `Refit` refuses it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from minimegatron.checkpoint.compressed_tensors import Words
from minimegatron.checkpoint.regions import regions
from minimegatron.kernels.quantized import Packed
from minimegatron.layers.linear import ParallelLinear
from minimegatron.layers.param import ParamLayout, layout_of, logical_parameters

NUMBERS = ("linear_kv_up_proj.weight",)


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
        if name not in words.names or name.endswith(NUMBERS) or module.fp8 is not None:
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
        return Packed(q, scale[:, :1], scheme, dtype)
    starts = [0, *range(size - first % size, columns, size)]
    return Packed(q, scale[:, starts], scheme, dtype, first)


def packed_of(model: Any) -> list[Packed]:
    """The packed weights of a model."""
    return [module.weight for module in model.modules() if isinstance(getattr(module, "weight", None), Packed)]


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
