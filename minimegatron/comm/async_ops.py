"""All communications of the package: `issue` starts one, `Work.wait` waits for it, and observers are called at both.

    collectives, ring, p2p --- issue(work, start) ---> transport ---> torch's backend, shared memory, or nothing
                           --- work.wait() ----------> its result
                                   | issue, issued, wait, waited
                                   v
                               observers

What a rank computes between `issue` and `wait` hides the communication: ZeRO gathers the next layer's parameters while
this one computes (`parallel/data/param_buffer`), a bucket of gradients is summed while backward fills the next one
(`parallel/data/grad_buffer`). On a GPU `wait()` blocks the stream and not the program.

| observer             | what it does                                                        | when                    |
|----------------------|---------------------------------------------------------------------|-------------------------|
| `Waiting`            | knows the communication in which each thread of this rank is blocked | always                 |
| `Record`             | emits an event in `minimegatron.trace` after each wait              | always                  |
| `comm/fingerprints`  | compares name, dtype and shape with what the other ranks issue      | tests, labs             |
| `comm/watchdog`      | lists communications under way, with a deadline                     | where waits never raise |
| `comm/flight_recorder` | keeps the last communications, their order and states             | in ranks of a launcher  |

A `Transport` moves the bytes (`comm/transport`). `set_transport` chooses it; layers and collectives do not know it.

Transport and observers are module state, because a backward pass may run on autograd's thread, where a context variable
would be lost; a process is one rank. Megatron-LM calls `torch.distributed` with `async_op=True`; torch's own
watchdog and flight recorder observe NCCL alone.
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from minimegatron import trace
from minimegatron.comm.axis import ALONE, Axis
from minimegatron.comm.transport import Started, Transport
from minimegatron.errors import ranges

# ------------------------------------------------------------------------------------------------ works, observers


class Blocked(NamedTuple):
    """The communication that blocks a thread: its name, and the name and global ranks of its axis."""

    op: str
    axis: str
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.op} over {self.axis} (ranks {ranges(self.ranks)})"


class Work:
    """A communication under way. `wait()` returns its output; until then neither input nor output may be touched.

    `Work(output)` is complete from the beginning, as is a collective over an axis of one rank.

    Args:
        output: returned by `wait()`.
        op: name of the collective, or of the message.
        axis: the ranks that take part.
        x: the tensor whose dtype and shape must agree over the axis; None for a message between two ranks.
        extra: whatever else must agree (the reduction).
        comparable: False where shapes may differ between ranks by design (uneven all-to-all).
        event: fields of its event in `minimegatron.trace`; None for no event.
        note: unless "", the time spent in `wait()` is a trace event of its own, with this note.
        timeout: arguments of each `handle.wait()`, where those block the host; () for the group's timeout.
        message: (sender, receiver) as global ranks; None for a collective.

    Attributes:
        start: when it was issued, seconds on the monotonic clock.
        handles: the transport's handles, to be waited for.
        failed: whether issuing it, or waiting for it, has raised.
        under_way: it has been issued, and was not waited for.
        blocks: the call itself waits until it is done (`blocking`).
    """

    def __init__(
        self,
        output: Any,
        op: str = "",
        axis: Axis = ALONE,
        *,
        x: torch.Tensor | None = None,
        extra: str = "",
        comparable: bool = True,
        event: dict[str, Any] | None = None,
        note: str = "",
        timeout: tuple[Any, ...] = (),
        message: tuple[int, int] | None = None,
    ) -> None:
        self.output, self.op, self.axis = output, op, axis
        self.x, self.extra, self.comparable = x, extra, comparable
        self.event, self.note, self.timeout, self.message = event, note, timeout, message
        self.start = self.wait_start = 0.0
        self.handles: Sequence[Any] = ()
        self.failed = self.under_way = self.blocks = False
        self._finish: Callable[[], object] | None = None
        self.entry: Any = None  # of the watchdog
        self.record: Any = None  # of the flight recorder

    @property
    def blocked(self) -> Blocked:
        """This communication as plain values, for messages about a thread that waits for it."""
        return Blocked(self.op, self.axis.name, self.axis.ranks)

    def wait(self) -> Any:
        """Block until the result is there (on a GPU: until the current stream may use it).

        Raises:
            RuntimeError: another rank has gone, or did not come within the deadline. `waited_for(error)` gives the
                communication, and a note of the exception prints it.
        """
        if self.under_way:
            self.wait_start = time.monotonic()
            with _observed(self, "wait", "waited"):
                for handle in self.handles:
                    handle.wait(*self.timeout)
                if self._finish is not None:
                    self._finish()
                self.under_way = False
            self.handles, self._finish = (), None
        return self.output


class Observer:
    """Called at every communication, in the thread that issues it. An error that `issue` raises reaches the caller."""

    def issue(self, work: Work) -> None:
        """The communication is about to be issued."""

    def issued(self, work: Work) -> None:
        """The call has returned, or has raised (`work.failed`)."""

    def wait(self, work: Work) -> None:
        """The wait is about to begin."""

    def waited(self, work: Work) -> None:
        """The wait is over, or has raised."""


class Waiting(Observer):
    """The communication in which each thread is blocked, while it issues or waits; if they are nested, the outermost.

    Attributes:
        page: memory that another process reads; it has the communication of the thread `publishes` as text, ended by a
            zero byte.
    """

    def __init__(self) -> None:
        self._of_thread: dict[int, Work] = {}
        self.page: mmap.mmap | None = None
        self.publishes: int | None = None

    def issue(self, work: Work) -> None:
        thread = threading.get_ident()
        if self._of_thread.setdefault(thread, work) is work and thread == self.publishes:
            assert self.page is not None
            text = _text(work.blocked)[: len(self.page) - 1] + b"\0"
            self.page[: len(text)] = text

    def issued(self, work: Work) -> None:
        thread = threading.get_ident()
        if self._of_thread.get(thread) is work:
            del self._of_thread[thread]
            if thread == self.publishes:
                assert self.page is not None
                self.page[0] = 0

    wait, waited = issue, issued

    def now(self) -> Blocked | None:
        """The communication that blocks the main thread or a thread of autograd; other Python threads do not count."""
        works = dict(self._of_thread)
        main = threading.main_thread().ident
        for thread in threading.enumerate():
            if thread.ident != main:
                works.pop(thread.ident or 0, None)
        work = works.get(main or 0) or next(iter(works.values()), None)
        return None if work is None else work.blocked


@functools.lru_cache(1024)
def _text(blocked: Blocked) -> bytes:
    return str(blocked).encode()


class Record(Observer):
    """Emits events in `minimegatron.trace`."""

    def waited(self, work: Work) -> None:
        if work.failed or not trace.recording():
            return
        end = time.monotonic()
        if work.note:
            trace.emit("wait", "wait", work.wait_start, end, axis=work.axis.name, note=work.note)
        if work.event is not None:
            trace.emit(kind="comm", start=work.start, end=end, **work.event)


class _State:
    """Module state: one for each process.

    Attributes:
        hooks: name of a hook -> the methods of observers that override it; replaced when observers change.
    """

    def __init__(self) -> None:
        self.transport, self.waiting = Transport(), Waiting()
        self.last: Blocked | None = None
        self.observers = (self.waiting, Record())

    @property
    def observers(self) -> tuple[Observer, ...]:
        return self._observers

    @observers.setter
    def observers(self, observers: tuple[Observer, ...]) -> None:
        self._observers = observers
        self.hooks: dict[str, list[Callable[[Work], None]]] = {
            name: [getattr(one, name) for one in observers if getattr(type(one), name) is not getattr(Observer, name)]
            for name in ("issue", "issued", "wait", "waited")
        }


_state = _State()


# ----------------------------------------------------------------------------------------------------------- the door


def issue(work: Work, start: Callable[[Transport], Started]) -> Work:
    """Begin a communication. Every communication of the package is issued here.

    Args:
        work: describes it, and is under way afterwards.
        start: calls the method of the transport. That gives the handles to be waited for, and what to call after the
            wait to write the output, or None.

    Returns:
        `work`.
    """
    _state.last = work.blocked
    with _observed(work, "issue", "issued"):
        work.start = time.monotonic()
        work.handles, work._finish = start(_state.transport)
        work.under_way, work.x = True, None
    return work


def blocking(op: str, axis: Axis) -> contextlib.AbstractContextManager[None]:
    """A block that communicates by itself and returns when it is done: objects, connections, comparisons."""
    work = Work(None, op, axis)
    work.blocks = True
    return _observed(work, "issue", "issued")


class _observed:
    """A block before and after which observers are called; `work.failed` is set if it raises."""

    __slots__ = ("_after", "_before", "_work")

    def __init__(self, work: Work, before: str, after: str) -> None:
        self._work, self._before, self._after = work, _state.hooks[before], _state.hooks[after]

    def __enter__(self) -> None:
        try:
            for tell in self._before:
                tell(self._work)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            self._work.failed = True
            if isinstance(error, RuntimeError) and self._work.op:
                _say_what_was_waited_for(error, self._work)
        for tell in self._after:
            tell(self._work)


def _say_what_was_waited_for(error: RuntimeError, work: Work) -> None:
    """Add a note for people and the attribute that `waited_for` reads; its values are plain, so the error can be
    pickled."""
    blocked = work.blocked
    if waited_for(error) is None:
        error.add_note(f"while rank {work.axis.ranks[work.axis.rank]} waited: {blocked}")
    error.waited_for = tuple(blocked)  # type: ignore[attr-defined]


def waited_for(error: BaseException) -> Blocked | None:
    """The communication that raised this error."""
    fields = getattr(error, "waited_for", None)
    return None if fields is None else Blocked(*fields)


def waiting() -> Blocked | None:
    """The communication that this rank is blocked in; from any thread."""
    return _state.waiting.now()


def last() -> Blocked | None:
    """The communication that this rank issued last."""
    return _state.last


def publish_waiting(page: mmap.mmap) -> None:
    """From now on `page` holds the communication that blocks the main thread, for other processes to read."""
    _state.waiting.page, _state.waiting.publishes = page, threading.main_thread().ident


def current_transport() -> Transport:
    """What moves the bytes now."""
    return _state.transport


def set_transport(transport: Transport) -> Transport:
    """From now on `transport` moves the bytes. Returns the one before."""
    before, _state.transport = _state.transport, transport
    return before


@contextlib.contextmanager
def transport(transport: Transport) -> Iterator[None]:
    """`set_transport` for a block."""
    before = set_transport(transport)
    try:
        yield
    finally:
        set_transport(before)


@contextlib.contextmanager
def alone(transport: Transport, *observers: Observer) -> Iterator[None]:
    """In the block only this transport and these observers are used; `minimegatron.trace` records nothing."""
    before = _state.transport, _state.observers
    _state.transport, _state.observers = transport, observers
    try:
        yield
    finally:
        _state.transport, _state.observers = before


def add_observer(observer: Observer) -> None:
    """Call it for every communication from now on."""
    _state.observers = (*_state.observers, observer)


def remove_observer(observer: Observer) -> None:
    """No longer call it; one that was not added is no error."""
    _state.observers = tuple(other for other in _state.observers if other is not observer)
