"""A transport for ranks of one machine: messages through shared memory, and gloo's collectives made of messages.

gloo's all-gather copies everything once more than it must, its reduce-scatter is an all-reduce of which all but one
part is thrown away, and inside a machine all of it goes through TCP, which costs two processes three times the
processor time of one copy into mapped memory and one out of it.

    sender      slot of shared memory <- tensor      envelope (process, slot, place of the mark) -- gloo -->
    receiver    -- gloo --> envelope                 read the slot where it lies, then mark it as read

A receiver waits only for gloo's envelope. So the order of messages, deadlines and a neighbour's death are as without
this file. A sender never waits for a reader: a slot that has not been marked by all of its readers is not used, and
another one is taken. A slot is a `memfd`: it has no name in a file system, is not limited by the size of `/dev/shm`,
and ends with its sender's process. It is kept for the next message. These bytes are the network's own, as NCCL's
buffers are, and a row of their own in the table of memory by name (`nbytes`).

| a message                                       | how it travels                                          |
|-------------------------------------------------|---------------------------------------------------------|
| under `MIN_BYTES`                               | TCP: an envelope costs as much                          |
| in a group that is not all on one Linux machine | TCP: ranks try each other's memory before the first one |

| collective     | a rank sends                  | and does with what it receives                            | through |
|----------------|-------------------------------|-----------------------------------------------------------|---------|
| all-gather     | its part to everyone          | puts the others' parts in their places                    | both    |
| reduce-scatter | part r to rank r              | adds the terms of its part up                             | both    |
| ring shift     | everything to the next rank   | takes that of the rank before                             | both    |
| all-reduce     | all its terms to everyone     | adds all terms up, in the order of ranks: the same bits   | memory  |
| all-to-all     | part r to rank r              | puts the others' parts in their places                    | memory  |

The first two have the bytes of a ring, `n (N-1)/N` a rank. A tensor for several ranks is written once, and terms are
read in the sender's memory. So an all-reduce reads N - 1 times what a ring reads 2 (N-1)/N times and is still cheaper
than TCP. Everything else is left to gloo. `launch` uses this transport where the backend is gloo. Receivers open a slot
as `/proc/<pid>/fd/<n>`, which the kernel allows to processes of one user.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import mmap
import os
import secrets
import threading
import weakref
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from minimegatron.comm.async_ops import Started, Transport
from minimegatron.comm.axis import Axis

MIN_BYTES = 1 << 17  # of a message
HEAD = 4096  # bytes of a slot before its tensor: a mark for each reader, the tensor's bytes, and the slot's number
_LENGTH, _NUMBER = HEAD // 8 - 2, HEAD // 8 - 1  # where the last two are

_slots: list[_Slot] = []  # of this process
_seen: dict[int, tuple[int, mmap.mmap]] = {}  # slots of others by number, each with its process
_agreed: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()  # by process group
_members: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()


class _Slot:
    """Memory for one message of this process.

    Attributes:
        number: no other slot on this machine has it.
        memory: the head, then the tensor.
        readers: of the last message.
        used: bytes of the largest.
    """

    def __init__(self, nbytes: int) -> None:
        self.number = secrets.randbits(62)
        self.fd = os.memfd_create("minimegatron")
        self.size = HEAD + (1 << math.ceil(math.log2(max(nbytes, MIN_BYTES))))  # pages exist once they are written to
        os.ftruncate(self.fd, self.size)
        self.memory = mmap.mmap(self.fd, self.size)
        self._tensor = _address(self.memory) + HEAD
        self.marks = _words(self.memory)
        self.marks[_NUMBER] = self.number
        self._head = [os.getpid(), self.fd, self.size, self.number]
        self._envelopes: list[torch.Tensor] = []
        self.readers = self.used = 0

    def free(self) -> bool:
        """Whether all have read it."""
        return all(self.marks[reader] for reader in range(self.readers))

    def fill(self, x: torch.Tensor, readers: int) -> None:
        for reader in range(readers):
            self.marks[reader] = 0
        self.readers, self.used = readers, max(self.used, x.nbytes)
        self.marks[_LENGTH] = x.nbytes
        ctypes.memmove(self._tensor, x.data_ptr(), x.nbytes)  # a tensor here would be one that `memory.Tracker` counts

    def envelope(self, reader: int) -> torch.Tensor:
        while len(self._envelopes) <= reader:
            self._envelopes.append(torch.tensor([*self._head, len(self._envelopes)]))
        return self._envelopes[reader]


class Message:
    """A message that comes from another rank. `wait()`, read `view`, `close()`."""

    def __init__(self, axis: Axis, source: int, tag: int = 0) -> None:
        self._source = axis.ranks[source]
        self._envelope = torch.empty(5, dtype=torch.int64)
        assert axis.group is not None, "an axis of one rank has no messages"
        self._work = axis.group.recv([self._envelope], _member(axis, source), tag)
        self._memory: mmap.mmap | None = None

    def wait(self) -> None:
        """Block until it may be read.

        Raises:
            RuntimeError: the sender did not send within the deadline, or has ended.
        """
        self._work.wait()
        pid, fd, size, number, self._reader = self._envelope.tolist()
        if number not in _seen:
            try:
                opened = _open(pid, fd, size, number)
            except OSError as error:
                raise RuntimeError(f"Connection closed by peer: rank {self._source}, process {pid}: {error}") from error
            for ended in [known for known, (of, _) in _seen.items() if not Path(f"/proc/{of}").exists()]:
                del _seen[ended]
            _seen[number] = pid, opened
        self._memory = _seen[number][1]

    def view(self, like: torch.Tensor) -> torch.Tensor:
        """The tensor in the sender's memory, of `like`'s dtype and shape."""
        memory = self._checked(like)
        return torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=HEAD).view(like.shape)

    def copy_to(self, x: torch.Tensor) -> None:
        """Write the tensor into `x` and close."""
        assert x.is_contiguous(), "what travels is one piece of memory"
        ctypes.memmove(x.data_ptr(), _address(self._checked(x)) + HEAD, x.nbytes)
        self.close()

    def close(self) -> None:
        """It has been read; the sender may use its slot again."""
        assert self._memory is not None, "close() before wait()"
        for _ in range(2):  # a processor may put a write before reads, but not across these
            with _lock:
                pass
        _words(self._memory)[self._reader] = 1

    def _checked(self, x: torch.Tensor) -> mmap.mmap:
        """The slot.

        Raises:
            RuntimeError: another tensor was sent than this rank expects.
        """
        assert self._memory is not None, "wait() comes first"
        if (nbytes := _words(self._memory)[_LENGTH]) != x.nbytes:
            raise RuntimeError(
                f"rank {self._source} sent {nbytes:,} bytes where this rank expects {x.nbytes:,} ({x.dtype}, "
                f"{tuple(x.shape)}): the ranks are in different calls\n"
                "fix: make the same calls with the same sizes on every rank of the group; fingerprints name the first "
                "that differs (minimegatron.comm.fingerprints)"
            )
        return self._memory


def send_message(x: torch.Tensor, axis: Axis, to: Sequence[int], tag: int = 0) -> list[Any]:
    """Put a contiguous tensor where these ranks of the axis can read it, and tell them; works to wait for."""
    fit = [slot for slot in _slots if slot.size >= HEAD + x.nbytes and slot.free()]
    if not fit:
        fit = [_Slot(x.nbytes)]
        _slots.extend(fit)
    slot = min(fit, key=lambda slot: slot.size)
    slot.fill(x, len(to))
    assert axis.group is not None, "an axis of one rank has no messages"
    return [axis.group.send([slot.envelope(k)], _member(axis, rank), tag) for k, rank in enumerate(to)]


def bytes_of(message: torch.Tensor) -> int:
    """Bytes that travel with a message of gloo's: its own, or of an envelope those of the tensor."""
    slot = next((slot for slot in _slots if any(message is envelope for envelope in slot._envelopes)), None)
    return slot.marks[_LENGTH] if slot is not None else message.nbytes


