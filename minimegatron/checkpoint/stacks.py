"""Published stacks of experts, taken apart and put together.

The problem in a sentence: most families publish three matrices for each expert, gpt-oss one tensor for all experts,
transposed, with the columns of gate and up in turn.

| of all experts               | of expert e                                                                       |
|------------------------------|-----------------------------------------------------------------------------------|
| `gate_up_proj`      [E, h, 2f] | column 2i: row i of `{e}.gate_proj.weight` [f, h]; 2i + 1: of `{e}.up_proj.weight` |
| `gate_up_proj_bias` [E, 2f]  | element 2i: of `{e}.gate_proj.bias` [f]; 2i + 1: of `{e}.up_proj.bias`            |
| `down_proj`         [E, f, h] | column i: row i of `{e}.down_proj.weight` [h, f]                                 |
| `down_proj_bias`    [E, h]   | `{e}.down_proj.bias` [h]                                                          |

The names of one expert are those of the family's rows, so whatever reads rows (`checkpoint/huggingface`) needs to know
no stacks. Both directions are a `Source`; a stack is read one expert at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch

from minimegatron.checkpoint.regions import Box
from minimegatron.checkpoint.sources import Described, Source, slices

_STACK = re.compile(r"(.*\.experts\.)(\w+)")
_ONE = re.compile(r"(.*\.experts\.)(\d+)\.([\w.]+)")


class _Place(NamedTuple):
    """A tensor of one expert: columns `first`, `first + step`, ... of matrix `expert` of a stack."""

    stack: str
    expert: int
    first: int
    step: int


def _one(described: Described, parts: int) -> Described:
    """A tensor of one expert, of a stack that has `parts` of them."""
    *inner, width = described.shape[1:]
    return Described(described.dtype, (width // parts, *inner))


class Unstacked:
    """A source with a tensor for each expert in place of its stacks.

    Args:
        source: their tensors.
        stacks: see `Family.stacks`.
    """

    def __init__(self, source: Source, stacks: Mapping[str, tuple[str, ...]]) -> None:
        self.source, self.tensors = source, dict[str, Described]()
        self._places: dict[str, _Place] = {}
        self._last: tuple[tuple[str, int], torch.Tensor] | None = None
        for name, described in source.tensors.items():
            stack = _STACK.fullmatch(name)
            parts = stacks.get(stack[2], ()) if stack is not None else ()
            if stack is None or not parts or len(described.shape) < 2 or described.shape[-1] % len(parts):
                self.tensors[name] = described
                continue
            for e in range(described.shape[0]):
                for i, part in enumerate(parts):
                    one = f"{stack[1]}{e}.{part}"
                    self.tensors[one] = _one(described, len(parts))
                    self._places[one] = _Place(name, e, i, len(parts))

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """See `Source`."""
        if name not in self._places:
            return self.source.read(name, box)
        stack, e, first, step = self._places[name]
        if self._last is None or self._last[0] != (stack, e):  # gate and up are read one after the other
            self._last = None
            inner = ((0, n) for n in self.source.tensors[stack].shape[1:])
            self._last = (stack, e), self.source.read(stack, ((e, e + 1), *inner))[0]
        one = self._last[1][..., first::step]
        one = one.t() if one.dim() == 2 else one
        return one if box is None else one[slices(box)]


class Stacked:
    """The inverse of `Unstacked`: stacks in place of a tensor for each expert.

    Args:
        source: tensors with the names of the rows.
        stacks: see `Family.stacks`.
    """

    def __init__(self, source: Source, stacks: Mapping[str, tuple[str, ...]]) -> None:
        self.source, self.tensors = source, dict[str, Described]()
        self._parts: dict[str, tuple[str, tuple[str, ...]]] = {}  # name of a stack -> what its names begin with, parts
        stack_of = {part: (stack, parts) for stack, parts in stacks.items() for part in parts}
        for name, (dtype, shape) in source.tensors.items():
            one = _ONE.fullmatch(name)
            if one is None or one[3] not in stack_of:
                self.tensors[name] = Described(dtype, shape)
                continue
            stack, parts = stack_of[one[3]]
            experts = max(int(one[2]) + 1, *self.tensors.get(one[1] + stack, Described(dtype, (0,))).shape[:1])
            self.tensors[one[1] + stack] = Described(dtype, (experts, *shape[1:], shape[0] * len(parts)))
            self._parts[one[1] + stack] = one[1], parts

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """See `Source`; a box has whole experts in it or is read from them."""
        if name not in self._parts:
            return self.source.read(name, box)
        prefix, parts = self._parts[name]
        experts = range(self.tensors[name].shape[0]) if box is None else range(*box[0])
        made = []
        for e in experts:
            each = [self.source.read(f"{prefix}{e}.{part}") for part in parts]
            made.append(torch.stack([one.t() if one.dim() == 2 else one for one in each], -1).flatten(-2))
        stack = torch.stack(made)
        return stack if box is None else stack[(slice(None), *slices(box[1:]))]
