"""Copies that must stay equal: compared bit for bit, over every axis on which there are copies.

The problem in a sentence: a norm's weight lives on every rank of tp, cp and dp; if one sum over its gradient is
missing, its copies drift apart, the loss still falls, and the run ends with exit status 0.

A tensor's bits, read as integers `b_i`, are summed with odd weights modulo 2^64::

    h = sum_i (2 i + 1) * b_i

One flipped bit changes one term by an odd multiple of a power of two, hence always changes `h`; the weights make a swap
of two elements visible. A norm would miss 92 of 100 single flipped bits, a float sum 39, this none. Each tensor is read
once; then each axis compares the sums of its tensors by one MAX all-reduce of `(h, ~h)`, as `comm/fingerprints` does.

| what travels                    | axis                                     | bytes     |
|---------------------------------|------------------------------------------|-----------|
| digest of the tensors' names    | each with copies: `tp`, `cp`, `dp`, ...  | 16        |
| sums of n tensors               | the same                                 | 16 n      |
| has anybody found a difference? | `world`                                  | 16        |

Which tensors have copies on which axis is read off their layout (`layers/param.copy_axes`). This finds a *missing* sum.
A sum with a wrong scale, or one that is missing where nothing is copied, is the same on all replicas, and only a serial
twin finds it (`observers/checks`). Megatron-LM has `--check-weight-hash-across-dp-replicas-interval`, over dp.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from minimegatron.comm.agree import gather_objects
from minimegatron.comm.axis import Axis
from minimegatron.comm.fingerprints import compare, disagreement, hash_of, signed
from minimegatron.errors import RankError, named, ranges

_MASK = (1 << 64) - 1
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def replica_check(tensors: Mapping[str, torch.Tensor] | Iterable[torch.Tensor], axis: Axis) -> None:
    """Raise unless every rank of `axis` holds the same tensors, bit for bit.

    Args:
        tensors: of any dtype and shape; a mapping names them in the message.
        axis: the ranks that should be replicas of each other.

    Raises:
        RankError: the lists differ, or some tensors do; the first of these is named with each rank's sum.
    """
    named = dict(tensors) if isinstance(tensors, Mapping) else {f"tensor {i}": t for i, t in enumerate(tensors)}
    if axis.size > 1 and named and (error := _difference(named, {n: bit_sum(t) for n, t in named.items()}, axis)):
        raise error


def check_copies(copies: Mapping[str, tuple[torch.Tensor, Sequence[Axis]]], world: Axis) -> None:
    """Raise on every rank of the world unless all copies of all tensors are equal, bit for bit; all ranks must call.

    Args:
        copies: name -> (this rank's tensor, the axes whose other ranks hold copies of it).
        world: all ranks.

    Raises:
        RankError: the same on every rank: how many tensors differ over which axis, the first of them, which ranks hold
            what.
    """
    over: dict[str, Axis] = {axis.name: axis for _, axes in copies.values() for axis in axes if axis.size > 1}
    names = {name: [n for n, (_, axes) in copies.items() if over[name] in axes] for name in sorted(over)}
    sums = {name: bit_sum(copies[name][0]) for name in {n for held in names.values() for n in held}}
    errors = [_difference({n: copies[n][0] for n in held}, sums, over[name]) for name, held in names.items()]
    mine = next((error for error in errors if error is not None), None)
    flag = torch.tensor([mine is not None], dtype=torch.int64, device=_device(copies))
    if world.size == 1 or (not disagreement(flag, world) and mine is None):
        return
    first = next(error for error in gather_objects(mine, world) if error is not None)
    raise first


def _device(copies: Mapping[str, tuple[torch.Tensor, Sequence[Axis]]]) -> torch.device:
    return next((tensor.device for tensor, _ in copies.values()), torch.device("cpu"))


def _difference(tensors: Mapping[str, torch.Tensor], sums: Mapping[str, int], axis: Axis) -> RankError | None:
    """What the ranks of the axis hold differently, the same on all of them; None where nothing is."""
    device = _device({name: (tensor, ()) for name, tensor in tensors.items()})
    listing = [f"{name} {t.dtype} {tuple(t.shape)}" for name, t in tensors.items()]
    digest = hash_of(chr(10).join(listing))
    try:
        compare(f"{len(tensors)} tensors, digest {digest:x}", axis, device, "replica_check")
    except RankError as error:
        return error
    mine = torch.tensor([signed(sums[name]) for name in tensors], device=device)
    if not (different := disagreement(mine, axis)):
        return None
    held: dict[int, list[int]] = {}
    for rank, total in zip(axis.ranks, gather_objects(int(mine[different[0]]), axis), strict=True):
        held.setdefault(total & _MASK, []).append(rank)
    shown = "; ".join(f"{named(r)}: {h:016x}" for h, r in held.items())
    return RankError(
        f"{len(different)} of {len(tensors)} tensors differ between copies over {axis.name}, "
        f"first {list(tensors)[different[0]]!r} ({shown})",
        where=f"axis {axis.name}, ranks {ranges(axis.ranks)}",
        fix="look for a gradient that is not reduced over this axis, or for copies initialised from different seeds",
    )


def bit_sum(tensor: torch.Tensor, chunk: int = 1 << 20) -> int:
    """`sum_i (2 i + 1) * bits_i` modulo 2^64 over the elements in row-major order.

    Args:
        tensor: any dtype; complex numbers count as pairs.
        chunk: elements converted at a time, so that the int64 copies stay small.
    """
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = real.detach().reshape(-1)
    bits = flat.view(_INTEGER[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), chunk):
        piece = bits[start : start + chunk].to(torch.int64)
        weights = torch.arange(2 * start + 1, 2 * (start + piece.numel()) + 1, 2, device=piece.device)
        total += (piece * weights).sum()  # int64 wraps around, which is the modulus we want
    return int(total) & _MASK