def nbytes() -> int:
    """Shared memory that this process's messages have filled."""
    return sum(slot.used for slot in _slots)


def _member(axis: Axis, position: int) -> int:
    """A rank of the axis as its process group counts."""
    if axis.group not in _members:
        assert axis.group is not None
        _members[axis.group] = [dist.get_group_rank(axis.group, rank) for rank in axis.ranks]
    return _members[axis.group][position]


def agreed(axis: Axis) -> bool:
    """Whether all ranks of the axis can read each other's slots: they try it, together, when it is first asked."""
    if axis.group not in _agreed:
        with _disable_current_modes():  # as connecting is: nothing that somebody who counts messages has asked for
            offer = torch.tensor(_offer(axis))
            offers = [torch.empty_like(offer) for _ in axis.ranks]
            dist.all_gather(offers, offer, group=axis.group)
            works = torch.tensor([int(all(_readable(*other.tolist()) for other in offers))])
            dist.all_reduce(works, dist.ReduceOp.MIN, group=axis.group)
            _agreed[axis.group] = bool(works)
    return _agreed[axis.group]


def _offer(axis: Axis) -> list[int]:
    """This machine, and a slot for the others to open; zeros where there can be none."""
    try:
        if not _slots and hasattr(os, "memfd_create") and axis.size <= _LENGTH:
            _slots.append(_Slot(MIN_BYTES))
        return [_machine(), *_slots[0].envelope(0).tolist()]
    except (OSError, IndexError):  # not Linux; or it is forbidden here
        return [0] * 6


