"""Messages between ranks of one machine through shared memory.

Inside a machine gloo sends everything through TCP, which costs two processes three times the processor time of one copy
into mapped memory and one out of it.

    sender      slot of shared memory <- tensor      envelope (process, slot, place of the mark) -- pipe -->
    receiver    -- pipe --> envelope                 read the tensor in the slot, then mark it as read

A receiver waits only for the envelope, so the order of messages, deadlines and the death of a neighbour are a matter of
`comm/pipes`. A sender never waits for a reader: it uses only slots that all of their readers have marked, and takes a
new one if there is none. A slot is a `memfd`: it has no name in a file system, is not limited by the size of
`/dev/shm`, and ends with its sender's process. It is reused for later messages. Like NCCL's buffers these bytes belong
to the network; they are a row of their own in the table of memory by owner (`nbytes`).

| message                                         | how it travels                                             |
|-------------------------------------------------|------------------------------------------------------------|
| under `MIN_BYTES`                               | TCP: an envelope costs as much                             |
| in a group that is not all on one Linux machine | TCP: ranks try each other's memory before the first message |

Receivers open a slot, and senders a pipe, as `/proc/<pid>/fd/<n>`, which the kernel allows to processes of one user.
A tensor that is sent again and again, as a shard of ZeRO-3 is, lies in a slot of its own (`in_slot`): nobody copies it
to send it. Its owner changes it once all readers have read (`await_readers`).

`comm/gloo` builds collectives from such messages.
"""

from __future__ import annotations

import ctypes
import hashlib
import math
import mmap
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from minimegatron.comm.axis import Axis
from minimegatron.comm.pipes import Pipes

MIN_BYTES = 1 << 17  # of a message
# Bytes of a slot before its tensor: how many messages each reader has read, the tensor's bytes, and the slot's number.
HEAD = 4096
_LENGTH, _NUMBER = HEAD // 8 - 2, HEAD // 8 - 1  # where the last two are

_slots: list[_Slot] = []  # of this process
_slot_of: weakref.WeakValueDictionary[int, _Slot] = weakref.WeakValueDictionary()  # by the address of what lies in it
_seen: dict[int, tuple[int, mmap.mmap]] = {}  # slots of others by number, each with its process
_pipes: weakref.WeakKeyDictionary[Any, Pipes | None] = weakref.WeakKeyDictionary()  # by process group; None: TCP
_members: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
_lock = threading.Lock()
# Called with "send", "recv" or "wait", the tensor's bytes and the other's rank in the group: for who counts messages.
observers: list[Callable[[str, int, int], None]] = []


class _Slot:
    """Memory for one message of this process.

    Attributes:
        number: unique on this machine.
        memory: the head, then the tensor.
        sent: how many messages each reader has been sent.
        used: bytes of the largest message so far.
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
        self.head = (os.getpid(), self.fd, self.size, self.number)
        self.sent: list[int] = []
        self.used = 0

    def free(self) -> bool:
        """Whether all readers have read all messages."""
        return all(self.marks[reader] == sent for reader, sent in enumerate(self.sent))

    def fill(self, x: torch.Tensor) -> None:
        self.used = max(self.used, x.nbytes)
        self.marks[_LENGTH] = x.nbytes
        ctypes.memmove(self._tensor, x.data_ptr(), x.nbytes)  # a tensor here would be one that `memory.Tracker` counts


class Message:
    """A message from another rank: call `wait()`, read `view`, then `close()`."""

    def __init__(self, axis: Axis, source: int, tag: int = 0) -> None:
        self._source, self._member, self._pipes = axis.ranks[source], _member(axis, source), _agreed_pipes(axis)
        self._ticket = self._pipes.expect(self._member, tag)
        self._memory: mmap.mmap | None = None
        _tell("recv", 0, self._member)

    def wait(self) -> None:
        """Block until the message has arrived.

        Raises:
            RuntimeError: the sender did not send within the deadline, or has ended.
        """
        envelope = self._pipes.take(self._member, self._ticket, f"rank {self._source}")
        pid, fd, size, number, self._reader = envelope
        _tell("wait", 0, self._member)
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
        """The tensor in the sender's memory, flat, of `like`'s dtype and size.

        No operation of torch makes it, so `memory.Tracker` does not count it: it is in the row `messages`.
        """
        return torch.frombuffer(self._checked(like), dtype=like.dtype, count=like.numel(), offset=HEAD)

    def copy_to(self, x: torch.Tensor) -> None:
        """Write the tensor into `x` and close."""
        assert x.is_contiguous(), "a message is one piece of memory"
        ctypes.memmove(x.data_ptr(), _address(self._checked(x)) + HEAD, x.nbytes)
        self.close()

    def close(self) -> None:
        """Mark the message as read; the sender may use its slot again."""
        assert self._memory is not None, "close() before wait()"
        for _ in range(2):  # a processor may put a write before reads, but not across these
            with _lock:
                pass
        _words(self._memory)[self._reader] += 1

    def _checked(self, x: torch.Tensor) -> mmap.mmap:
        """The slot.

        Raises:
            RuntimeError: the sender sent another dtype or shape than this rank expects.
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


