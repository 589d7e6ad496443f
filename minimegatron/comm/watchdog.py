"""Watchdog for communications whose waits do not block the host (NCCL's): a list of those under way, with a deadline.

On NCCL `work.wait()` returns at once and only makes a stream wait. A rank whose neighbour never comes blocks much
later, in some `.tolist()`, where no deadline of ours can raise; and after the group's timeout torch's watchdog aborts
the process that waited, without naming the rank that did not come.

So every communication is recorded before it is issued, and dropped when it is complete. `launch.watch` looks at the
oldest one every half second. When that is older than the deadline it asks the other ranks where they are, and ends this
rank with the error and the status 7 that a rank on gloo would have had (`launch/error_report`). torch's own timeout
is longer by `WATCHDOG_SECONDS`, for cases that this watchdog misses.

| backend | a wait that is too long                                     | found by                      |
|---------|-------------------------------------------------------------|-------------------------------|
| gloo    | raises in `work.wait()`                                     | the rank itself               |
| others  | blocks the host later, or in the call, while it connects    | `launch.watch`, by this list  |

The clock of a communication starts when the host issues it, as in torch's watchdog. A work keeps its tensors alive, so
once a stream waits for it an event on that stream replaces it: some microseconds for each communication. An event is
queried only after a deadline has passed, so a CUDA graph can be recorded meanwhile.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections import deque
from collections.abc import Callable

import torch

from minimegatron.comm.async_ops import Blocked, Observer, Work, add_observer, remove_observer

WATCHDOG_SECONDS = 60.0  # how much later than ours torch's own deadline is


class Entry:
    """A communication that may still be under way.

    Attributes:
        blocked: its name and its ranks.
        since: when the host issued it.
        done: tells whether it is complete; None while the host is still in the call.
    """

    def __init__(self, work: Work) -> None:
        self.blocked = work.blocked
        self.since = time.monotonic()
        self.done: Callable[[], bool] | None = None

    def over(self) -> bool:
        try:
            return self.done is not None and self.done()
        except RuntimeError:  # the device is broken: the next wait for it says why
            return False


class Watchdog(Observer):
    """The list of one rank. Calls may come from the main thread and from autograd's; `launch.watch` only reads.

    Attributes:
        seconds: how long a communication may take.
    """

    def __init__(self, seconds: float = 0.0) -> None:
        self.seconds = seconds
        self._entries: deque[Entry] = deque()
        self._lock = threading.Lock()

    def issue(self, work: Work) -> None:
        work.entry = entry = Entry(work)
        with self._lock:
            while self._entries and self._entries[0].over():
                self._entries.popleft()
            self._entries.append(entry)

    def issued(self, work: Work) -> None:
        handles = () if work.failed else work.handles  # what has raised is under way no more
        if work.entry is not None:
            work.entry.done = lambda: all(handle.is_completed() for handle in handles)

    def waited(self, work: Work) -> None:
        """Replace the handles by an event on the current stream, so that their tensors can be freed."""
        if work.entry is not None and not work.failed and torch.cuda.is_initialized():
            event = torch.cuda.Event()
            event.record()
            work.entry.done = event.query

    def oldest(self, seconds: float = 0.0) -> Blocked | None:
        """The first communication that was issued more than `seconds` ago and is not complete."""
        limit = time.monotonic() - seconds
        with self._lock:
            entries = [entry for entry in self._entries if entry.since <= limit]
        return next((entry.blocked for entry in entries if not entry.over()), None)

    def overdue(self) -> tuple[Blocked, float] | None:
        """A communication that is older than its deadline, and its age in seconds."""
        blocked = self.oldest(self.seconds)
        return None if blocked is None else (blocked, self.seconds)


class _Running:
    """The watchdog of this process, where the waits of its backend do not raise."""

    watchdog: Watchdog | None = None


def watch(backend: str, seconds: float) -> None:
    """Run a watchdog from now on, unless the backend's own waits raise; a communication may take so many seconds."""
    if _Running.watchdog is not None:
        remove_observer(_Running.watchdog)
    _Running.watchdog = None if waits_raise(backend) else Watchdog(seconds)
    if _Running.watchdog is not None:
        add_observer(_Running.watchdog)


def allow(seconds: float) -> None:
    """Raise the deadline: groups with a longer timeout than that of `watch` have been made."""
    if _Running.watchdog is not None:
        _Running.watchdog.seconds = max(_Running.watchdog.seconds, seconds)


def running() -> Watchdog | None:
    """The watchdog of this process; None where waits raise."""
    return _Running.watchdog


def waits_raise(backend: str) -> bool:
    """Whether `work.wait()` blocks the host and raises at the deadline (gloo), or only makes a stream wait (NCCL)."""
    return backend == "gloo"


def group_timeout(seconds: float, backend: str) -> datetime.timedelta:
    """The timeout of a process group, for a deadline of `seconds`."""
    return datetime.timedelta(seconds=seconds + (0.0 if waits_raise(backend) else WATCHDOG_SECONDS))