def _readable(machine: int, pid: int, fd: int, size: int, number: int, _: int) -> bool:
    try:
        if machine != _machine():
            return False
        _open(pid, fd, size, number).close()
    except OSError:
        return False
    return True


def _machine() -> int:
    """This machine, as long as it runs, and this namespace of process numbers.

    Raises:
        OSError: there is no such thing here.
    """
    boot, processes = Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")
    return int.from_bytes(hashlib.sha256(f"{boot} {processes}".encode()).digest()[:7])


def _open(pid: int, fd: int, size: int, number: int) -> mmap.mmap:
    """Map another process's slot.

    Raises:
        OSError: it is not there, or not ours to read.
    """
    opened = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR)
    try:
        memory = mmap.mmap(opened, size)
    except ValueError as error:  # shorter than it should be
        raise OSError(str(error)) from error
    finally:
        os.close(opened)
    if _words(memory)[_NUMBER] != number:
        raise OSError(f"what process {pid} has open as {fd} is not the slot that was meant")
    return memory


def _words(memory: mmap.mmap) -> memoryview:
    """The head of a slot."""
    return memoryview(memory)[:HEAD].cast("q")


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


# ------------------------------------------------------------------------------------------------ the transport


def is_gloo(axis: Axis) -> bool:
    """By gloo itself, and not by a group in Python that goes by its name, as a check's does."""
    return dist.get_backend(axis.group) == "gloo" and type(axis.group) is dist.ProcessGroup


