"""A thread beside each rank that goes on when the rank is blocked.

The problem in a sentence: a rank blocked in a collective runs no Python, so it notices neither Ctrl-C, nor the death of
its neighbour, nor that another rank asks where it is. This thread sleeps in `poll` on

* a descriptor for each other rank's process on this machine (`pidfd`): readable means that it has ended;
* a pipe into which Python's C-level signal handler writes the number of every signal, blocked or not;

and reads the ledger every half second.

| what it sees                          | what it does                                                                |
|---------------------------------------|-----------------------------------------------------------------------------|
| a rank of this machine ended, not     | writes the cause ("was killed by SIGKILL"), so that every rank knows it;    |
| with 0                                | prints which calls contradicted each other, if some did                     |
| the job has failed                    | the rank has 10 s to leave by itself, then it is ended with status 5        |
| the store is gone: rank 0, or the     | the same                                                                    |
| launcher, served it                   |                                                                             |
| Ctrl-C                                | the rank has 5 s (it may be blocked in C), then 130; at once at the second  |
| another rank asks where this one is   | answers with the line, and the collective, that the main thread is in, and  |
|                                       | hands in the flight record (`launch/flight_records`)                        |
| SIGUSR2                               | asks all ranks for their flight records, and prints the first mismatch      |
| a communication overdue               | asks the others, and leaves with an error that names the missing ranks      |
| (`comm/watchdog`)                     |                                                                             |
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType

import torch.distributed as dist

from minimegatron.comm import async_ops, watchdog
from minimegatron.comm.async_ops import Blocked
from minimegatron.launch import flight_records, procs
from minimegatron.launch.ledger import INTERRUPTED, Ledger, Position

TICK_SECONDS = 0.5
FAILED_SECONDS = 10.0
INTERRUPTED_SECONDS = 5.0
RANK_FAILED = 5  # exit status, as `RankError.exit_code`


class Overdue(RuntimeError):
    """A communication took longer than allowed, and the thread that waits at `position` cannot raise."""

    def __init__(self, position: Position, seconds: float) -> None:
        super().__init__(f"{position.op} timed out after {1000 * seconds:.0f} ms")
        self.position = position


class Watch(threading.Thread):
    """The watch of one rank. Start it from the main thread.

    Args:
        siblings: {rank: pid} of the other ranks on this machine.
        say: prints a line for the user.
        overdue: ends this process when a communication takes longer than allowed (`comm.watchdog`).
    """

    def __init__(
        self,
        ledger: Ledger,
        siblings: dict[int, int],
        say: Callable[[str], None],
        overdue: Callable[[Overdue], None],
    ) -> None:
        super().__init__(name="minimegatron-watch", daemon=True)
        self._ledger = ledger
        self._say = say
        self._overdue = overdue
        self._main = threading.main_thread().ident
        self._leave: tuple[float, int] | None = None  # (when, exit status)
        self.left: set[int] = set()  # siblings that ended with status 0
        self._pids, self._pidfds = siblings, _pidfds(siblings)
        self._pipe, signals = os.pipe()
        os.set_blocking(signals, False)
        self._signals = signals
        self._wakeup = signal.set_wakeup_fd(signals, warn_on_full_buffer=False)
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))  # a loader's signals are its own
        self._done = False

    def stop(self) -> None:
        """End the watch; from the main thread."""
        signal.set_wakeup_fd(self._wakeup)
        self._done = True
        os.write(self._signals, b"\0")
        self.join(2 * TICK_SECONDS)
        for fd in (self._pipe, self._signals, *self._pidfds.values()):
            os.close(fd)

    def end(self, ranks: list[int]) -> None:
        """SIGKILL siblings that do not answer: a stopped process would ignore any other signal."""
        for fd in (self._pidfds[r] for r in ranks if r in self._pidfds):
            try:
                signal.pidfd_send_signal(fd, signal.SIGKILL)
            except ProcessLookupError:
                continue

    def run(self) -> None:
        poll = select.poll()
        poll.register(self._pipe, select.POLLIN)
        for fd in self._pidfds.values():
            poll.register(fd, select.POLLIN)
        rank_of = {fd: rank for rank, fd in self._pidfds.items()}
        try:
            while not self._done:
                for fd, _ in poll.poll(1000 * TICK_SECONDS):
                    if fd == self._pipe:
                        self._on_signals(os.read(fd, 64))
                    else:
                        poll.unregister(fd)
                        self._on_end(rank_of[fd])
                self._look()
        except dist.DistError:
            self._end_alone()

    def _end_alone(self) -> None:
        """The store, and with it the process that serves it, has gone: no rank can be asked, and the job has failed."""
        until = time.monotonic() + FAILED_SECONDS
        while not self._done and time.monotonic() < until:
            time.sleep(TICK_SECONDS)
        if not self._done:
            self._say(f"rank {self._ledger.rank} ends because the store of the job is gone: rank 0 or the launcher, "
                      "which serves it, has ended")  # fmt: skip
            os._exit(RANK_FAILED)

    def _on_signals(self, numbers: bytes) -> None:
        records = flight_records.running()
        if records is not None and numbers.count(flight_records.SIGNAL):
            self._print(records.on_signal())
        for _ in range(numbers.count(signal.SIGINT)):
            if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
                return  # the program handles Ctrl-C itself
            if self._leave is not None and self._leave[1] == 128 + signal.SIGINT:
                os._exit(128 + signal.SIGINT)
            self._leave = (time.monotonic() + INTERRUPTED_SECONDS, 128 + signal.SIGINT)
            self._ledger.claim(self._ledger.rank, INTERRUPTED)

    def _on_end(self, rank: int) -> None:
        if (records := flight_records.running()) is not None:
            records.ended.add(rank)
        status = procs.zombie_status(self._pids[rank])
        if status == 0:
            self.left.add(rank)
            return
        how = "ended without a word" if status is None else procs.how_it_ended(status)
        try:
            cause = self._ledger.claim(rank, how)
        except dist.DistError:  # it has served the store
            self._say(f"rank {rank} {how}")
            raise
        # SIGTERM is how a launcher ends all ranks: nothing to report.
        if cause.author == self._ledger.rank and status != -signal.SIGTERM:
            # gloo aborts a rank that gets a message of another size; its launcher ends the others soon
            if records is not None and (finding := records.finding_at_once()).certain:
                self._print(records.said(finding))
            self._say(f"rank {rank} {how}")

    def _look(self) -> None:
        if self._leave is None and self._ledger.cause():
            self._leave = (time.monotonic() + FAILED_SECONDS, RANK_FAILED)
        if self._leave is not None and time.monotonic() > self._leave[0]:
            os._exit(self._leave[1])
        running, records = watchdog.running(), flight_records.running()
        if records is not None:
            records.asked()
            if self._ledger.asked():
                records.hand_in(flight_records.HANG, "a rank asks where the others are")
        if self._ledger.asked():
            oldest = None if running is None else running.oldest()
            self._ledger.answer(self._position(oldest or async_ops.waiting()), certain=False)
        if running is not None and (late := running.overdue()) is not None:
            blocked, seconds = late
            self._overdue(Overdue(self._position(blocked), seconds))

    def _print(self, text: str) -> None:
        os.write(2, f"{text}\n".encode(errors="replace"))

    def _position(self, blocked: Blocked | None) -> Position:
        """The line of the main thread, and the communication that blocks it: the oldest one of the watchdog."""
        return position(sys._current_frames().get(self._main or 0), blocked)


def _pidfds(pids: dict[int, int]) -> dict[int, int]:
    """A descriptor for each process; none if the system has no pidfd."""
    try:
        return {rank: os.pidfd_open(pid) for rank, pid in pids.items()}
    except (AttributeError, OSError):
        return {}


def position(frame: FrameType | None, blocked: Blocked | None) -> Position:
    """The line and the communication of a thread.

    Args:
        frame: its innermost frame.
        blocked: the communication of this package that blocks it, or that has raised. Without one, the stack is
            searched for a function of `torch.distributed`.
    """
    frames = list(_outward(frame))
    blocked = blocked or next(filter(None, map(_in_torch, frames)), Blocked("", "", ()))
    places = [procs.Frame(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in frames]
    return Position(*blocked, str(procs.users_frame(places) or ""))


def _in_torch(frame: FrameType) -> Blocked | None:
    """The function of `torch.distributed` that a frame belongs to; the axis is that of the last call over its ranks."""
    if not frame.f_code.co_filename.endswith("distributed_c10d.py") or "group" not in frame.f_locals:
        return None
    ranks = tuple(dist.get_process_group_ranks(frame.f_locals["group"] or dist.group.WORLD))
    last = async_ops.last()
    return Blocked(frame.f_code.co_name, last.axis if last is not None and last.ranks == ranks else "", ranks)


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
