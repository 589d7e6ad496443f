"""gloo's collectives, made of messages that ranks of one machine send through shared memory.

gloo's own all-gather copies everything once more than it must, its reduce-scatter is an all-reduce of which all but one
part is thrown away, and inside a machine all of it goes through TCP (`comm/shared_memory`).

| collective     | a rank sends                  | and does with what it receives                            | through |
|----------------|-------------------------------|-----------------------------------------------------------|---------|
| all-gather     | its part to everyone          | puts the others' parts in their places                    | both    |
| reduce-scatter | part r to rank r              | adds the terms of its part up                             | both    |
| ring shift     | everything to the next rank   | takes that of the rank before                             | both    |
| all-reduce     | all its terms to everyone     | adds all terms up, in the order of ranks: the same bits   | memory  |
| all-to-all     | part r to rank r              | puts the others' parts in their places                    | memory  |

The first two have the bytes of a ring, `n (N-1)/N` a rank. A tensor for several ranks is written once, and terms are
read in the sender's memory. So an all-reduce reads N - 1 tensors where a ring reads 2 (N-1)/N, and is still cheaper
than TCP. Everything else is left to gloo. `launch` uses this transport where the backend is gloo.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.comm.axis import Axis
from minimegatron.comm.shared_memory import Message, await_readers, carries, in_slot, send_message, shares_memory
from minimegatron.comm.transport import Splits, Started, Transport


def is_gloo(axis: Axis) -> bool:
    """Whether torch's gloo is the backend, and not a group in Python of that name, as a lab's check has."""
    return dist.get_backend(axis.group) == "gloo" and type(axis.group) is dist.ProcessGroup


class GlooTransport(Transport):
    """Collectives built from messages through shared memory; the backend's own for groups that are not gloo's."""

    def all_gather(self, x: torch.Tensor, output: torch.Tensor, axis: Axis) -> Started:
        if not is_gloo(axis):
            return super().all_gather(x, output, axis)
        x = x.detach()
        parts = output.chunk(axis.size)
        if parts[axis.rank].data_ptr() != x.data_ptr():
            parts[axis.rank].copy_(x)
        before, after = _others(axis)
        places = [parts[source] for source in before]
        if not carries(axis, x):
            works = [_receive(place, axis, source) for place, source in zip(places, before, strict=True)]
            return Started(works + [_send(x, axis, to) for to in after])
        messages = [Message(axis, source) for source in before]
        send_message(x, axis, after)
        return Started(messages, lambda: _put(messages, places))

    def reduce_scatter(self, x: torch.Tensor, output: torch.Tensor, axis: Axis) -> Started:
        if not is_gloo(axis):
            return super().reduce_scatter(x, output, axis)
        parts = x.detach().chunk(axis.size)
        own = parts[axis.rank]
        before, after = _others(axis)
        if not carries(axis, own):
            terms = [torch.empty_like(own) for _ in before]
            works = [_receive(term, axis, source) for term, source in zip(terms, before, strict=True)]
            works += [_send(parts[to], axis, to) for to in after]
            return Started(works, lambda: _add_up([own, *terms], output))
        messages = [Message(axis, source) for source in before]
        for to in after:
            send_message(parts[to], axis, [to])

        def add() -> None:
            _add_up([own.view(-1), *(message.view(own) for message in messages)], output.view(-1))
            _close(messages)

        return Started(messages, add)

    def outgoing(self, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        small = axis.size == 1 or not is_gloo(axis) or not carries(axis, x)
        return super().outgoing(x, axis) if small else in_slot(x)

    def await_readers(self, x: torch.Tensor, axis: Axis) -> None:
        await_readers(x, axis)

    def ring_shift(self, x: torch.Tensor, output: torch.Tensor, axis: Axis, tag: int) -> Started:
        x = x.detach()
        if not is_gloo(axis) or not carries(axis, x):
            return super().ring_shift(x, output, axis, tag)
        source, to = (axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size
        message = Message(axis, source, tag)
        send_message(x, axis, [to], tag)
        return Started([message], lambda: message.copy_to(output))

    def all_reduce(self, x: torch.Tensor, output: torch.Tensor, axis: Axis, op: str) -> Started:
        if op != "sum" or not is_gloo(axis) or not carries(axis, x):
            return super().all_reduce(x, output, axis, op)
        x = x.detach()
        before, after = _others(axis)
        messages = {source: Message(axis, source) for source in before}
        send_message(x, axis, after)

        def add() -> None:  # the sum of the first two is written to `output`
            own = x.clone() if axis.rank > 1 and x.data_ptr() == output.data_ptr() else x
            terms = [messages[rank].view(x) if rank in messages else own.view(-1) for rank in range(axis.size)]
            _add_up(terms, output.view(-1))
            _close(messages.values())

        return Started([*messages.values()], add)

    def all_to_all(
        self, x: torch.Tensor, output: torch.Tensor, axis: Axis, output_splits: Splits, input_splits: Splits
    ) -> Started:
        uneven = input_splits is None and x.shape[0] % axis.size
        if not is_gloo(axis) or not shares_memory(axis, x) or uneven:
            return super().all_to_all(x, output, axis, output_splits, input_splits)
        even = [x.shape[0] // axis.size] * axis.size
        sent, received = x.detach().split(input_splits or even), output.split(output_splits or even)
        received[axis.rank].copy_(sent[axis.rank])
        before, after = _others(axis)
        messages = {source: Message(axis, source) for source in before if carries(axis, received[source])}
        works = [_receive(received[i], axis, i) for i in before if i not in messages and received[i].numel()]
        for to in after:
            if carries(axis, sent[to]):
                send_message(sent[to], axis, [to])
            elif sent[to].numel():
                works.append(_send(sent[to], axis, to))
        places = [received[source] for source in messages]
        return Started([*messages.values(), *works], lambda: _put(messages.values(), places))


def _others(axis: Axis) -> tuple[list[int], list[int]]:
    """The other positions of the axis: backwards from this one, and forwards."""
    before, after = ([(axis.rank + sign * k) % axis.size for k in range(1, axis.size)] for sign in (-1, 1))
    return before, after


def _send(x: torch.Tensor, axis: Axis, to: int) -> Any:
    return dist.isend(x, axis.ranks[to], group=axis.group)


def _receive(x: torch.Tensor, axis: Axis, source: int) -> Any:
    return dist.irecv(x, axis.ranks[source], group=axis.group)


def _put(messages: Iterable[Message], places: Sequence[torch.Tensor]) -> None:
    for message, place in zip(messages, places, strict=True):
        message.copy_to(place)


def _close(messages: Iterable[Message]) -> None:
    for message in messages:
        message.close()


def _add_up(terms: Sequence[torch.Tensor], result: torch.Tensor) -> None:
    """Add the terms from left to right; `result` may be one of the first two terms."""
    torch.add(terms[0], terms[1], out=result)
    for term in terms[2:]:
        result.add_(term)
