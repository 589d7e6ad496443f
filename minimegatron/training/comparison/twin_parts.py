"""Which part of a tensor of the serial twin a rank of a layout has.

A tensor of the layout and the same one of the twin have the same number of dims. Where a dim is shorter in the layout,
it is cut in one of two ways, and nothing else is needed:

    tokens      dim of s tokens (or s b rows)      the positions of this rank (`comm/sequence`), then its s/t of them
    features    any other dim                      the rows of the module's weight (its `ParamLayout`), or equal parts

`comparison/twin` compares what this gives; it compares rows of experts by the numbers of their tokens instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from minimegatron.comm.collectives import all_reduce, local_part
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.sequence import positions
from minimegatron.layers.linear import ColumnParallelLinear
from minimegatron.layers.moe.layer import Experts
from minimegatron.layers.param import layout_of
from minimegatron.training.probe import Place


def places_of(s: int, mesh: Mesh, sequence_parallel: bool) -> torch.Tensor:
    """Positions in a sequence of s tokens of those that this rank has, in its order."""
    own = positions(s, mesh, mesh.device)
    return local_part(own, mesh.tp, 0) if sequence_parallel else own


def part_of(
    whole: torch.Tensor, part: torch.Tensor, module: Any, mesh: Mesh, s: int, b: int, gradient: bool = False
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """This rank's part of a tensor of the twin, beside the tensor of the layout; None if no cut gives this shape.

    Features in fewer parts than tp has ranks are used by the ranks that hold the same part for different heads, so a
    gradient of them is summed first; all ranks of tp have such a tensor alike.

    Args:
        whole: the twin's tensor.
        part: the tensor of the same place in the layout; columns that only pad a vocabulary are left out of both.
        module: the module that returned it.
        mesh: the layout.
        s, b: tokens of a whole sequence, samples of a microbatch.
        gradient: it is a gradient.
    """
    if whole.dim() != part.dim():
        return None
    tokens_seen = False
    for dim in range(whole.dim()):
        have, want = whole.shape[dim], part.shape[dim]
        rows = {s: 1, s * b: b}.get(have)
        if have == want and not _is_cut(module, dim - whole.dim(), want):
            tokens_seen = tokens_seen or rows is not None and dim < 2 and mesh.cp.size * mesh.tp.size > 1
            continue
        index = None
        if rows is not None and not tokens_seen:
            index = next((i for i in _token_cuts(s, rows, mesh) if len(i) == want), None)
        if index is not None:
            tokens_seen = True
            whole = whole.index_select(dim, index)
            continue
        cut = _feature_cut(have, want, module, mesh, dim - whole.dim())
        if cut is None:
            return None
        if gradient and have // want < mesh.tp.size and not _is_cut(module, dim - whole.dim(), want):
            alone = part.new_zeros([*part.shape[:dim], have, *part.shape[dim + 1 :]])
            part = all_reduce(alone.index_copy(dim, cut, part), mesh.tp)
            continue
        whole, part = whole.index_select(dim, cut), part.narrow(dim, 0, len(cut))
    return whole, part


def _token_cuts(s: int, rows: int, mesh: Mesh) -> Iterator[torch.Tensor]:
    """Indices of the tokens that a rank can have, with `rows` rows for each token."""
    for sequence_parallel in (False, True) if mesh.sequence_parallel else (False,):
        own = places_of(s, mesh, sequence_parallel)
        yield (own[:, None] * rows + torch.arange(rows, device=own.device)).flatten()


def _is_cut(module: Any, dim: int, length: int) -> bool:
    """Whether a dim of a module's output is the cut rows of its weight; they may be as many as the twin's, padded."""
    weight = getattr(module, "weight", None)
    if dim != -1 or not isinstance(weight, torch.Tensor) or getattr(module, "gather_output", False):
        return False
    layout = layout_of(weight)
    return (
        layout.dim == 0
        and layout.sharded
        and isinstance(module, ColumnParallelLinear)
        and (layout.local_shape[0] == length)
    )


def _feature_cut(have: int, want: int, module: Any, mesh: Mesh, dim: int) -> torch.Tensor | None:
    """Indices of this rank's features among the twin's."""
    if _is_cut(module, dim, want):
        layout = layout_of(module.weight)
        last = min(have, layout.rows or have)
        ranges = [(min(a, last), min(b, last)) for a, b in layout.parts[layout.rank]]
        return torch.cat([torch.arange(a, b, device=mesh.device) for a, b in ranges])
    n = have // want if want else 0
    if n < 2 or have % want or mesh.tp.size % n:
        return None
    first = mesh.tp.rank * n // mesh.tp.size * want
    return torch.arange(first, first + want, device=mesh.device)


def partial_over(place: Place, module: Any, mesh: Mesh) -> Any:
    """The axis over which a tensor is this rank's part of a *sum*, or None.

    The modules say so: a gathered output that ranks use for different heads has a gradient in parts, and experts that
    are cut over etp return parts of their rows.
    """
    if place.phase == "gradient" and getattr(module, "gather_output", False):
        return mesh.tp if module.gather_reduces_gradient and mesh.tp.size > 1 else None
    if place.phase == "forward" and isinstance(module, Experts) and mesh.etp.size > 1:
        return mesh.etp
    return None
