"""What this rank has asked its group for and not yet got, where waiting does not tell.

The problem in a sentence: on NCCL `work.wait()` returns at once and only makes a stream wait, so a rank whose neighbour
never comes blocks much later, in some `.tolist()`, where no deadline of ours can raise; and after the group's timeout
torch's watchdog aborts a process that waited, without a word about the one that did not come.

So every communication is written down before it is called, and crossed off when its work is complete. `launch.watch`
looks at the oldest one every half second. When that is older than the deadline it asks the other ranks where they are,
and ends this rank with the error, and the status 7, that a rank on gloo would have had (`launch.blame`). torch's own
timeout is later by `WATCHDOG_SECONDS`: its watchdog speaks only where ours could not.

| backend | a wait that is too long                                  | found by                      |
|---------|----------------------------------------------------------|-------------------------------|
| gloo    | raises in `work.wait()`, where the rank is                | the rank itself               |
| others  | blocks the host somewhere, or a call that still connects | the watch, by this list       |

The clock of a call starts when the host makes it, as that of torch's watchdog does. A work keeps its tensors alive, so
once a stream waits for it an event on that stream stands for it: some microseconds for each communication. The watch
asks nothing of an event before a deadline has passed, so a CUDA graph can be recorded meanwhile.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.comm import calls
from minimegatron.comm.axis import Axis

WATCHDOG_SECONDS = 60.0  # how much later than ours torch's own deadline is


class Call:
    """A communication that may still be under way: which, over whom, since when.

    Attributes:
        done: says whether it is complete; None while the host is still in the call.
    """

    def __init__(self, op: str, axis: Axis) -> None:
        self.op = op
        self.axis = axis.name
        self.ranks = axis.ranks
        self.since = time.monotonic()
        self.done: Callable[[], bool] | None = None

    def over(self) -> bool:
        try:
            return self.done is not None and self.done()
        except RuntimeError:  # the device is broken: the next wait for it says why
            return False

    def waited(self) -> None:
        """From now on the current stream stands for the work, which may go, and its tensors with it."""
        if torch.cuda.is_initialized():
            event = torch.cuda.Event()
            event.record()
            self.done = event.query


class Waited:
    """A work whose `wait()` is noticed."""

    def __init__(self, work: dist.Work, call: Call) -> None:
        self._work, self._call = work, call

    def wait(self, *args: Any) -> bool:
        self._work.wait(*args)
        self._call.waited()
        return True


class Outstanding:
    """The list of one rank. Calls may come from the main thread and from autograd's; the watch only reads.

    Attributes:
        listening: whether it is kept.
        seconds: how long a communication may take.
    """

    def __init__(self) -> None:
        self.listening, self.seconds = False, 0.0
        self._calls: deque[Call] = deque()
        self._lock = threading.Lock()

    def begin(self, op: str, axis: Axis) -> Call | None:
        """Write down a communication that is about to be called; None where no list is kept."""
        if not self.listening:
            return None
        call = Call(op, axis)
        with self._lock:
            while self._calls and self._calls[0].over():
                self._calls.popleft()
            self._calls.append(call)
        return call

    def oldest(self, seconds: float = 0.0) -> Call | None:
        """The first communication that was called more than `seconds` ago and is not complete."""
        limit = time.monotonic() - seconds
        with self._lock:
            calls = [call for call in self._calls if call.since <= limit]
        return next((call for call in calls if not call.over()), None)

    def clear(self) -> None:
        with self._lock:
            self._calls.clear()


_list = Outstanding()


def listen(backend: str, seconds: float) -> None:
    """Keep the list from now on, unless the backend's own waits raise; a communication may take so many seconds."""
    _list.listening, _list.seconds = not waits_raise(backend), seconds
    _list.clear()
    calls.begin_with(started if _list.listening else None)


def allow(seconds: float) -> None:
    """Groups have been made that may take longer than the one of `listen`."""
    _list.seconds = max(_list.seconds, seconds)


def oldest() -> Call | None:
    """The first communication that is under way."""
    return _list.oldest()


def overdue() -> tuple[Call, float] | None:
    """A communication that takes longer than it may, and how long that is."""
    call = _list.oldest(_list.seconds)
    return None if call is None else (call, _list.seconds)


def waits_raise(backend: str) -> bool:
    """Whether `work.wait()` blocks the host and raises at the deadline (gloo), or only makes a stream wait (NCCL)."""
    return backend == "gloo"


def group_timeout(seconds: float, backend: str) -> datetime.timedelta:
    """The timeout that a process group is made with, for a deadline of `seconds`."""
    return datetime.timedelta(seconds=seconds + (0.0 if waits_raise(backend) else WATCHDOG_SECONDS))


def started(op: str, axis: Axis, call: Callable[[], Any]) -> Any:
    """Call a communication that returns its work, or a list of works, and write it down; what it returns.

    Where the list is kept, the works have no more than `wait()`.
    """
    entry = _list.begin(op, axis)
    if entry is None:
        return call()
    result = call()  # an error in here is the rank's own
    works = result if isinstance(result, list) else [result]
    entry.done = lambda: all(work.is_completed() for work in works)
    tracked = [Waited(work, entry) for work in works]
    return tracked if isinstance(result, list) else tracked[0]


@contextlib.contextmanager
def blocking(op: str, axis: Axis) -> Iterator[None]:
    """A block that communicates and is over when the host leaves it: objects, connections."""
    entry = _list.begin(op, axis)
    try:
        yield
    finally:
        if entry is not None:
            entry.done = lambda: True
