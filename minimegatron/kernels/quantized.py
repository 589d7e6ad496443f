"""Quantised weights: a matrix in 4 or 8 bits an element, and a scale for each row or each group of a row.

The problem in a sentence: a decode step reads every weight once, so half of the bytes are half of the time, and a model
of 14 GB fits into 4.

    scale = max |w| / half the range        q = round(w / scale), cut to the range        w' = q * scale

| scheme | q           | range       | a scale for               | bits a weight, with scales of 16 bits |
|--------|-------------|-------------|---------------------------|---------------------------------------|
| `int8` | 8 bits      | -128 .. 127 | each row (output channel) | 8 + 16 / i                            |
| `int4` | 4 bits      | -8 .. 7     | each group of 128 inputs  | 4.125                                 |
| `fp8`  | float8 e4m3 | -448 .. 448 | each row                  | 8 + 16 / i                            |

All are symmetric: 0 is 0. Half of the range is 127.5 and 7.5, so the largest weight of a group may be cut by half a
step. The last group of a row is shorter where the size of a group does not divide the row. `q` of 4 and 8 bits is
stored without sign, 2^(bits - 1) added, 32 / bits to an int32, the first in its lowest bits; the last word of a row is
filled with zeros.

**In memory** an engine keeps the words and the scales, not the matrix (`Packed`). A product with few rows is limited by
memory: `csrc/quantized.cpp` dequantises 16 rows of the weight at a time into the L1 cache. A product with many rows is
limited by multiplications: `BLOCK` rows are dequantised at a time for torch's own product.

This is the arithmetic of the package `compressed-tensors`, the oracle of the tests, which has no shorter last group;
the files are in `checkpoint/compressed_tensors`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from minimegatron.errors import ConfigError
from minimegatron.kernels import operators

FP8 = torch.float8_e4m3fn
WORD = 32  # bits of a packed word


@dataclasses.dataclass(frozen=True)
class Scheme:
    """How a matrix is quantised.

    Attributes:
        type: `int` or `float`.
        bits: 4 or 8 of an int, 8 of a float.
        group_size: inputs that share a scale; None for a row.

    Raises:
        ConfigError: a combination that is not supported.
    """

    type: str
    bits: int
    group_size: int | None = None

    def __post_init__(self) -> None:
        if (self.type, self.bits) not in (("int", 4), ("int", 8), ("float", 8)):
            raise ConfigError(f"weights of {self.bits} bits, {self.type}", fix="int of 4 or 8 bits, float of 8")
        if self.group_size is not None and (self.group_size < 8 or self.group_size % 8):
            raise ConfigError(f"groups of {self.group_size}", fix="a multiple of 8; 128 is what kernels are made for")

    @property
    def packs(self) -> bool:
        """Whether several elements share a word."""
        return self.type == "int"

    @property
    def half_range(self) -> float:
        return torch.finfo(FP8).max if self.type == "float" else (2**self.bits - 1) / 2

    def groups(self, columns: int) -> int:
        """Scales of a row with so many elements."""
        return 1 if self.group_size is None else -(-columns // self.group_size)

    def words(self, columns: int) -> int:
        """Words of a row with so many elements."""
        return -(-columns * self.bits // WORD)


SCHEMES = {"int8": Scheme("int", 8), "int4": Scheme("int", 4, 128), "fp8": Scheme("float", 8)}


def quantize(weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix in few bits.

    Args:
        weight: [o, i].
        scheme: how.
        dtype: of the scales; the weight is divided by them as they are stored.

    Returns:
        q [o, i], int8 or float8, and scales [o, groups].
    """
    weight = weight.float()
    (rows, columns), size = weight.shape, scheme.group_size or weight.shape[1]
    grouped = F.pad(weight, (0, -columns % size)).view(rows, -1, size)
    scale = (grouped.abs().amax(-1) / scheme.half_range).to(dtype)
    scale = torch.where(scale == 0, torch.finfo(dtype).eps, scale)
    scaled = (grouped / scale.float().unsqueeze(-1)).view(rows, -1)[:, :columns]
    if scheme.type == "float":
        return scaled.clamp(-scheme.half_range, scheme.half_range).to(FP8), scale
    most = 2 ** (scheme.bits - 1)
    return scaled.round().clamp(-most, most - 1).to(torch.int8), scale


