"""Collectives on gloo as messages from rank to rank, through TCP or through memory that ranks share.

gloo's all-gather copies everything once more than it must, and its reduce-scatter is an all-reduce of which all but one
part is thrown away. So both are an exchange of parts, with the bytes of a ring: `n (N-1)/N` for each rank. All parts go
at once, the k-th message to the k-th rank after this one:

    all-gather        this rank's part to everyone;  the others' parts to their places
    reduce-scatter    part r to rank r;              what comes is added to this rank's own

    all-to-all        part r to rank r;              what comes to its place
    ring shift        everything to the next rank;   what comes from the one before takes its place

On one machine a part is read where the sender has put it (`comm/same_host`): a sum needs no memory for its terms, and
an all-reduce is every rank's reading of everyone's terms, added in the order of ranks so that all get the same bits.
That is N - 1 reads of all elements where a ring has 2 (N-1)/N, and still fewer CPU-seconds than TCP takes.

Each function returns works to wait for, and what is to be done after that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.comm import same_host
from minimegatron.comm.axis import Axis

Started = tuple[list[Any], Callable[[], object] | None]


def is_gloo(axis: Axis) -> bool:
    """By gloo itself, and not by a group in Python that goes by its name, as a check's does."""
    return dist.get_backend(axis.group) == "gloo" and type(axis.group) is dist.ProcessGroup


def carries(axis: Axis, x: torch.Tensor) -> bool:
    """Whether messages like `x` go through shared memory. Collective when it is first asked of a group."""
    return x.nbytes >= same_host.MIN_BYTES and shares_memory(axis, x)


def shares_memory(axis: Axis, x: torch.Tensor) -> bool:
    """Whether these ranks can send tensors where `x` is through shared memory; as above."""
    return x.device.type == "cpu" and is_gloo(axis) and same_host.agreed(axis)


def all_gather(x: torch.Tensor, result: torch.Tensor, axis: Axis) -> Started:
    """`result` is everyone's `x`, in the order of ranks; `x` may be this rank's part of it."""
    parts = result.chunk(axis.size)
    if parts[axis.rank].data_ptr() != x.data_ptr():
        parts[axis.rank].copy_(x)
    before, after = _neighbours(axis)
    if not carries(axis, x):
        works = [_receive(parts[source], axis, source) for source in before]
        return works + [_send(x, axis, to) for to in after], None
    letters = [same_host.Letter(axis, source) for source in before]

    def put() -> None:
        for letter, source in zip(letters, before, strict=True):
            letter.copy_to(parts[source])

    return [*letters, *same_host.send(x, axis, after)], put


def reduce_scatter(x: torch.Tensor, result: torch.Tensor, axis: Axis) -> Started:
    """`result` is this rank's part of the sum of everyone's `x`; it may be its part of `x`."""
    parts = x.detach().chunk(axis.size)
    mine = parts[axis.rank]
    before, after = _neighbours(axis)
    if not carries(axis, mine):
        terms = [torch.empty_like(mine) for _ in before]
        works = [_receive(term, axis, source) for term, source in zip(terms, before, strict=True)]
        return works + [_send(parts[to], axis, to) for to in after], lambda: _sum([mine, *terms], result)
    letters = [same_host.Letter(axis, source) for source in before]
    works = [work for to in after for work in same_host.send(parts[to], axis, [to])]

    def add_up() -> None:
        _sum([mine, *(letter.view(mine) for letter in letters)], result)
        for letter in letters:
            letter.close()

    return [*letters, *works], add_up


def all_reduce(x: torch.Tensor, axis: Axis) -> Started:
    """`x` becomes the sum of everyone's; only where `carries`."""
    before, after = _neighbours(axis)
    letters = {source: same_host.Letter(axis, source) for source in before}
    works = same_host.send(x, axis, after)

    def add_up() -> None:
        mine = x.clone() if axis.rank > 1 else x  # else the first sum is written where its own term has been read
        _sum([letters[rank].view(x) if rank != axis.rank else mine for rank in range(axis.size)], x)
        for letter in letters.values():
            letter.close()

    return [*letters.values(), *works], add_up


def all_to_all(sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], axis: Axis) -> Started:
    """`received[i]` is what rank i has sent here; both ends know its size. Only where ranks share memory."""
    received[axis.rank].copy_(sent[axis.rank])
    before, after = _neighbours(axis)
    letters = {i: same_host.Letter(axis, i) for i in before if received[i].nbytes >= same_host.MIN_BYTES}
    works = [_receive(received[i], axis, i) for i in before if i not in letters and received[i].numel()]
    for to in after:
        if sent[to].nbytes >= same_host.MIN_BYTES:
            works += same_host.send(sent[to], axis, [to])
        elif sent[to].numel():
            works.append(_send(sent[to], axis, to))
    return [*letters.values(), *works], lambda: [letter.copy_to(received[i]) for i, letter in letters.items()]


def shift(x: torch.Tensor, received: torch.Tensor, axis: Axis, tag: int = 0) -> Started:
    """`x` to the next rank, `received` from the one before."""
    source, to = (axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size
    if not carries(axis, x):
        return [_send(x, axis, to, tag), _receive(received, axis, source, tag)], None
    letter = same_host.Letter(axis, source, tag)
    return [letter, *same_host.send(x, axis, [to], tag)], lambda: letter.copy_to(received)


def _sum(terms: list[torch.Tensor], result: torch.Tensor) -> None:
    """From the left; `result` may be one of the first two terms."""
    torch.add(terms[0], terms[1], out=result)
    for term in terms[2:]:
        result.add_(term)


def _neighbours(axis: Axis) -> tuple[list[int], list[int]]:
    """The other positions of the axis, from this one backwards, and forwards."""
    before, after = ([(axis.rank + sign * k) % axis.size for k in range(1, axis.size)] for sign in (-1, 1))
    return before, after


def _send(x: torch.Tensor, axis: Axis, to: int, tag: int = 0) -> Any:
    return dist.isend(x, axis.ranks[to], group=axis.group, tag=tag)


def _receive(x: torch.Tensor, axis: Axis, source: int, tag: int = 0) -> Any:
    return dist.irecv(x, axis.ranks[source], group=axis.group, tag=tag)