def send_message(x: torch.Tensor, axis: Axis, to: Sequence[int], tag: int = 0) -> None:
    """Write a contiguous tensor into shared memory and send envelopes to these ranks of the axis.

    Raises:
        RuntimeError: one of them has ended.
    """
    slot = _slot_of.get(x.data_ptr())
    if slot is None or slot.used != x.nbytes:
        fit = [slot for slot in _slots if slot.size >= HEAD + x.nbytes and slot.free()]
        if not fit:
            fit = [_Slot(x.nbytes)]
            _slots.extend(fit)
        slot = min(fit, key=lambda slot: slot.size)
        slot.fill(x)
    pipes = _agreed_pipes(axis)
    slot.sent += [0] * (len(to) - len(slot.sent))
    for reader, rank in enumerate(to):
        slot.sent[reader] += 1
        member = _member(axis, rank)
        _tell("send", x.nbytes, member)
        pipes.write(member, (*slot.head, reader), tag, f"rank {axis.ranks[rank]}")


def in_slot(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x` in a slot of its own, from which `send_message` sends it without another copy."""
    slot = _Slot(x.nbytes)
    slot.fill(x.contiguous())
    held = torch.frombuffer(slot.memory, dtype=x.dtype, count=x.numel(), offset=HEAD).view(x.shape)
    _slot_of[held.data_ptr()] = slot
    held.slot = slot  # type: ignore[attr-defined]  # lives as long as this tensor
    weakref.finalize(slot, os.close, slot.fd)
    return held


def await_readers(x: torch.Tensor, axis: Axis) -> None:
    """Block until everybody has read the messages that were sent of `x`, which lies in a slot of its own.

    Raises:
        RuntimeError: somebody has not within the deadline.
    """
    if (slot := _slot_of.get(x.data_ptr())) is None:
        return
    seconds = _agreed_pipes(axis).seconds
    deadline = time.monotonic() + seconds
    while not slot.free():
        if time.monotonic() >= deadline:
            raise RuntimeError(
                f"Timed out waiting {1000 * seconds:.0f}ms for the ranks {axis.ranks} to read "
                f"{x.nbytes:,} bytes of rank {axis.ranks[axis.rank]}"
            )
        time.sleep(1e-4)


def _tell(what: str, nbytes: int, member: int) -> None:
    for observer in observers:
        observer(what, nbytes, member)


def nbytes() -> int:
    """Bytes of shared memory that messages of this process have used."""
    return sum(slot.used for slot in _slots)


def _member(axis: Axis, position: int) -> int:
    """A position of the axis as a rank of its process group."""
    if axis.group not in _members:
        assert axis.group is not None
        _members[axis.group] = [dist.get_group_rank(axis.group, rank) for rank in axis.ranks]
    return _members[axis.group][position]


def agreed(axis: Axis) -> bool:
    """Whether all ranks of the axis can read each other's slots and pipes: they try it together, at the first call."""
    if axis.group not in _pipes:
        with _disable_current_modes():  # as connecting is: nothing that somebody who counts messages has asked for
            _pipes[axis.group] = _tried(axis)
    return _pipes[axis.group] is not None


def _tried(axis: Axis) -> Pipes | None:
    group, pipes = axis.group, None
    assert group is not None, "an axis of one rank has no messages"
    offer = [0] * (5 + group.size())
    try:
        if hasattr(os, "memfd_create") and group.size() <= _LENGTH:
            if not _slots:
                _slots.append(_Slot(MIN_BYTES))
            pipes = Pipes(group.size(), group.rank(), _seconds(group))
            offer = [_machine(), *_slots[0].head, *pipes.offer()]
    except OSError:  # not Linux; or it is forbidden here; or this process has too many files
        pass
    offers = [torch.empty(len(offer), dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(offers, torch.tensor(offer), group=group)
    works = torch.tensor([int(pipes is not None and _reachable(pipes, group.rank(), offers))])
    dist.all_reduce(works, dist.ReduceOp.MIN, group=group)
    if pipes is not None and works:
        pipes.all_open()
        return pipes
    if pipes is not None:
        pipes.close()
    return None


def _seconds(group: dist.ProcessGroup) -> float:
    """The deadline of a wait in this group."""
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()  # type: ignore[no-any-return]


def _reachable(pipes: Pipes, own: int, offers: Sequence[torch.Tensor]) -> bool:
    """Whether this rank can open every rank's slot, and its pipes; those are open afterwards."""
    try:
        for rank, offer in enumerate(offers):
            machine, pid, fd, size, number, *ends = offer.tolist()
            if machine != _machine():
                return False
            _open(pid, fd, size, number).close()
            if rank != own:
                pipes.open(rank, pid, ends[own])
    except OSError:
        return False
    return True


def _agreed_pipes(axis: Axis) -> Pipes:
    pipes = _pipes[axis.group]
    assert pipes is not None, "a message between ranks that have not agreed on memory"
    return pipes


def shares_memory(axis: Axis, x: torch.Tensor) -> bool:
    """Whether parts of this tensor travel through memory, if they are large enough (`MIN_BYTES`)."""
    return x.device.type == "cpu" and agreed(axis)


def carries(axis: Axis, x: torch.Tensor) -> bool:
    """Whether this tensor, sent as one message, travels through memory."""
    return x.nbytes >= MIN_BYTES and shares_memory(axis, x)


def _machine() -> int:
    """A number of this machine since it booted, and of this namespace of process ids.

    Raises:
        OSError: this system has none.
    """
    boot, processes = Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")
    return int.from_bytes(hashlib.sha256(f"{boot} {processes}".encode()).digest()[:7])


def _open(pid: int, fd: int, size: int, number: int) -> mmap.mmap:
    """Map another process's slot.

    Raises:
        OSError: it does not exist, or may not be read.
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


def _forget() -> None:
    """Called in a forked process: the slots belong to its parent."""
    for slot in _slots:
        os.close(slot.fd)
    _slots.clear()
    _slot_of.clear()
    _seen.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
