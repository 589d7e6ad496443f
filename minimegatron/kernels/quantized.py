"""Quantised weights: a matrix in 4 or 8 bits an element, with a scale for each row or each group of a row.

The problem in a sentence: a decode step reads every weight once, so half the bytes are half the time, and a model of
14 GB fits into 4.

    scale = max |w| / half the range        q = clamp(round(w / scale))        w' = q * scale

| scheme | q           | range       | a scale for               | bits a weight, with scales of 16 bits |
|--------|-------------|-------------|---------------------------|---------------------------------------|
| `int8` | 8 bits      | -128 .. 127 | each row (output channel) | 8 + 16 / i                            |
| `int4` | 4 bits      | -8 .. 7     | each group of 128 inputs  | 4.125                                 |
| `fp8`  | float8 e4m3 | -448 .. 448 | each row                  | 8 + 16 / i                            |

All schemes are symmetric: there is no zero point. Half the range of the integers is 127.5 and 7.5, so clamping may cost
a group's largest weight half a step. The last group of a row is shorter where `group_size` does not divide the row.

**Packing**: int32 words of 32 / bits elements, the first in the lowest bits, each as q + 2^(bits - 1); zeros fill the
last word of a row.

**In memory** an engine keeps words and scales (`Packed`), not the matrix. A product with few rows is limited by memory:
`csrc/quantized.cpp` dequantises 16 rows of the weight at a time into the L1 cache. A product with many rows is limited
by arithmetic: `BLOCK` rows are dequantised at a time for torch's own product.

The arithmetic is that of the package `compressed-tensors`, the oracle of the tests (it has no shorter last group);
`checkpoint/compressed_tensors` reads and writes its files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
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
        group_size: inputs that share a scale; None: one scale a row.

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
        """Whether elements are packed into words: integers are."""
        return self.type == "int"

    @property
    def half_range(self) -> float:
        return torch.finfo(FP8).max if self.type == "float" else (2**self.bits - 1) / 2

    def groups(self, columns: int) -> int:
        """Scales of a row of `columns` elements."""
        return 1 if self.group_size is None else -(-columns // self.group_size)

    def words(self, columns: int) -> int:
        """Words of a row of `columns` elements."""
        return -(-columns * self.bits // WORD)


SCHEMES = {"int8": Scheme("int", 8), "int4": Scheme("int", 4, 128), "fp8": Scheme("float", 8)}


def quantize(weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix.

    Args:
        weight: [o, i].
        scheme: bits, and which elements share a scale.
        dtype: of the scales; the weight is divided by the scales rounded to it.

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
    """q * scale: the matrix [o, i], in the dtype of the scales.

    Args:
        q: [o, i].
        scale: [o, groups], from the group of the first column on.
        scheme: that q was quantised by.
        first: index of the first column in the whole matrix, of which a rank may hold a part; it may lie within a
            group.
    """
    if scheme.group_size is None:
        return q.to(scale.dtype) * scale
    groups = torch.arange(first, first + q.shape[1], device=q.device) // scheme.group_size
    return q.to(scale.dtype) * scale[:, groups - first // scheme.group_size]


def rounded(weight: torch.Tensor, scheme: Scheme, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A matrix [o, i], quantised and dequantised."""
    return dequantize(*quantize(weight, scheme, dtype), scheme)


def pack(q: torch.Tensor, bits: int) -> torch.Tensor:
    """int8 [o, i] -> int32 [o, ceil(i bits / 32)]."""
    each = WORD // bits
    unsigned = F.pad(q.to(torch.int32) + (1 << (bits - 1)), (0, -q.shape[1] % each))
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=q.device)
    return (unsigned.unflatten(1, (-1, each)) << shifts).sum(-1, dtype=torch.int32)


