"""The norm of the whole gradient, and cutting it to a maximum.

The problem in a sentence: no rank holds the whole gradient, many hold the same part of it, and the norm must come out
as if one machine held everything exactly once.

A gradient element lives on several ranks when its parameter is replicated: over dp and cp always, over tp unless the
parameter is cut over tp, over pp never, except for a tied embedding. Exactly one holder counts (`counts_here`):

| parameter                        | counted by                                  |
|----------------------------------|---------------------------------------------|
| cut over tp (matrices)           | every tp rank; the first of dp_cp           |
| replicated over tp (norms, ...)  | the first tp rank; the first of dp_cp       |
| tied copy on the last stage      | the first stage, which has the original     |
| a piece owned by one dp rank     | its owner, in the first instance            |
| experts                          | every ep and etp rank; the first of edp     |

Counting a replicated norm on all t ranks is the classic mistake: the norm comes out a little too large and depends on
the layout.

One message of three numbers over *all* ranks does the rest:

    [ sum of squares, zeros, tensors that are not finite ]        24 bytes, summed over `world`

so that every rank holds the bitwise same numbers and takes the same decision: to clip, to skip, to stop.

Precision: squares are added in fp64, within a tensor, over tensors and over ranks. torch's CPU kernel adds squares of
fp32 numbers in fp32, and a million small ones vanish beside a large sum: the norm of 1e7 elements 0.1 comes out 0.8 %
wrong, of 1e8 elements 4 %. In fp64 the result also does not depend on how the gradient is cut, to 1e-12. It is
one pass over memory as long as the fp64 numbers never leave the cache, hence pieces of 64 Ki elements. An fp32 square
overflows beyond 1.8e19, an fp64 one does not.

Clipping multiplies everything by c = max_norm / (norm + 1e-6) if that is below 1: the direction stays.

Pascanu, Mikolov & Bengio 2013 (arXiv 1211.5063). Megatron-LM: `megatron/core/optimizer/clip_grads.py`, which reduces
over tp x pp (over the world with a distributed optimizer) and finds infinities in a separate message.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import overload

import torch

from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.errors import require
from minimegatron.kernels import ops
from minimegatron.kernels.optimizer import Tables
from minimegatron.kernels.plain import PIECE
from minimegatron.layers.param import ParamLayout

SquaredNorms = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]]


def counts_here(layout: ParamLayout, mesh: Mesh, owned: bool = False) -> bool:
    """Whether this rank is the one holder that counts the gradient of a parameter.

    Args:
        layout: the parameter's layout.
        mesh: this rank's place.
        owned: this rank alone of its instance holds the gradient (sharded optimizers).
    """
    if layout.experts is not None:
        first_replica = (mesh.edp_instances if owned else mesh.edp).is_first
        return first_replica and (layout.sharded or mesh.etp.is_first)
    first_replica = (mesh.dp_instances if owned else mesh.dp_cp).is_first
    return not layout.shared and first_replica and (layout.sharded or mesh.tp.is_first)


@dataclasses.dataclass(frozen=True)
class GradStats:
    """Three numbers about the whole gradient, fp64 scalars on the device, equal on all ranks of the axis.

    Attributes:
        norm: norm of the counted gradients; inf when any gradient, counted or not, has a NaN or an infinity.
        num_zeros: how many counted elements are 0; NaN when they were not counted.
        nonfinite: how many gradient tensors, over all ranks, have a NaN or an infinity.
    """

    norm: torch.Tensor
    num_zeros: torch.Tensor
    nonfinite: torch.Tensor

    def to_host(self) -> tuple[float, float, int]:
        """(norm, num_zeros, nonfinite); waits for the device, once."""
        norm, num_zeros, nonfinite = torch.stack([self.norm, self.num_zeros, self.nonfinite]).tolist()
        return norm, num_zeros, int(nonfinite)


@torch.no_grad()
def grad_stats(
    grads: Sequence[tuple[torch.Tensor, bool]],
    axis: Axis,
    *,
    norm_type: float = 2.0,
    count_zeros: bool = False,
    device: torch.device | None = None,
    squared_norms: SquaredNorms | None = None,
) -> GradStats:
    """Norm, zeros and non-finite tensors of the whole gradient. Does not wait for the device.

    Args:
        grads: (gradient, whether this rank counts it), of any shapes; may be empty on some ranks.
        axis: ranks that together hold everything; all must call it.
        norm_type: 2 or inf.
        count_zeros: one more pass over memory.
        device: device of the result; default that of the first gradient.
        squared_norms: `ops.squared_norms` with its `kernels` and cache bound; default: torch computes.
    """
    require(norm_type in (2.0, math.inf), f"norm_type is {norm_type}", "choose 2 or inf")
    grads = [(g, counts) for g, counts in grads if g.numel()]
    device = device or (grads[0][0].device if grads else torch.device("cpu"))
    total = torch.zeros(3, dtype=torch.float64, device=device)  # sum of squares, zeros, tensors that are not finite
    largest = torch.zeros(1, dtype=torch.float64, device=device)
    if not count_zeros:
        total[1].fill_(math.nan)
    if grads and norm_type == 2.0:
        read = squared_norms or functools.partial(ops.squared_norms, tables=Tables(), kernels="torch")
        squares, broken, order = read([g for g, _ in grads])
        of, here = _pieces(_sizes(grads), order, device)
        total[2] = (total.new_zeros(len(grads)).index_add_(0, of, broken) > 0).sum()
        total[0] = squares[here].sum()
    elif grads:
        norms = [norm.double() for norm in torch._foreach_norm([g for g, _ in grads], norm_type)]
        total[2] = (~torch.stack(norms).isfinite()).sum()
        largest = torch.stack([*largest, *(norm for norm, (_, counts) in zip(norms, grads, strict=True) if counts)])
        largest = largest.amax(0, keepdim=True)
    if count_zeros:
        for grad, counts in grads:
            if counts:
                total[1] += grad.numel() - torch.count_nonzero(grad)
    all_reduce(total, axis)
    norm = total[0].sqrt() if norm_type == 2.0 else all_reduce(largest, axis, op="max")[0]
    return GradStats(torch.where(total[2] > 0, math.inf, norm), total[1], total[2])


@torch.no_grad()
def squares_of(tensors: Sequence[torch.Tensor], squared_norms: SquaredNorms) -> torch.Tensor:
    """The sum of squares of each tensor, [n] in fp64. Does not wait for the device.

    Args:
        tensors: not empty, none without elements, on one device.
        squared_norms: see `grad_stats`.
    """
    squares, _, order = squared_norms(tensors)
    of, _ = _pieces(_sizes([(t, True) for t in tensors]), order, tensors[0].device)
    return squares.new_zeros(len(tensors)).index_add_(0, of, squares)


def _sizes(grads: Sequence[tuple[torch.Tensor, bool]]) -> tuple[tuple[int, bool], ...]:
    return tuple((g.numel(), counts) for g, counts in grads)


@functools.lru_cache(maxsize=16)
def _pieces(
    sizes: tuple[tuple[int, bool], ...], order: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two indices over the pieces of all gradients, cached: making one on a GPU makes the host wait.

    Args:
        sizes: elements of each gradient, and whether this rank counts it.
        order: gradients in the order of their pieces.
        device: device of the result.

    Returns:
        The gradient of each piece; the numbers of the pieces that count.
    """
    of = [i for i in order for _ in range(-(-sizes[i][0] // PIECE))]
    here = [n for n, i in enumerate(of) if sizes[i][1]]
    return torch.tensor(of, dtype=torch.int64, device=device), torch.tensor(here, dtype=torch.int64, device=device)


@overload
def clip_coefficient(norm: float, max_norm: float) -> float: ...
@overload
def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor: ...
def clip_coefficient(norm: torch.Tensor | float, max_norm: float) -> torch.Tensor | float:
    """The factor of the gradient: max_norm / (norm + 1e-6), at most 1; a tensor for a tensor, on its device."""
    coefficient = max_norm / (norm + 1e-6)
    return coefficient.clamp(max=1.0) if isinstance(coefficient, torch.Tensor) else min(1.0, coefficient)


@torch.no_grad()
def clip_grad_norm_(
    grads: Sequence[tuple[torch.Tensor, bool]], max_norm: float, axis: Axis, norm_type: float = 2.0
) -> torch.Tensor:
    """Scale all gradients in place so that their global norm is at most `max_norm`. Does not wait for the device.

    Args:
        grads: (gradient, whether this rank counts it); all are scaled, counted or not.
        max_norm: positive.
        axis: ranks that together hold everything.
        norm_type: 2 or inf.

    Returns:
        The norm before clipping, an fp64 scalar. Where it is inf the gradients become 0 or NaN: look before stepping.
    """
    require(max_norm > 0, f"max_norm is {max_norm}", "choose a positive number, or do not clip")
    norm = grad_stats(grads, axis, norm_type=norm_type).norm
    if grads:
        torch._foreach_mul_([g for g, _ in grads], clip_coefficient(norm, max_norm).to(grads[0][0].dtype))
    return norm
