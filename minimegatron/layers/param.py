"""The layout of a parameter: its place in the whole model, and which part of it this rank holds.

The problem in a sentence: rank 1 of 4 holds a matrix of shape [48, 64]; to initialise it, save it, convert it, reduce
its gradient or count it in a norm, one must know what it is a part *of*.

Every parameter carries a `ParamLayout` as `param.param_layout`: the shape of the logical tensor, the `dim` along which
it is cut over tp, and the ranges of that dim that each rank holds. Ranges, plural, because a part need not be one
piece: a gated MLP stores [gate; up] and each rank needs the *same* rows of both halves; cutting the stacked matrix into
equal blocks would give one rank only gates.

The experts of a layer are stacked, one slice of dim 0 for each. A rank of ep holds a range of them (`experts`), each
of which may be cut further, over etp in place of tp.

From the layout follow

* initial values that are equal in every layout: a function of (seed, name, logical shape) (`layers/logical`);
* loading and gathering logical tensors (`layers/logical`), which converters and tests use;
* the reduction that a replicated parameter's gradient still needs (`partial`, see `parallel/data/finalize.py`);
* which ranks hold copies that must stay equal (`copy_axes`, see `comm/fingerprints.py`);
* who counts it in the global gradient norm (`sharded`, see `optim/clip.py`).

| `partial`    | the gradient of a parameter that is replicated over tp is, on each rank,                       |
|--------------|------------------------------------------------------------------------------------------------|
| ""           | complete: every tp rank computed the same number                                               |
| "sequence"   | the sum over its own tokens with sequence parallelism: norms, row biases, positions             |
| "heads"      | the sum over its own heads: the norms of queries and keys                                       |
| "experts"    | its own part of a sum over etp: the bias of fc2, one of the two adapters of an expert's matrix  |

Megatron-LM keeps this in attributes of the parameter (`tensor_model_parallel`, `partition_dim`, `sequence_parallel`,
`shared`) and finds the norms of queries and keys by a substring of their name.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from minimegatron.comm.axis import Axis
from minimegatron.errors import ConfigError

if TYPE_CHECKING:
    from minimegatron.comm.mesh import Mesh

Ranges = tuple[tuple[int, int], ...]  # (start, stop) of each piece, along one dim
_WRAPPERS = re.compile(r"^(module\.)?(chunks\.\d+\.)?")


@dataclasses.dataclass(frozen=True)
class Init:
    """How a parameter starts: normal with mean 0 and this `std`, or the constant `value` where std is 0.

    Attributes:
        of: what is made of the normal numbers, element by element; None for themselves.
    """

    std: float = 0.0
    value: float = 0.0
    of: Callable[[torch.Tensor], torch.Tensor] | None = None


@dataclasses.dataclass(frozen=True)
class ParamLayout:
    """A parameter's place in the logical model.

    Attributes:
        shape: shape of the logical tensor, padding included.
        dim: dim that is cut over tp (experts: over etp); None for a tensor that is replicated over it.
        parts: for each tp rank the ranges of `dim` it holds, in the order in which it stores them.
        rank: this rank's position in `parts`.
        init: initial values.
        partial: which sum its gradient still needs (see the module docstring).
        rows: rows of dim 0 that are no padding (of a vocabulary); padding stays 0.
        shared: whether this is the copy of a tied weight that is not counted in norms and not saved.
        copies: axis over which the gradients of the copies of a tied weight are summed; "" for an untied one.
        tied_to: logical name of the weight of which this is a copy; "" for an original.
        experts: range [first, stop) of this rank's experts along dim 0; None for a parameter of no expert.
        fused: rows of q, of k and of v in each group of a packed QKV matrix; () for other parameters.
        added: no pre-trained model has it (a value head, an adapter): a run that begins with a model's weights begins
            this one anew.
    """

    shape: tuple[int, ...]
    dim: int | None = None
    parts: tuple[Ranges, ...] = ()
    rank: int = 0
    init: Init = Init()
    partial: str = ""
    rows: int | None = None
    shared: bool = False
    copies: str = ""
    tied_to: str = ""
    experts: tuple[int, int] | None = None
    fused: tuple[int, ...] = ()
    added: bool = False

    @property
    def sharded(self) -> bool:
        """Whether tp ranks (experts: etp ranks) hold different parts."""
        return self.dim is not None and len(self.parts) > 1

    @property
    def local_shape(self) -> tuple[int, ...]:
        shape = list(self.shape)
        if self.experts is not None:
            shape[0] = self.experts[1] - self.experts[0]
        if self.dim is not None:
            shape[self.dim] = sum(stop - start for start, stop in self.parts[self.rank])
        return tuple(shape)

    @property
    def unpadded_shape(self) -> tuple[int, ...]:
        """Shape of the logical tensor without padding."""
        return self.shape if self.rows is None else (self.rows, *self.shape[1:])

    @property
    def one_expert(self) -> ParamLayout:
        """The layout of one expert of a stack (a slice of dim 0)."""
        dim = None if self.dim is None else self.dim - 1
        return dataclasses.replace(self, shape=self.shape[1:], dim=dim, experts=None)

    def take(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of the logical tensor (a copy)."""
        if self.experts is not None:
            full = full[slice(*self.experts)]
        if self.dim is None:
            return full.clone()
        return torch.cat([full.narrow(self.dim, a, b - a) for a, b in self.parts[self.rank]], self.dim)

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """The logical tensor from every tp rank's part; for a parameter of experts, that of the experts in `parts`."""
        if self.dim is None:
            return parts[0].clone()
        shape = list(parts[0].shape)
        shape[self.dim] = self.shape[self.dim]
        full = parts[0].new_empty(shape)
        for ranges, part in zip(self.parts, parts, strict=True):
            pieces = part.split([b - a for a, b in ranges], self.dim)
            for (a, b), piece in zip(ranges, pieces, strict=True):
                full.narrow(self.dim, a, b - a).copy_(piece)
        return full


