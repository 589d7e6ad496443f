"""Pipes between the ranks of a process group that are processes of one machine: for a few numbers at a time.

The problem in a sentence: gloo sends 40 bytes through TCP, and a thread of each process wakes up for them, which costs
two ranks more than the 512 KB that the numbers announce (`comm/shared_memory`).

    sender     write()  -- 48 bytes through the pipe from rank 0 to rank 1 -->  read(), poll() until they come  receiver

Each rank reads one pipe from each other rank. What gloo promises, a pipe promises as well:

| promise                                  | kept by                                                         |
|------------------------------------------|-----------------------------------------------------------------|
| messages of one tag keep their order     | tickets: the n-th `expect` of a tag gets the n-th message of it |
| a wait has a deadline, that of the group | `poll`                                                          |
| the end of a sender is noticed at once   | the kernel closes its end of the pipe: end of file              |
| no message is torn                       | a pipe writes so few bytes at once or not at all (`PIPE_BUF`)   |

A sender opens its end as `/proc/<pid>/fd/<n>`, as it does a slot of shared memory; then the receiver closes that end of
its own, or it would never see an end of file.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence

NUMBERS = 5  # of a message, beside its tag
_LETTER = struct.Struct(f"{NUMBERS + 1}q")
_LOOK_SECONDS = 1.0  # the longest sleep: another thread of this rank may have read what this one waits for

Ticket = tuple[int, int]  # tag, number


class Inbox:
    """The pipe from one rank.

    Attributes:
        end: where its sender writes; closed in this process once the sender has opened it.
    """

    def __init__(self) -> None:
        self._fd, self.end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._expected: Counter[int] = Counter()
        self._come: Counter[int] = Counter()
        self._letters: dict[Ticket, tuple[int, ...]] = {}
        self._lock = threading.Lock()

    def expect(self, tag: int) -> Ticket:
        """A ticket for the next message of this tag that nobody has a ticket for."""
        number = self._expected[tag]
        self._expected[tag] += 1
        return tag, number

    def take(self, ticket: Ticket, seconds: float, sender: str) -> tuple[int, ...]:
        """Block until the ticket's message is here; its numbers.

        Raises:
            RuntimeError: the sender did not send within so many seconds, or has closed its end.
        """
        deadline = 0.0
        while (letter := self._find(ticket, sender)) is None:
            now = time.monotonic()
            deadline = deadline or now + seconds
            if now >= deadline:
                raise RuntimeError(f"Timed out waiting {1000 * seconds:.0f}ms for a message from {sender}")
            _sleep_until(self._fd, select.POLLIN, min(deadline - now, _LOOK_SECONDS))
        return letter

    def _find(self, ticket: Ticket, sender: str) -> tuple[int, ...] | None:
        with self._lock:
            while ticket not in self._letters:
                try:
                    letter = os.read(self._fd, _LETTER.size)
                except BlockingIOError:
                    return None
                except OSError as error:  # this rank itself has closed it
                    raise RuntimeError(f"Connection closed by peer: {sender}: {error}") from error
                if not letter:
                    raise RuntimeError(f"Connection closed by peer: {sender}")
                *numbers, tag = _LETTER.unpack(letter)
                self._letters[tag, self._come[tag]] = tuple(numbers)
                self._come[tag] += 1
            return self._letters.pop(ticket)

    def close_end(self) -> None:
        if self.end >= 0:
            os.close(self.end)
            self.end = -1

    def close(self) -> None:
        self.close_end()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Pipes:
    """The pipes of this rank in one process group.

    Args:
        size, rank: of the group.
        seconds: the deadline of a wait.
    """

    def __init__(self, size: int, rank: int, seconds: float) -> None:
        self.seconds = seconds
        self.inboxes: list[Inbox | None] = []
        self._outboxes = [-1] * size
        _open.add(self)
        for other in range(size):  # if this process may not have so many files, those that it has are closed
            self.inboxes.append(None if other == rank else Inbox())

    def offer(self) -> list[int]:
        """For each rank of the group the file descriptor into which it may write; its own: -1."""
        return [-1 if inbox is None else inbox.end for inbox in self.inboxes]

    def open(self, rank: int, pid: int, fd: int) -> None:
        """Open the pipe to a rank, of which its process has offered this end.

        Raises:
            OSError: it does not exist, or may not be opened.
        """
        self._outboxes[rank] = os.open(f"/proc/{pid}/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)

    def all_open(self) -> None:
        """Every rank has opened its pipes: from now on a sender's end is its last."""
        for inbox in self.inboxes:
            if inbox is not None:
                inbox.close_end()

    def expect(self, rank: int, tag: int) -> Ticket:
        """A ticket for the next message from a rank with this tag."""
        return self._inbox(rank).expect(tag)

    def take(self, rank: int, ticket: Ticket, sender: str) -> tuple[int, ...]:
        """Block until the ticket's message is here; see `Inbox.take`."""
        return self._inbox(rank).take(ticket, self.seconds, sender)

    def _inbox(self, rank: int) -> Inbox:
        inbox = self.inboxes[rank]
        assert inbox is not None, "a rank sends itself nothing"
        return inbox

    def write(self, rank: int, numbers: Sequence[int], tag: int, receiver: str) -> None:
        """Send `NUMBERS` integers to a rank.

        Raises:
            RuntimeError: it has closed the pipe; or the pipe was full until the deadline, since it reads nothing.
        """
        letter, fd, deadline = _LETTER.pack(*numbers, tag), self._outboxes[rank], time.monotonic() + self.seconds
        while True:
            try:
                os.write(fd, letter)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    full = f"Timed out waiting {1000 * self.seconds:.0f}ms for {receiver} to read a message"
                    raise RuntimeError(full) from None
                _sleep_until(fd, select.POLLOUT, _LOOK_SECONDS)
            except OSError as error:  # EPIPE; or EBADF, when this rank itself has closed it
                raise RuntimeError(f"Connection closed by peer: {receiver}: {error}") from error

    def close(self) -> None:
        """Close all ends. Safe to call twice."""
        for inbox in self.inboxes:
            if inbox is not None:
                inbox.close()
        for fd in self._outboxes:
            if fd >= 0:
                os.close(fd)
        self._outboxes = [-1] * len(self._outboxes)

    def __del__(self) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.close()


def _sleep_until(fd: int, event: int, seconds: float) -> None:
    poll = select.poll()  # two threads may not share one
    poll.register(fd, event)
    poll.poll(1000 * seconds + 1)


_open: weakref.WeakSet[Pipes] = weakref.WeakSet()


def close_all() -> None:
    """Close every pipe of this process: whoever waits for a message of it learns that none will come."""
    for pipes in list(_open):
        pipes.close()


if hasattr(os, "register_at_fork"):  # a child that kept an end open would hide the end of its parent
    os.register_at_fork(after_in_child=close_all)