def dequantize(q: torch.Tensor, scale: torch.Tensor, scheme: Scheme, first: int = 0) -> torch.Tensor:
    """The matrix [o, i] that q and its scales are, in the dtype of the scales.

    Args:
        q: [o, i].
        scale: [o, groups], from the group of the first column on.
        scheme: how it was quantised.
        first: which column of the whole matrix the first one here is; a group may begin before it.
    """
    if scheme.group_size is None:
        return q.to(scale.dtype) * scale
    groups = torch.arange(first, first + q.shape[1], device=q.device) // scheme.group_size
    return q.to(scale.dtype) * scale[:, groups - first // scheme.group_size]


def rounded(weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """What is left of a matrix [o, i] after it was quantised."""
    return dequantize(*quantize(weight, scheme, dtype), scheme)


def pack(q: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 [o, i] -> int32 [o, ceil(i bits / 32)]."""
    each = WORD // bits
    unsigned = F.pad(q.to(torch.int32) + (1 << (bits - 1)), (0, -q.shape[1] % each))
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=q.device)
    return (unsigned.unflatten(1, (-1, each)) << shifts).sum(-1, dtype=torch.int32)


def unpack(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """int32 [o, n] -> the first so many int8 of every row, [o, columns]."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device)
    unsigned = (words.unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1).flatten(1)[:, :columns]
    return (unsigned - (1 << (bits - 1))).to(torch.int8)


FEW = 6  # rows of x up to which `csrc/quantized.cpp` multiplies: with more, torch's product of blocks is faster
BLOCK = 256  # rows of a weight that are dequantised at a time for torch's product: 1 MB in fp32 if i is 1,024


class Packed:
    """A matrix [o, i] that is kept as words and scales; a linear layer has it in place of `weight`.

    Args:
        q: [o, i] int8.
        scale: [o, groups], from the group of the first column on, in the dtype that they are stored in.
        scheme: int of 4 or 8 bits.
        dtype: of x and of the result.
        first: which column of the whole matrix the first one here is.

    Attributes:
        shape: (o, i).
    """

    def __init__(
        self, q: torch.Tensor, scale: torch.Tensor, scheme: Scheme, dtype: torch.dtype, first: int = 0
    ) -> None:
        assert scheme.packs, "floats of 8 bits are no words"
        self.shape, self.scheme, self.dtype, self.first = tuple(q.shape), scheme, dtype, first
        self.words, self._stored = pack(q, scheme.bits), scale.dtype
        self.scale = scale.float().contiguous()

    @property
    def nbytes(self) -> int:
        """Of words and scales."""
        return self.words.nbytes + self.scale.nbytes

    def to(self, device: torch.device) -> Packed:
        """The same there."""
        self.words, self.scale = self.words.to(device), self.scale.to(device)
        return self

    def numbers(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Rows `first` to `last` dequantised, by torch."""
        rows = slice(first, last)
        q = unpack(self.words[rows], self.scheme.bits, self.shape[1])
        return dequantize(q, self.scale[rows].to(self._stored), self.scheme, self.first).to(self.dtype)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, by_a_kernel: bool) -> torch.Tensor:
        """x [..., i] -> [..., o].

        Args:
            x: as many rows as one likes.
            bias: [o].
            by_a_kernel: the kernel for CPUs dequantises; otherwise torch does.
        """
        (o, i), rows = self.shape, x.reshape(-1, x.shape[-1]).contiguous()
        n = len(rows)
        by_a_kernel = by_a_kernel and self.dtype == torch.float32 and self._stored in (torch.float32, torch.bfloat16)
        out = rows.new_empty((n, o))
        if by_a_kernel and n <= FEW:
            self._call("mm_quantized_linear", rows, self.words, self.scale, bias, out, n, o, i)
            return out.view(*x.shape[:-1], o)
        room = rows.new_empty((min(BLOCK, o), i)) if by_a_kernel else None
        for first in range(0, o, BLOCK):
            last = min(o, first + BLOCK)
            if room is None:
                block = self.numbers(first, last)
            else:
                block = room[: last - first]
                self._call("mm_dequantize", self.words, self.scale, block, first, last - first, i)
            out[:, first:last] = F.linear(rows, block, None if bias is None else bias[first:last])
        return out.view(*x.shape[:-1], o)

    def _call(self, name: str, *arguments: Any) -> None:
        call: Callable[..., Any] = operators.library("quantized", "cpu").call
        rest = self.words.shape[1], self.scale.shape[1], self.scheme.group_size or 0, self.first
        call(name, *arguments, *rest, int(self._stored == torch.bfloat16), self.scheme.bits, torch.get_num_threads())
