"""Comparisons between ranks by a hash: of collectives before they are issued, and of copies that must stay equal.

Two all-reduces of one shape in swapped order return wrong numbers without an error. And a norm's weight lives on every
rank of tp, cp and dp: if one sum over its gradient is missing, its copies drift apart and the loss still falls.

Ranks compare hashes by one MAX all-reduce of the pair `(h, ~h)`: since `~h = -h - 1`, the result is `(max h, ~min h)`,
and max = min means that all agree.

| compared            | hash                                              | sent, on which axis                        |
|---------------------|---------------------------------------------------|--------------------------------------------|
| a collective        | of its name, dtype, shape, axis, and the number   | 16 bytes on its own axis, before the call  |
|                     | of calls so far on that axis                      |                                            |
| copies of n tensors | of their names; then the bit sum of each          | 16, then 16 n on each axis that has copies;|
|                     |                                                   | 16 on `world`                              |

Comparing collectives costs about 1.3 ms a call on two gloo ranks: it is on in labs, and off in benchmarks.

The bit sum reads a tensor's bits as integers `b_i` and adds them with odd weights modulo 2^64::

    h = sum_i (2 i + 1) * b_i

One flipped bit changes one term by an odd multiple of a power of two, hence always changes `h`; the weights make a swap
of two elements visible. Of 100 single flipped bits a norm misses 92, a sum in floating point 39, the bit sum none.

`layers/param.copy_axes` says on which axes a tensor has copies. The comparison finds a *missing* sum. A sum with a
wrong scale is the same on all replicas, and only a serial twin finds it (`observers/checks`).

Megatron-LM compares no calls; `--check-weight-hash-across-dp-replicas-interval` compares weights over dp.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from minimegatron.comm.agree import gather_objects
from minimegatron.comm.async_ops import Observer, Work, add_observer, blocking, remove_observer
from minimegatron.comm.axis import Axis
from minimegatron.errors import RankError, named, ranges, ranks_by_value


class Fingerprints(Observer):
    """Compares every collective with the other ranks before it is issued.

    Attributes:
        counts: calls so far, by name and ranks of the axis.
    """

    def __init__(self) -> None:
        self.counts: dict[tuple[str, tuple[int, ...]], int] = {}

    def issue(self, work: Work) -> None:
        """Compare.

        Raises:
            RankError: the ranks are about to issue different collectives; the message lists what each was about to
                issue.
        """
        x, axis = work.x, work.axis
        if x is None or axis.size == 1:
            return
        key = (axis.name, axis.ranks)
        number = self.counts[key] = self.counts.get(key, 0) + 1
        shape = str(tuple(x.shape)) if work.comparable else "uneven"
        call = " ".join(filter(None, (work.op, str(x.dtype).removeprefix("torch."), shape, work.extra)))
        compare(f"{call} on {axis.name}", axis, x.device, f"collective {number} of {axis.name}")


class _Running:
    """The `Fingerprints` of this process, if collectives are compared."""

    fingerprints: Fingerprints | None = None


def enable_fingerprints(on: bool = True) -> None:
    """Compare every collective of the package with what the other ranks call, from now on. All ranks must call it
    at the same place, because the counts of calls start at zero here."""
    if _Running.fingerprints is not None:
        remove_observer(_Running.fingerprints)
    _Running.fingerprints = Fingerprints() if on else None
    if _Running.fingerprints is not None:
        add_observer(_Running.fingerprints)


@contextlib.contextmanager
def fingerprints(on: bool = True) -> Iterator[None]:
    """`enable_fingerprints` for a block."""
    before_block = _Running.fingerprints is not None
    enable_fingerprints(on)
    try:
        yield
    finally:
        enable_fingerprints(before_block)


def hash_of(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def signed(h: int) -> int:
    """The int64 with the same 64 bits."""
    return h - (1 << 64) if h >> 63 else h


def disagreement(hashes: torch.Tensor, axis: Axis) -> list[int]:
    """Positions at which the int64 vector differs between ranks: one MAX all-reduce of `(h, ~h)`."""
    both = torch.cat([hashes, ~hashes])
    with blocking("a comparison", axis):
        dist.all_reduce(both, op=dist.ReduceOp.MAX, group=axis.group)
        largest, smallest = both[: len(hashes)], ~both[len(hashes) :]
        return torch.nonzero(largest != smallest).flatten().tolist()


def compare(text: str, axis: Axis, device: torch.device, what: str) -> None:
    """Raise on all ranks of the axis unless all pass the same text."""
    if not disagreement(torch.tensor([signed(hash_of(text))], device=device), axis):
        return
    meant = ranks_by_value(gather_objects(text, axis), axis.ranks)
    raise RankError(
        f"ranks disagree at {what}: " + "; ".join(f"{named(ranks)}: {other}" for other, ranks in meant.items()),
        where=f"axis {axis.name}, ranks {ranges(axis.ranks)}",
        fix="every rank of a group must make the same calls, in the same order, with the same shapes and dtypes",
    )


# ------------------------------------------------------------------------------------------------------------- replicas

_MASK = (1 << 64) - 1
_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def check_copies(copies: Mapping[str, tuple[torch.Tensor, Sequence[Axis]]], world: Axis) -> None:
    """Raise on every rank of the world unless all copies of all tensors are equal, bit for bit; all ranks must call it.

    Args:
        copies: name -> (this rank's tensor, the axes whose other ranks hold copies of it).
        world: all ranks.

    Raises:
        RankError: the same on every rank: how many tensors differ over which axis, the first of them, and the values of
            the ranks.
    """
    over: dict[str, Axis] = {axis.name: axis for _, axes in copies.values() for axis in axes if axis.size > 1}
    names = {name: [n for n, (_, axes) in copies.items() if over[name] in axes] for name in sorted(over)}
    sums = {name: bit_sum(copies[name][0]) for name in {n for tensors in names.values() for n in tensors}}
    errors = [_difference({n: copies[n][0] for n in tensors}, sums, over[name]) for name, tensors in names.items()]
    own_error = next((error for error in errors if error is not None), None)
    flag = torch.tensor([own_error is not None], dtype=torch.int64, device=_device(copies))
    if world.size == 1 or (not disagreement(flag, world) and own_error is None):
        return
    first = next(error for error in gather_objects(own_error, world) if error is not None)
    raise first


def _device(copies: Mapping[str, tuple[torch.Tensor, Sequence[Axis]]]) -> torch.device:
    return next((tensor.device for tensor, _ in copies.values()), torch.device("cpu"))


def _difference(tensors: Mapping[str, torch.Tensor], sums: Mapping[str, int], axis: Axis) -> RankError | None:
    """How the ranks of the axis differ, as the same error on all of them; None where they agree."""
    device = _device({name: (tensor, ()) for name, tensor in tensors.items()})
    listing = [f"{name} {t.dtype} {tuple(t.shape)}" for name, t in tensors.items()]
    digest = hash_of(chr(10).join(listing))
    try:
        compare(f"{len(tensors)} tensors, digest {digest:x}", axis, device, "a comparison of copies")
    except RankError as error:
        return error
    hashes = torch.tensor([signed(sums[name]) for name in tensors], device=device)
    if not (different := disagreement(hashes, axis)):
        return None
    name = list(tensors)[different[0]]
    mine = f"{int(hashes[different[0]]) & _MASK:016x}"
    if tensors[name].numel() == 1:
        mine = f"{tensors[name].item()!r}, bits {mine}"
    held = ranks_by_value(gather_objects(mine, axis), axis.ranks)
    shown = "; ".join(f"{named(ranks)}: {value}" for value, ranks in held.items())
    most = max(held.values(), key=len)
    odd = [rank for rank in axis.ranks if rank not in most]
    alone = len(odd) < len(most)
    fix = (
        "look for a sum that is missing over this axis, of a gradient or of the counts that move a router's bias, "
        "or for copies initialised from different seeds"
    )
    if alone:
        fix = (
            f"look at what {named(odd)} alone has done since the copies were equal: its optimizer state, its learning "
            "rate, a gather that it missed, its memory"
        )
    return RankError(
        f"{len(different)} of {len(tensors)} tensors differ between copies over {axis.name}, first {name!r} ({shown})",
        where=f"axis {axis.name}, ranks {ranges(axis.ranks)}"
        + (f"; {named(odd)} differ{'s' * (len(odd) == 1)} from the others, which are equal" if alone else ""),
        fix=fix,
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
