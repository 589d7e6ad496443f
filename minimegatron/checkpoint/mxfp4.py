"""MXFP4, read: 4 bits a number and 8 bits for 32 numbers, as gpt-oss is published.

    X_blocks [E, o, i / 32, 16] uint8      two numbers a byte, the first in the low half
    X_scales [E, o, i / 32]     uint8      an exponent s
    X        [E, i, o]          bf16       the product of both, FP4[number] 2^(s - 127), transposed

FP4 is e2m1: a sign, and 0, 0.5, 1, 1.5, 2, 3, 4 or 6. In bf16 the product is exact, within its range of exponents. An
s of 255 stands for NaN.

OCP Microscaling Formats Specification 1.0 (2023), sections 5.3.3 and 5.4.1; Rouhani et al. 2023 (arXiv 2310.10537).
"""

from __future__ import annotations

from typing import Any

import torch

from minimegatron.checkpoint.regions import Box
from minimegatron.checkpoint.sources import Described, Source
from minimegatron.errors import CheckpointError, ConfigError

METHOD = "mxfp4"
BLOCKS, SCALES = "_blocks", "_scales"
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = torch.tensor((*_POSITIVE, *(-x for x in _POSITIVE)), dtype=torch.bfloat16, device="cpu")
# Keys of `quantization_config` that change no number.
_HARMLESS = {"quant_method", "modules_to_not_convert", "dequantize"}


def check(keys: dict[str, Any]) -> None:
    """Check a `quantization_config` of this method.

    Raises:
        ConfigError: it has a key that might mean another format.
    """
    if others := sorted(keys.keys() - _HARMLESS):
        raise ConfigError(
            f"quantization_config of {METHOD} with {', '.join(f'{key}={keys[key]!r}' for key in others)} is not read",
            fix="a folder as OpenAI publishes it",
        )


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """blocks [..., groups, 16] and scales [..., groups], uint8 -> [..., 32 groups] in bf16.

    Raises:
        CheckpointError: a scale is NaN.
    """
    if scales.numel() and int(scales.max()) == 255:
        raise CheckpointError("a scale is 255, which is no number", fix="download the file again")
    numbers = torch.stack((FP4[(blocks & 15).long()], FP4[(blocks >> 4).long()]), -1).flatten(-2)
    return torch.ldexp(numbers, scales.int().unsqueeze(-1) - 127).flatten(-2)


class Mxfp4:
    """A folder's tensors with matrices in place of blocks and scales.

    Args:
        source: their tensors.

    Raises:
        CheckpointError: blocks without their scales, or of another shape or dtype.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        stems = {name.removesuffix(BLOCKS) for name in source.tensors if name.endswith(BLOCKS)}
        packed = {stem + part for stem in stems for part in (BLOCKS, SCALES)}
        self.tensors = {name: kind for name, kind in source.tensors.items() if name not in packed}
        self.stems = stems
        for stem in sorted(stems):
            (dtype, shape), scales = source.tensors[stem + BLOCKS], source.tensors.get(stem + SCALES)
            fits = len(shape) == 4 and shape[-1] == 16 and scales == Described(torch.uint8, shape[:-1])
            if dtype != torch.uint8 or not fits:
                raise CheckpointError(
                    f"{stem}{BLOCKS} is {source.tensors[stem + BLOCKS]}, {stem}{SCALES} {scales or 'missing'}",
                    fix="bytes [experts, rows, groups, 16] and [experts, rows, groups]: download the files again",
                )
            experts, rows, groups, _ = shape
            self.tensors[stem] = Described(torch.bfloat16, (experts, 32 * groups, rows))

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """See `Source`."""
        if name not in self.stems:
            return self.source.read(name, box)
        shape = self.tensors[name].shape
        experts, inputs, rows = ((0, n) for n in shape) if box is None else box
        parts = [
            dequantise(*(self.source.read(name + part, self._box(name + part, e, rows)) for part in (BLOCKS, SCALES)))
            for e in range(*experts)
        ]
        return torch.cat(parts).transpose(1, 2)[:, slice(*inputs)]

    def _box(self, name: str, expert: int, rows: tuple[int, int]) -> Box:
        return ((expert, expert + 1), rows, *((0, n) for n in self.source.tensors[name].shape[2:]))
