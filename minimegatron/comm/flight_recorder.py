"""A ring buffer of the last communications of a rank: what was called where, with what, and how far it came.

The problem in a sentence: after a hang each rank knows where it waits, and nobody knows which rank took another turn.

`FlightRecorder` observes the door through which all communication goes (`comm/async_ops`), whatever moves the bytes. It
notes a communication when it is issued, and has three marks for it later:

    issue -> scheduled      the call has returned -> started      the wait begins      the wait is over -> completed

Its place in order is a number for each process group, as the backend counts: two axes over the same ranks may share a
group, and then their calls are in one order. A message has a number on its edge, from one rank to another.

| field of an entry                     | meaning                                                                    |
|---------------------------------------|----------------------------------------------------------------------------|
| `collective_seq_id`, `p2p_seq_id`     | number of the collective in its group, of the message on its edge, from 1  |
| `op_id`, `record_id`                  | number of the call in its group; of all calls of this rank, from 0         |
| `state`                               | see above                                                                  |
| `frames`                              | the Python stack, innermost first                                          |

These are the names of torch's own flight recorder, whose analyser (`torchfrtrace`) reads what `launch/flight_dump`
writes. torch's recorder sees NCCL; for gloo it has neither states nor messages nor groups, and a collective that
`comm/gloo` makes of messages through shared memory is unknown to it.

On NCCL a wait does not block the host; there an entry is complete when the watchdog's event says so (`comm/watchdog`).
An entry costs some microseconds, most of it for the stack: code objects and offsets, of which lines are made when
somebody asks. (torch's recorder of stacks is faster, and imports its compiler for the first line.) No tensor is kept.
The last few calls are also in memory that other ranks can read when this one has been killed (`comm/last_calls`).

PyTorch: `torch/csrc/distributed/c10d/FlightRecorder.hpp`.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from collections import deque
from collections.abc import Hashable, Iterator
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from minimegatron.comm.async_ops import Observer, Work, add_observer, remove_observer
from minimegatron.comm.axis import Axis
from minimegatron.comm.last_calls import LastCalls

COMM = os.path.dirname(__file__) + os.sep  # whose frames are not the caller's
_OWN = 3  # frames of this module and of `async_ops`, innermost
_DEPTHS = range(48)  # frames of an entry


class Place(NamedTuple):
    """One line of a stack."""

    filename: str
    line: int
    name: str


class Group:
    """A process group, or an edge between two ranks, with the numbers of its calls.

    Attributes:
        number: groups are counted as they are first seen.
        name, desc: torch's name of the group, and what it is for (the axis); for an edge `pp:0->1` and the axis.
        backend: gloo or nccl.
        ranks: its global ranks.
        collectives, messages, calls: how many there have been.
    """

    __slots__ = ("backend", "calls", "collectives", "desc", "messages", "name", "number", "ranks")

    def __init__(self, number: int, name: str, desc: str, backend: str, ranks: tuple[int, ...]) -> None:
        self.number, self.name, self.desc, self.backend, self.ranks = number, name, desc, backend, ranks
        self.collectives = self.messages = self.calls = 0


class Entry:
    """One communication.

    Attributes:
        record: its number on this rank.
        group, seq: its group and its number there, among collectives or messages.
        op_id: its number among all calls of the group.
        op, extra, axis: name of the communication, its reduction, and its axis.
        message: (sender, receiver) as global ranks, or None for a collective.
        comparable: whether all ranks must pass the same shape.
        sent, received: shape and dtype of what goes in and what comes out; None where that is no tensor.
        created, started, waiting, completed: times in nanoseconds of the wall clock, 0 where it has not come so far.
        failed: the call or the wait has raised.
        device: tells whether a device has completed it, for a backend whose waits do not block.
    """

    __slots__ = (
        "axis", "comparable", "completed", "created", "device", "extra", "failed", "group", "message", "op", "op_id",
        "received", "record", "sent", "seq", "stack", "started", "waiting",
    )  # fmt: skip

    def __init__(self, record: int, group: Group, work: Work) -> None:
        group.calls += 1
        if work.message is None:
            group.collectives = seq = group.collectives + 1
        else:
            group.messages = seq = group.messages + 1
        x, output = work.x, work.output
        self.record, self.group, self.seq, self.op_id = record, group, seq, group.calls
        self.op, self.extra, self.axis, self.message = work.op, work.extra, work.axis, work.message
        self.comparable = work.comparable
        self.sent = (x.shape, x.dtype) if x is not None else None
        self.received = (output.shape, output.dtype) if isinstance(output, torch.Tensor) else None
        self.created = time.time_ns()
        self.started = self.waiting = self.completed = 0
        self.failed = False
        self.device: Any = None
        self.stack: list[CodeType | int] = []

    @property
    def sends(self) -> bool:
        """Whether it is a message that this rank sends, and does not receive."""
        return self.message is not None and self.op.startswith("deliver")

    @property
    def state(self) -> str:
        """`scheduled`, `started` or `completed`."""
        if self.completed and (self.device is None or self.device.over()):
            return "completed"
        return "started" if self.started else "scheduled"

    @property
    def blocks(self) -> bool:
        """Whether this rank waits for it, or has waited in vain."""
        return bool(self.waiting) and self.state != "completed"

    def frames(self) -> list[Place]:
        """The stack of the call, innermost first, without this module and `async_ops`."""
        pairs = zip(self.stack[::2], self.stack[1::2], strict=True)
        return [place_of(code, offset) for code, offset in pairs]  # type: ignore[arg-type]


class FlightRecorder(Observer):
    """The last communications of this rank.

    Args:
        size: how many are kept.

    Attributes:
        entries: oldest first. Another thread may copy it at any time.
    """

    def __init__(self, size: int) -> None:
        self.entries: deque[Entry] = deque(maxlen=size)
        self.groups: dict[Hashable, Group] = {}
        self.last = LastCalls() if hasattr(os, "memfd_create") else None
        self._number = itertools.count()

    @contextlib.contextmanager
    def keeping(self, size: int) -> Iterator[None]:
        """Keep at least so many calls in the block."""
        before = self.entries.maxlen or 0
        self.entries = deque(self.entries, max(before, size))
        try:
            yield
        finally:
            self.entries = deque(self.entries, before)

    def issue(self, work: Work) -> None:
        axis, message = work.axis, work.message
        key: Hashable = ("message", axis.name, message) if message else axis.group or (axis.name, axis.ranks)
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = _group(len(self.groups), axis, message)
        work.record = entry = Entry(next(self._number), group, work)
        frame: FrameType | None = sys._getframe(_OWN)
        if self.last is not None:
            caller = frame
            while caller is not None and caller.f_code.co_filename.startswith(COMM):
                caller = caller.f_back
            if caller is not None:
                self.last.note(entry, caller)
        append = entry.stack.append
        for _ in _DEPTHS:
            if frame is None:
                break
            append(frame.f_code)
            append(frame.f_lasti)
            frame = frame.f_back
        if work.blocks:
            entry.started = entry.waiting = entry.created
        self.entries.append(entry)

    def issued(self, work: Work) -> None:
        entry = work.record
        if entry is None:
            return
        entry.failed = work.failed
        if work.blocks:
            entry.completed = 0 if work.failed else time.time_ns()
        else:
            entry.started = time.time_ns()

    def wait(self, work: Work) -> None:
        if work.record is not None:
            work.record.waiting = time.time_ns()

    def waited(self, work: Work) -> None:
        entry = work.record
        if entry is not None:
            entry.failed = work.failed
            if not work.failed:
                entry.completed, entry.device = time.time_ns(), work.entry


def _group(number: int, axis: Axis, message: tuple[int, int] | None) -> Group:
    if message is not None:
        sender, receiver = message
        backend = _backend(dist.group.WORLD if dist.is_initialized() else None)
        return Group(number, f"{axis.name}:{sender}->{receiver}", axis.name, backend, tuple(sorted(message)))
    name = _said(axis.group, "group_name") or f"{axis.name}:{'-'.join(map(str, axis.ranks))}"
    desc = _said(axis.group, "group_desc") or axis.name
    return Group(number, name, axis.name if desc == "undefined" else desc, _backend(axis.group), axis.ranks)


def _said(group: Any, attribute: str) -> str:
    """What a group calls itself; "" of one that has no name: torch raises where a group in Python was given none."""
    try:
        return str(getattr(group, attribute, ""))
    except RuntimeError:
        return ""


def _backend(group: Any) -> str:
    try:
        return str(dist.get_backend(group)) if group is not None else "gloo"
    except (ValueError, RuntimeError):  # a group in Python, as checks of labs have
        return "gloo"


def place_of(code: CodeType, offset: int) -> Place:
    """The line of an instruction."""
    line = next((n for begin, end, n in code.co_lines() if begin <= offset < end and n is not None), 0)
    return Place(code.co_filename, line, code.co_name)


class _Running:
    """The recorder of this process."""

    recorder: FlightRecorder | None = None


def start(size: int) -> FlightRecorder | None:
    """Record from now on, in a new buffer; with size 0 nothing is recorded."""
    if _Running.recorder is not None:
        remove_observer(_Running.recorder)
    _Running.recorder = FlightRecorder(size) if size > 0 else None
    if _Running.recorder is not None:
        add_observer(_Running.recorder)
    return _Running.recorder


def running() -> FlightRecorder | None:
    """The recorder of this process, if there is one."""
    return _Running.recorder
