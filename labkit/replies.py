"""The processes of a job: their answers as they arrive, how each ended, where late ones are.

The caller holds three ends for each process, and the process the other three:

    job      an unlinked file     -> the process     its job; no other process can open it
    answer   a pipe               <- the process     "+", its sign of life, then one line of JSON
    stack    a pipe               <- the process     its Python stack, when SIGABRT asks a late process for it

Everything that arrives is a learner's: it is read up to a limit and never waited for longer than a deadline.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import signal
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from labkit import plain
from labkit.ranks.fork_server import ForkServer, stacks
from minimegatron.errors import MinimegatronError
from minimegatron.launch import procs

_MAX_FILES = 20_000  # in the folder of a job
_MAX_STACK = 1 << 16


@dataclasses.dataclass(frozen=True)
class Reply:
    """The result of one process: an answer, or the reason why there is none.

    Attributes:
        value: the plain data it returned; None without an answer, but of a generator what it had yielded by then.
        ended: "" with an answer; "late" at the deadline; "stuck" when all that had not answered only waited; else how
            the process ended ("was killed by SIGKILL").
        stack: the stack of a late or stuck process, the innermost frame first.
        order: position in the order of arrival of the answers.
    """

    value: Any = None
    ended: str = ""
    stack: tuple[procs.Frame, ...] = ()
    order: int = 0


class Process:
    """A process of the nursery, and the caller's ends.

    Args:
        order: for `nursery.live`.
        job: plain data.
        sockets: descriptors that it gets as well.
    """

    def __init__(self, server: ForkServer, order: dict[str, Any], job: Any, sockets: Sequence[int]) -> None:
        Path(order["folder"]).mkdir()
        self.dumped = bytearray()
        self.answer, answer = os.pipe()
        self.stack, stack = os.pipe()
        os.set_blocking(self.stack, False)
        try:
            with tempfile.TemporaryFile(dir=server.folder) as text:
                text.write(plain.dumps(job, most=None).encode())
                text.seek(0)
                self.pid = server.fork(answer, text.fileno(), stack, *sockets, order=order)
            self.handle = _handle(self.pid)
        except BaseException:
            os.close(self.answer)
            os.close(self.stack)
            raise
        finally:
            os.close(answer)
            os.close(stack)

    def close(self) -> None:
        """Kill it, if it lives, and close the ends."""
        os.close(self.answer)
        os.close(self.stack)
        if self.handle is not None:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.handle, signal.SIGKILL)
            os.close(self.handle)

    def dump(self) -> str:
        """What it has written of its stack so far."""
        with contextlib.suppress(BlockingIOError):
            while len(self.dumped) < _MAX_STACK and (data := os.read(self.stack, _MAX_STACK)):
                self.dumped += data
        return self.dumped.decode(errors="replace")


class Answers:
    """Answers as they arrive.

    Args:
        pipes: one a process.
        limit: bytes of a line.

    Attributes:
        started: processes that gave a sign of life, or have ended.
        waiting: processes that have neither answered nor ended.
        complete: process -> (order of arrival, line; b"" if it is too long).
    """

    def __init__(self, pipes: Sequence[int], limit: int) -> None:
        self._limit, self._partial = limit, [bytearray() for _ in pipes]
        self.started, self.waiting = set[int](), set(range(len(pipes)))
        self.complete: dict[int, tuple[int, bytes]] = {}
        self._selector = selectors.DefaultSelector()
        for index, pipe in enumerate(pipes):
            self._selector.register(pipe, selectors.EVENT_READ, index)

    def read(self, seconds: float) -> None:
        """Read what has arrived; if nothing has, wait up to `seconds`."""
        for key, _ in self._selector.select(seconds):
            index, data = key.data, os.read(key.fd, 1 << 20)
            line = self._partial[index]
            line += data
            self.started.add(index)
            if len(line) > self._limit:
                self.complete[index] = (len(self.complete), b"")
            elif line.endswith(b"\n"):
                self.complete[index] = (len(self.complete), bytes(line[1:]))
            if not data or index in self.complete:
                self._selector.unregister(key.fd)
                self.waiting.remove(index)

    def so_far(self, index: int) -> list[Any] | None:
        """What a generator has yielded that has not come to its end."""
        text = bytes(self._partial[index][1:])
        with contextlib.suppress(MinimegatronError):
            return _values(text) if plain.NEXT in text else None
        return None

    def close(self) -> None:
        self._selector.close()


def ends(
    server: ForkServer, processes: Sequence[Process], answers: Answers, full: Mapping[int, str], stuck: bool
) -> list[Reply]:
    """Ask late processes for their stacks, kill all, and return the reply of each.

    Args:
        full: process -> the limit that it, or its job, has exceeded.
        stuck: those that have not answered wait for each other.
    """
    late = {index: processes[index].pid for index in sorted(answers.waiting) if index not in full}
    # The fault handler of each answers SIGABRT with its Python stack.
    found = stacks(late, signal.SIGABRT, lambda index: processes[index].dump(), seconds=2.0)
    unanswered = {
        index: Reply(answers.so_far(index), "stuck" if stuck else "late", tuple(frames))
        for index, frames in found.items()
    }
    unanswered |= {index: Reply(ended=why) for index, why in full.items()}
    statuses = server.end(*(process.pid for process in processes))
    return [unanswered.get(index) or _reply(answers, index, status) for index, status in enumerate(statuses)]


def _reply(answers: Answers, index: int, status: int) -> Reply:
    """The answer of a process that is not late, or how it ended."""
    if (answer := answers.complete.get(index)) is None:
        return Reply(answers.so_far(index), procs.how_it_ended(status))
    order, text = answer
    if not text:
        return Reply(ended="sent more than an answer may be")
    try:
        return Reply(value=_values(text) if plain.NEXT in text else plain.loads(text), order=order)
    except MinimegatronError as error:
        return Reply(ended=f"sent what cannot be read: {error.what}")


def _values(text: bytes) -> list[Any]:
    return [plain.loads(one) for one in text.split(plain.NEXT)[:-1]]  # behind the last: the end, or a half


def _handle(pid: int) -> int | None:
    """A descriptor with which a process can be killed after the nursery has gone.

    None if the system has no pidfd, and for a process that has ended already: a stub takes less than a millisecond.
    """
    try:
        return os.pidfd_open(pid) if hasattr(os, "pidfd_open") else None
    except OSError:
        return None


def used(folder: Path, enough: int) -> int:
    """Bytes on disk below a folder, counted until there are more than `enough`; too many files are too much."""
    total, files, wanted = 0, 0, [str(folder)]
    while wanted:
        with contextlib.suppress(OSError), os.scandir(wanted.pop()) as entries:
            for entry in entries:
                files += 1
                total += entry.stat(follow_symlinks=False).st_blocks * 512
                wanted += [entry.path] if entry.is_dir(follow_symlinks=False) else []
                if files > _MAX_FILES or total > enough:
                    return max(total, enough + 1)
    return total


def processor(pid: int) -> tuple[bool, float]:
    """Whether a process's main thread sleeps, and the seconds of processor that it has used.

    (False, 0) if it cannot be read.
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state == "S", int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return False, 0.0


def held(pid: int) -> tuple[int, int]:
    """Memory that no folder shows: bytes of files without a name that a process holds open, and its threads.

    (0, 0) if it cannot be read. A process with a root of its own cannot exceed its limits; others can.
    """
    unnamed, threads = 0, 0
    with contextlib.suppress(OSError, ValueError):
        threads = len(os.listdir(f"/proc/{pid}/task"))
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found = os.stat(f"/proc/{pid}/fd/{name}")
                unnamed += found.st_blocks * 512 if found.st_nlink == 0 else 0
    return unnamed, threads
