"""Collectives on gloo as messages from rank to rank, through TCP or through memory that ranks of one machine share.

The problem in a sentence: gloo's all-gather copies everything once more than it must, its reduce-scatter is an
all-reduce of which all but one part is thrown away, and inside of a machine all of it goes through TCP.

| collective     | a rank sends                  | and does with what it receives                            | through |
|----------------|-------------------------------|-----------------------------------------------------------|---------|
| all-gather     | its part to everyone          | puts the others' parts in their places                    | both    |
| reduce-scatter | part r to rank r              | adds the terms of its part up                             | both    |
| ring shift     | everything to the next rank   | takes that of the rank before                             | both    |
| all-reduce     | all its terms to everyone     | adds all terms up, in the order of ranks: the same bits   | memory  |
| all-to-all     | part r to rank r              | puts the others' parts in their places                    | memory  |

The first two have the bytes of a ring, `n (N-1)/N` a rank. Through memory (`comm/same_host`) a tensor for several ranks
is written once, and terms are read where their sender has put them. So an all-reduce can read N - 1 times what a ring
reads 2 (N-1)/N times and still be cheaper than TCP.

`launch` asks for it where the backend is gloo (`pending.carry_with(gloo.start)`). Messages that are small, and groups
of which not all ranks share memory, take TCP; what this file does not do there is left to gloo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.comm import same_host
from minimegatron.comm.axis import Axis
from minimegatron.comm.pending import Started
from minimegatron.comm.ring import SHIFT
from minimegatron.comm.same_host import Letter


def is_gloo(axis: Axis) -> bool:
    """By gloo itself, and not by a group in Python that goes by its name, as a check's does."""
    return dist.get_backend(axis.group) == "gloo" and type(axis.group) is dist.ProcessGroup


def start(name: str, axis: Axis, x: torch.Tensor, output: torch.Tensor, *how: Any) -> Started | None:
    """Start a collective, or leave it to torch; all ranks of the axis decide alike."""
    return _STARTS[name](axis, x.detach(), output, *how) if name in _STARTS and is_gloo(axis) else None


def _shares_memory(axis: Axis, x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and same_host.agreed(axis)


def _carries(axis: Axis, x: torch.Tensor) -> bool:
    return x.nbytes >= same_host.MIN_BYTES and _shares_memory(axis, x)


def _all_gather(axis: Axis, x: torch.Tensor, output: torch.Tensor) -> Started:
    parts = output.chunk(axis.size)
    if parts[axis.rank].data_ptr() != x.data_ptr():
        parts[axis.rank].copy_(x)
    before, after = _others(axis)
    places = [parts[source] for source in before]
    if not _carries(axis, x):
        works = [_receive(place, axis, source) for place, source in zip(places, before, strict=True)]
        return works + [_send(x, axis, to) for to in after], None
    letters = [Letter(axis, source) for source in before]
    return [*letters, *same_host.send(x, axis, after)], lambda: _put(letters, places)


def _reduce_scatter(axis: Axis, x: torch.Tensor, output: torch.Tensor) -> Started:
    parts = x.chunk(axis.size)
    mine = parts[axis.rank]
    before, after = _others(axis)
    if not _carries(axis, mine):
        terms = [torch.empty_like(mine) for _ in before]
        works = [_receive(term, axis, source) for term, source in zip(terms, before, strict=True)]
        return works + [_send(parts[to], axis, to) for to in after], lambda: _add_up([mine, *terms], output)
    letters = [Letter(axis, source) for source in before]
    works = [work for to in after for work in same_host.send(parts[to], axis, [to])]

    def add() -> None:
        _add_up([mine, *(letter.view(mine) for letter in letters)], output)
        _close(letters)

    return [*letters, *works], add


def _shift(axis: Axis, x: torch.Tensor, output: torch.Tensor, tag: int) -> Started:
    source, to = (axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size
    if not _carries(axis, x):
        return [_send(x, axis, to, tag), _receive(output, axis, source, tag)], None
    letter = Letter(axis, source, tag)
    return [letter, *same_host.send(x, axis, [to], tag)], lambda: letter.copy_to(output)


def _all_reduce(axis: Axis, x: torch.Tensor, output: torch.Tensor, op: str) -> Started | None:
    if op != "sum" or not _carries(axis, x):
        return None
    before, after = _others(axis)
    letters = {source: Letter(axis, source) for source in before}
    works = same_host.send(x, axis, after)

    def add() -> None:
        mine = x.clone() if axis.rank > 1 else x  # the sum of the first two is written to `x`
        _add_up([letters[rank].view(x) if rank in letters else mine for rank in range(axis.size)], output)
        _close(letters.values())

    return [*letters.values(), *works], add


def _all_to_all(
    axis: Axis, x: torch.Tensor, output: torch.Tensor, places: list[int] | None, sizes: list[int] | None
) -> Started | None:
    if not _shares_memory(axis, x) or (sizes is None and x.shape[0] % axis.size):
        return None
    even = [x.shape[0] // axis.size] * axis.size
    sent, received = x.split(sizes or even), output.split(places or even)
    received[axis.rank].copy_(sent[axis.rank])
    before, after = _others(axis)
    letters = {source: Letter(axis, source) for source in before if received[source].nbytes >= same_host.MIN_BYTES}
    works = [_receive(received[i], axis, i) for i in before if i not in letters and received[i].numel()]
    for to in after:
        if sent[to].nbytes >= same_host.MIN_BYTES:
            works += same_host.send(sent[to], axis, [to])
        elif sent[to].numel():
            works.append(_send(sent[to], axis, to))
    return [*letters.values(), *works], lambda: _put(letters.values(), [received[source] for source in letters])


_STARTS: dict[str, Callable[..., Started | None]] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    SHIFT: _shift,
}


def _others(axis: Axis) -> tuple[list[int], list[int]]:
    """The other positions of the axis, from this one backwards, and forwards."""
    before, after = ([(axis.rank + sign * k) % axis.size for k in range(1, axis.size)] for sign in (-1, 1))
    return before, after


def _send(x: torch.Tensor, axis: Axis, to: int, tag: int = 0) -> Any:
    return dist.isend(x, axis.ranks[to], group=axis.group, tag=tag)


def _receive(x: torch.Tensor, axis: Axis, source: int, tag: int = 0) -> Any:
    return dist.irecv(x, axis.ranks[source], group=axis.group, tag=tag)


def _put(letters: Iterable[Letter], places: Sequence[torch.Tensor]) -> None:
    for letter, place in zip(letters, places, strict=True):
        letter.copy_to(place)


def _close(letters: Iterable[Letter]) -> None:
    for letter in letters:
        letter.close()


def _add_up(terms: Sequence[torch.Tensor], result: torch.Tensor) -> None:
    """From the left; `result` may be one of the first two terms."""
    torch.add(terms[0], terms[1], out=result)
    for term in terms[2:]:
        result.add_(term)