def unpack(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """int32 [o, n] -> int8 [o, columns]; the padding of the last word is dropped."""
    shifts = torch.arange(0, WORD, bits, dtype=torch.int32, device=words.device)
    unsigned = (words.unsqueeze(-1) >> shifts).bitwise_and_((1 << bits) - 1).flatten(1)[:, :columns]
    return (unsigned - (1 << (bits - 1))).to(torch.int8)


FEW = 6  # rows of x up to which `csrc/quantized.cpp` multiplies: with more, torch's product of blocks is faster
BLOCK = 256  # rows of a weight that are dequantised at a time for torch's product: 1 MB in fp32 if i is 1,024


class Packed:
    """A matrix [o, i] kept as packed words and scales; a linear layer has it in place of its parameter `weight`.

    It has no gradient; `dgrad` takes one of y back to x, for adapters that learn in the layers before.

    Args:
        q: [o, i] int8.
        scale: [o, groups], from the group of the first column on, in the dtype of the file.
        scheme: int of 4 or 8 bits.
        dtype: of x and of the result.
        first: index of the first column in the whole matrix, see `dequantize`.

    Attributes:
        shape: (o, i).
        param_layout: its place in the whole model, as of a parameter (`layers/param`).
    """

    param_layout: Any = None

    def __init__(
        self, q: torch.Tensor, scale: torch.Tensor, scheme: Scheme, dtype: torch.dtype, first: int = 0
    ) -> None:
        assert scheme.packs, "floats of 8 bits are no words"
        self.shape, self.scheme, self.dtype, self.first = tuple(q.shape), scheme, dtype, first
        self.words, self._stored = pack(q, scheme.bits), scale.dtype
        self.scale = scale.float().contiguous()

    @classmethod
    def empty(cls, shape: tuple[int, int], scheme: Scheme, dtype: torch.dtype, first: int = 0) -> Packed:
        """Words and scales without numbers, on torch's current default device; arguments as above."""
        (rows, columns), size = shape, scheme.group_size
        groups = 1 if size is None else -(-(first % size + columns) // size)
        made = cls(torch.empty(0, 0, dtype=torch.int8), torch.empty(0, groups), scheme, dtype, first)
        made.shape, made.words = shape, torch.empty(rows, scheme.words(columns), dtype=torch.int32)
        made.scale = torch.empty(rows, groups)
        return made

    @property
    def nbytes(self) -> int:
        """Bytes of words and scales."""
        return self.words.nbytes + self.scale.nbytes

    def to(self, device: torch.device) -> Packed:
        """Move words and scales to a device, in place."""
        self.words, self.scale = self.words.to(device), self.scale.to(device)
        return self

    def numbers(self, first: int = 0, last: int | None = None) -> torch.Tensor:
        """Rows [first, last) dequantised by torch: [last - first, i] in `dtype`."""
        rows = slice(first, last)
        q = unpack(self.words[rows], self.scheme.bits, self.shape[1])
        return dequantize(q, self.scale[rows].to(self._stored), self.scheme, self.first).to(self.dtype)

    def linear(self, x: torch.Tensor, bias: torch.Tensor | None, by_a_kernel: bool) -> torch.Tensor:
        """x [..., i] -> [..., o].

        Args:
            x: any number of rows.
            bias: [o].
            by_a_kernel: dequantise by the CPU kernel; otherwise by torch.
        """
        (o, i), rows = self.shape, x.reshape(-1, x.shape[-1]).contiguous()
        n = len(rows)
        out = rows.new_empty((n, o))
        if by_a_kernel and self._fits_kernel and n <= FEW:
            self._call("mm_quantized_linear", rows, self.words, self.scale, bias, out, n, o, i)
            return out.view(*x.shape[:-1], o)
        for first, last, block in self._blocks(by_a_kernel):
            out[:, first:last] = F.linear(rows, block, None if bias is None else bias[first:last])
        return out.view(*x.shape[:-1], o)

    def dgrad(self, dy: torch.Tensor, by_a_kernel: bool) -> torch.Tensor:
        """dy [..., o] -> dy W, [..., i], blocks added in fp32 or wider; `by_a_kernel` as of `linear`."""
        rows = dy.reshape(-1, dy.shape[-1])
        wide = torch.promote_types(dy.dtype, torch.float32)
        out = rows.new_zeros((len(rows), self.shape[1]), dtype=wide)
        for first, last, block in self._blocks(by_a_kernel):
            out += rows[:, first:last] @ block
        return out.to(dy.dtype).view(*dy.shape[:-1], self.shape[1])

    @property
    def _fits_kernel(self) -> bool:
        return self.dtype == torch.float32 and self._stored in (torch.float32, torch.bfloat16)

    def _blocks(self, by_a_kernel: bool) -> Iterator[tuple[int, int, torch.Tensor]]:
        """(first, last, these rows dequantised), one block after the other, which may lie where the last did."""
        o, i = self.shape
        room = None
        if by_a_kernel and self._fits_kernel:
            room = torch.empty((min(BLOCK, o), i), device=self.words.device)
        for first in range(0, o, BLOCK):
            last = min(o, first + BLOCK)
            if room is None:
                yield first, last, self.numbers(first, last)
                continue
            self._call("mm_dequantize", self.words, self.scale, room, first, last - first, i)
            yield first, last, room[: last - first]

    def _call(self, name: str, *arguments: Any) -> None:
        call: Callable[..., Any] = operators.library("quantized", "cpu").call
        rest = self.words.shape[1], self.scale.shape[1], self.scheme.group_size or 0, self.first
        call(name, *arguments, *rest, int(self._stored == torch.bfloat16), self.scheme.bits)