def _shares_memory(axis: Axis, x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and agreed(axis)


def _carries(axis: Axis, x: torch.Tensor) -> bool:
    return x.nbytes >= MIN_BYTES and _shares_memory(axis, x)


class SharedMemory(Transport):
    """Gloo's collectives in messages; the backend's own where a group is not gloo's. All ranks decide alike."""

    def all_gather(self, x: torch.Tensor, output: torch.Tensor, axis: Axis) -> Started:
        if not is_gloo(axis):
            return super().all_gather(x, output, axis)
        x = x.detach()
        parts = output.chunk(axis.size)
        if parts[axis.rank].data_ptr() != x.data_ptr():
            parts[axis.rank].copy_(x)
        before, after = _others(axis)
        places = [parts[source] for source in before]
        if not _carries(axis, x):
            works = [_receive(place, axis, source) for place, source in zip(places, before, strict=True)]
            return Started(works + [_send(x, axis, to) for to in after])
        messages = [Message(axis, source) for source in before]
        return Started([*messages, *send_message(x, axis, after)], lambda: _put(messages, places))

    def reduce_scatter(self, x: torch.Tensor, output: torch.Tensor, axis: Axis) -> Started:
        if not is_gloo(axis):
            return super().reduce_scatter(x, output, axis)
        parts = x.detach().chunk(axis.size)
        own = parts[axis.rank]
        before, after = _others(axis)
        if not _carries(axis, own):
            terms = [torch.empty_like(own) for _ in before]
            works = [_receive(term, axis, source) for term, source in zip(terms, before, strict=True)]
            works += [_send(parts[to], axis, to) for to in after]
            return Started(works, lambda: _add_up([own, *terms], output))
        messages = [Message(axis, source) for source in before]
        works = [work for to in after for work in send_message(parts[to], axis, [to])]

        def add() -> None:
            _add_up([own, *(message.view(own) for message in messages)], output)
            _close(messages)

        return Started([*messages, *works], add)

    def ring_shift(self, x: torch.Tensor, output: torch.Tensor, axis: Axis, tag: int) -> Started:
        x = x.detach()
        if not is_gloo(axis) or not _carries(axis, x):
            return super().ring_shift(x, output, axis, tag)
        source, to = (axis.rank - 1) % axis.size, (axis.rank + 1) % axis.size
        message = Message(axis, source, tag)
        return Started([message, *send_message(x, axis, [to], tag)], lambda: message.copy_to(output))

    def all_reduce(self, x: torch.Tensor, axis: Axis, op: str) -> Started:
        if op != "sum" or not is_gloo(axis) or not _carries(axis, x):
            return super().all_reduce(x, axis, op)
        x = x.detach()
        before, after = _others(axis)
        messages = {source: Message(axis, source) for source in before}
        works = send_message(x, axis, after)

        def add() -> None:
            own = x.clone() if axis.rank > 1 else x  # the sum of the first two is written to `x`
            _add_up([messages[rank].view(x) if rank in messages else own for rank in range(axis.size)], x)
            _close(messages.values())

        return Started([*messages.values(), *works], add)

    def all_to_all(
        self,
        x: torch.Tensor,
        output: torch.Tensor,
        axis: Axis,
        output_splits: list[int] | None,
        input_splits: list[int] | None,
    ) -> Started:
        uneven = input_splits is None and x.shape[0] % axis.size
        if not is_gloo(axis) or not _shares_memory(axis, x) or uneven:
            return super().all_to_all(x, output, axis, output_splits, input_splits)
        even = [x.shape[0] // axis.size] * axis.size
        sent, received = x.detach().split(input_splits or even), output.split(output_splits or even)
        received[axis.rank].copy_(sent[axis.rank])
        before, after = _others(axis)
        messages = {source: Message(axis, source) for source in before if received[source].nbytes >= MIN_BYTES}
        works = [_receive(received[i], axis, i) for i in before if i not in messages and received[i].numel()]
        for to in after:
            if sent[to].nbytes >= MIN_BYTES:
                works += send_message(sent[to], axis, [to])
            elif sent[to].numel():
                works.append(_send(sent[to], axis, to))
        places = [received[source] for source in messages]
        return Started([*messages.values(), *works], lambda: _put(messages.values(), places))


def _others(axis: Axis) -> tuple[list[int], list[int]]:
    """The other positions of the axis, from this one backwards, and forwards."""
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
    """From the left; `result` may be one of the first two terms."""
    torch.add(terms[0], terms[1], out=result)
    for term in terms[2:]:
        result.add_(term)


# ---------------------------------------------------------------------------------------------- at its beginning


def _forget() -> None:
    """In a process that has been forked: the slots are its parent's."""
    for slot in _slots:
        os.close(slot.fd)
    _slots.clear()
    _seen.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
