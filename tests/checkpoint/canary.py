"""Numbers that say of which tensor and which place they are, so that no exchange and no repetition can hide."""

from __future__ import annotations

import zlib

import torch

from minimegatron.checkpoint.regions import Box


def canary(name: str, shape: tuple[int, ...], box: Box, dtype: torch.dtype) -> torch.Tensor:
    """What the elements of a box of a logical tensor should be; exact in fp32, and below 16."""
    place = torch.zeros([stop - start for start, stop in box], dtype=torch.int64)
    stride = 1
    for dim in reversed(range(len(shape))):
        index = torch.arange(*box[dim]) * stride
        place += index.view([-1 if d == dim else 1 for d in range(len(shape))])
        stride *= shape[dim]
    ids = (place * 2654435761 + zlib.crc32(name.encode())) % (1 << 24)
    return ids.to(dtype) if not dtype.is_floating_point else (ids.float() / (1 << 20)).to(dtype)
