"""The arithmetic of collectives: what each rank gets, from what each rank gave. No state.

Each rank's share of a collective is a `Part`. Its tensors are flat, one for each tensor of the call (the coalesced
forms have several). A *unit* is what one rank has of one tensor: n numbers of a dtype.

| operation      | a rank gives               | a rank gets                |
|----------------|----------------------------|----------------------------|
| all_reduce     | a unit                     | a unit                     |
| reduce         | a unit                     | the root: a unit           |
| broadcast      | the root: a unit           | the others: a unit         |
| all_gather     | a unit                     | N units, in order of ranks |
| gather         | a unit                     | the root: N units          |
| scatter        | the root: N units          | a unit                     |
| reduce_scatter | N units                    | a unit                     |
| all_to_all     | rows, `give[j]` to rank j  | rows, `take[j]` of rank j  |
| barrier        | nothing                    | nothing                    |
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from labkit.plain import DTYPES
from minimegatron.errors import DataError

Tensors = list[torch.Tensor]
_MAX_UNITS = 4096
_MAX_NUMBERS = 1 << 31
_ROOTED = ("reduce", "broadcast", "gather", "scatter")
_REDUCING = ("all_reduce", "reduce", "reduce_scatter")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier", *_ROOTED)
_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul,
    # As gloo's: a comparison with NaN is false, so only one rank's NaN is kept (gloo: which one depends on the place).
    "min": lambda a, b: torch.where(b < a, b, a), "max": lambda a, b: torch.where(a < b, b, a),
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Part:
    """One rank's share of a collective.

    Attributes:
        op: one of `COLLECTIVES`.
        reduce: `sum`, ...; "" where nothing is reduced.
        root: rank within the group; -1 where there is none.
        units: (dtype, numbers) of each tensor.
        tensors: what the rank gives, flat.
        give, take: rows to and from each rank of an all_to_all.
        shape: of the first tensor, for messages.
    """

    op: str
    reduce: str
    root: int
    units: tuple[tuple[torch.dtype, int], ...]
    tensors: Tensors
    give: tuple[int, ...] = ()
    take: tuple[int, ...] = ()
    shape: tuple[int, ...] = ()

    @classmethod
    def read(cls, header: dict[str, Any], tensors: Tensors, rank: int, size: int) -> Part:
        """The share of `rank` of a group of `size`.

        Raises:
            DataError: header and tensors do not fit together.
        """
        op, reduce, root = str(header["op"]), str(header.get("reduce", "")), whole(header.get("root", -1), -1)
        if op not in COLLECTIVES:
            raise DataError(f"there is no collective {op!r:.40}")
        if (reduce in _COMBINE) != (op in _REDUCING) or (0 <= root < size) != (op in _ROOTED):
            raise DataError(f"a {op} with the operation {reduce!r:.40} and the root {root}")
        units = tuple((DTYPES[str(name)], whole(n)) for name, n in list(header.get("units", []))[:_MAX_UNITS])
        give, take = ([whole(n) for n in list(header.get(key, []))] for key in ("give", "take"))
        shape = tuple(whole(n) for n in list(header.get("shape", []))[:16])
        part = cls(op, reduce, root, units, [t.reshape(-1) for t in tensors], tuple(give), tuple(take), shape)
        part._check(rank, size)
        return part

    def _check(self, rank: int, size: int) -> None:
        want = [(dtype, n * self._given(rank, size)) for dtype, n in self.units]
        if self.op == "all_to_all":
            if not len(self.give) == len(self.take) == size or len(self.units) != 1:
                raise DataError(f"an all_to_all in a group of {size} with other numbers of splits")
            want = [(self.units[0][0], self.units[0][1] * sum(self.give))]
        if not self._given(rank, size):
            want = []
        if [(t.dtype, t.numel()) for t in self.tensors] != want:
            raise DataError(f"a {self.op} whose tensors are not those that its header names")
        whole_number = all(not dtype.is_floating_point for dtype, _ in self.units)
        if self.reduce in ("band", "bor", "bxor") and not whole_number or self.reduce == "avg" and whole_number:
            raise DataError(f"{self.reduce} of {', '.join(_name(dtype) for dtype, _ in self.units)}")

    def _given(self, rank: int, size: int) -> int:
        """Units that the rank gives of each tensor."""
        if self.op == "barrier" or self.op in ("broadcast", "scatter") and rank != self.root:
            return 0
        return size if self.op in ("scatter", "reduce_scatter") else 1

    def fits(self, other: Part) -> bool:
        """Whether both can be shares of the same call; the splits of an all_to_all are compared when all are there."""
        if self.op == other.op == "all_to_all":
            return self.units[0][0] == other.units[0][0]
        return (self.op, self.reduce, self.root, self.units) == (other.op, other.reduce, other.root, other.units)

    def __str__(self) -> str:
        facts = [f"{_name(dtype)} [{n}]" for dtype, n in self.units[:2]] if self.op != "all_to_all" else []
        if len(self.units) == 1 and self.shape and math.prod(self.shape) == self.units[0][1]:
            facts = [shown(self.units[0][0], self.shape)]
        if self.op == "all_to_all":
            facts = [f"{_name(self.units[0][0])}, gives {[*self.give]}, takes {[*self.take]} rows"]
        facts += ["..."] if len(self.units) > 2 else []
        facts += [self.reduce] if self.reduce not in ("", "sum") else []
        facts += [f"root {self.root}"] if self.root >= 0 else []
        return f"{self.op}({', '.join(facts)})"

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)


def whole(value: Any, least: int = 0) -> int:
    """A whole number that another process has sent.

    Raises:
        DataError: it is none, or not one that can be a size.
    """
    if type(value) is not int or not least <= value <= _MAX_NUMBERS:
        raise DataError(f"{value!r:.40} where a whole number from {least} was expected")
    return value


def results(parts: Sequence[Part], ranks: Sequence[int]) -> list[Tensors]:
    """What each rank gets.

    Args:
        parts: by rank within the group; they fit together.
        ranks: their global ranks, for messages.
    Raises:
        DataError: the splits of an all_to_all do not agree.
    """
    first, size = parts[0], len(parts)
    nothing: list[Tensors] = [[] for _ in parts]
    if first.op == "barrier":
        return nothing
    if first.op == "all_to_all":
        return _exchanged(parts, ranks)
    if first.op == "broadcast":
        return [[] if r == first.root else parts[first.root].tensors for r in range(size)]
    if first.op == "scatter":
        return _cut(parts[first.root].tensors, first, size)
    if first.op in ("all_gather", "gather"):
        every = [torch.cat([part.tensors[i] for part in parts]) for i in range(len(first.units))]
        return [every if first.op == "all_gather" or r == first.root else [] for r in range(size)]
    total = [_combined(first.reduce, [part.tensors[i] for part in parts]) for i in range(len(first.units))]
    if first.op == "all_reduce":
        return [total] * size
    if first.op == "reduce":
        return [total if r == first.root else [] for r in range(size)]
    return _cut(total, first, size)


def _cut(tensors: Tensors, part: Part, size: int) -> list[Tensors]:
    """One unit of each tensor for every rank."""
    chunks = [tensor.reshape(size, n) for tensor, (_, n) in zip(tensors, part.units, strict=True)]
    return [[chunk[r] for chunk in chunks] for r in range(size)]


def _combined(reduce: str, tensors: Tensors) -> torch.Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = _COMBINE[reduce](total, tensor)
    return total / len(tensors) if reduce == "avg" else total


def _exchanged(parts: Sequence[Part], ranks: Sequence[int]) -> list[Tensors]:
    lengths = [part.units[0][1] for part in parts]
    word = "rows" if len(set(lengths)) == 1 and lengths[0] != 1 else "numbers"
    each = [1 if word == "rows" else length for length in lengths]
    for i, sender in enumerate(parts):
        for j, receiver in enumerate(parts):
            sent, expected = sender.give[j] * each[i], receiver.take[i] * each[j]
            if sent != expected:
                raise DataError(
                    f"all_to_all of group {list(ranks)}: rank {ranks[i]} sends {sent} {word} to rank {ranks[j]}, "
                    f"which expects {expected} from it"
                )
    sent_by = [part.tensors[0].split([n * part.units[0][1] for n in part.give]) for part in parts]
    return [[torch.cat([sent_by[i][j] for i in range(len(parts))])] for j in range(len(parts))]


def shown(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Dtype and shape of a tensor for a message that another rank may read, without anything that the sender could
    choose."""
    return f"{_name(dtype)} {list(shape) if math.prod(shape) else [0]}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