def cut_evenly(length: int, tp: Axis, what: str, blocks: int | Sequence[int] = 1) -> tuple[Ranges, ...]:
    """Ranges of stacked blocks, each cut into equal parts: rank r holds part r of every block.

    Args:
        blocks: how many, of one size, or the size of each.

    Raises:
        ConfigError: a block cannot be cut into `tp.size` equal parts.
    """
    sizes = [length // blocks] * blocks if isinstance(blocks, int) else blocks
    for block in sizes:
        if sum(sizes) != length or block % tp.size:
            raise ConfigError(
                f"{what} has {length} rows in {len(sizes)} block(s); "
                f"a block of {block} cannot be cut into {tp.size} equal parts",
                fix=f"choose a tensor_model_parallel_size that divides {block}",
            )
    starts = [0, *itertools.accumulate(sizes)]
    return tuple(
        tuple((a + r * n // tp.size, a + (r + 1) * n // tp.size) for a, n in zip(starts, sizes, strict=False))
        for r in range(tp.size)
    )


def new_parameter(layout: ParamLayout, dtype: torch.dtype) -> nn.Parameter:
    """An uninitialised parameter of the layout's local shape, on torch's current default device."""
    param = nn.Parameter(torch.empty(layout.local_shape, dtype=dtype))
    param.param_layout = layout  # type: ignore[attr-defined]
    return param


def layout_of(param: torch.Tensor) -> ParamLayout:
    """The parameter's layout; one that has none is replicated and complete."""
    return getattr(param, "param_layout", None) or ParamLayout(tuple(param.shape))


def logical_name(name: str) -> str:
    """The logical name of a module or parameter: wrappers and the chunks of a pipeline add nothing to it."""
    return _WRAPPERS.sub("", name)


def logical_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """(logical name, parameter): names are the same in every layout because layers are named by their global number.

    A tied copy has the name of its original.
    """
    for name, param in model.named_parameters():
        yield layout_of(param).tied_to or logical_name(name), param


def logical_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(logical name, buffer) of the buffers that belong to a model's state, such as scales of FP8."""
    for where, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                yield logical_name(f"{where}.{name}"), buffer


def copy_axes(layout: ParamLayout, mesh: Mesh) -> tuple[Axis, ...]:
    """The axes along which this rank's part is replicated; the replicas must stay equal.

    Dense parameters have copies over cp and dp, experts over edp; a parameter that is not cut over tp (experts: etp)
    has copies there too, and a tied weight has one at the other end of the pipeline (`copies`).
    """
    cut, same = (mesh.tp, (mesh.cp, mesh.dp)) if layout.experts is None else (mesh.etp, (mesh.edp,))
    axes = same if layout.sharded else (cut, *same)
    return (*axes, mesh.axis(layout.copies)) if layout.copies else axes
