"""Warm ranks: run a function on N processes in milliseconds, again and again.

The problem in a sentence: four fresh gloo ranks cost 8 CPU-seconds, nearly all of it `import torch`, so a test suite or
a notebook that starts ranks for every question is unusable::

    with WarmPool(4) as pool:
        sums = pool.run(add_up, torch.ones(3), timeout=20)      # add_up(rank, world, x), on each rank

The ranks are forked from a server that has imported everything (`ranks/worker`); the first server of a process pays for
that once, about 3 s (`ranks/fork_server`). Function and arguments travel by pickle over a socket pair, the function by
its import path; results come back as a list by rank. Their process group is gloo's and they see no GPU, on any machine.

| what goes wrong                       | what you see                                                              |
|---------------------------------------|---------------------------------------------------------------------------|
| the function raises on rank k         | `RankError`: k, the line; its traceback as a note, its error as `__cause__` |
| rank k is killed                      | `RankError`: rank k was killed by SIGKILL                                 |
| no answer in time                     | `DeadlineError`: which rank kept which waiting, and the line each is at   |
| the function leaves the process dirty | nothing: that rank is replaced before the next job                        |
| this process dies, however            | the fork server reads end of file and ends; the kernel ends its children  |

Whatever happened, the next job finds N clean ranks and a fresh process group.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import fcntl
import mmap
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any

from labkit.ranks.fork_server import REPLY_SECONDS, START_SECONDS, ForkServer, stacks
from labkit.ranks.worker import RANK_ENVIRONMENT, Failure, Job
from minimegatron.errors import ConfigError, DeadlineError, RankError, named
from minimegatron.launch import procs
from minimegatron.launch.startup_deadline import StartupDeadline, StartupProgress

# Where this package keeps what ranks work with.
PRELOADED = tuple(f"minimegatron.{folder}." for folder in "kernels data layers parallel optim models training".split())


class Results(list[Any]):
    """What the function returned, by rank; `stdout[r]` is what rank r printed."""

    stdout: list[str]


class WarmPool:
    """N ranks that wait for jobs.

    Args:
        nranks: number of ranks.
        fingerprints: compare every collective of the package between ranks (see `comm.fingerprints`).

    Attributes:
        stdout: what each rank printed in the last job, also when it failed.
    """

    def __init__(self, nranks: int, *, fingerprints: bool = False) -> None:
        if nranks < 1:
            raise ConfigError(f"a pool of {nranks} ranks", fix="ask for at least 1")
        self.nranks, self.fingerprints = nranks, fingerprints
        self._ranks: list[Rank | None] = [None] * nranks
        self._closed = False
        self.stdout: list[str] = []
        self._one_at_a_time = threading.Lock()
        self._heal()

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> Results:
        """`fn(rank, world, *args, **kwargs)` on every rank, inside a process group of its own.

        Args:
            fn: a function at the top level of a module that the ranks can import (they get this process's `sys.path`).
            timeout: seconds for the whole job.

        Returns:
            The results by rank, with `.stdout`.

        Raises:
            RankError: a rank raised or died; see the module docstring.
            DeadlineError: some ranks did not answer; the message says where each of them waits.
            ConfigError: `fn` cannot be found by its name, or an argument cannot be pickled.
        """
        call = _pickled_call(fn, args, kwargs)
        with self._one_at_a_time:
            return self._run(call, fn.__qualname__, timeout)

    def _run(self, call: bytes, name: str, timeout: float) -> Results:
        self._heal()
        ranks = [r for r in self._ranks if r is not None]
        store = str(Path(this_process().running_server().folder, uuid.uuid4().hex))
        job = (self.nranks, store, timeout + 2 * REPLY_SECONDS, self.fingerprints)
        try:
            for r, rank in enumerate(ranks):
                rank.start(Job(r, *job, list(sys.path), os.getcwd(), dict(os.environ), this_process().keeps, call))
            _collect(ranks, time.monotonic() + timeout)
            _raise_first_failure(ranks, name, timeout)
            results = Results(rank.answer[0] for rank in ranks)  # type: ignore[index]
        finally:
            self.stdout = [rank.read(rank.out) for rank in ranks]
            self._release()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(store)
        results.stdout = self.stdout
        return results

    def close(self) -> None:
        """End the ranks. Safe to call twice."""
        for rank in self._ranks:
            if rank is not None:
                rank.end()
        self._ranks = [None] * self.nranks
        self._closed = True

    def __enter__(self) -> WarmPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _heal(self) -> None:
        """Replace the ranks that died, did not answer, or could not clean up after the last job."""
        if self._closed:
            raise ConfigError("this pool of ranks is closed", fix="make a new one")
        for r, rank in enumerate(self._ranks):
            if rank is None or not rank.is_clean():
                if rank is not None:
                    rank.end()
                self._ranks[r] = Rank(this_process().running_server())

    def _release(self) -> None:
        """Tell the ranks that all have answered; end those that have not."""
        for r, rank in enumerate(self._ranks):
            if rank is not None and not rank.release():
                rank.end()
                self._ranks[r] = None


@dataclasses.dataclass
class Process:
    """State of one process: at most one fork server, and the pools that everything in it shares.

    Attributes:
        preload: modules that its ranks need beside those of this package that it has imported itself.
        keeps: how the names of modules begin that a rank imports once, and not for each job.
    """

    pid: int
    server: WarmServer | None = None
    pools: dict[tuple[int, bool], WarmPool] = dataclasses.field(default_factory=dict)
    preload: tuple[str, ...] = ()
    keeps: tuple[str, ...] = ()

    def running_server(self) -> WarmServer:
        """The fork server; started when there is none, or when it has died."""
        if self.server is None or self.server.process.poll() is not None:
            if self.server is None:
                atexit.register(self.close)
            ours = sorted(name for name in sys.modules if name.startswith(PRELOADED))
            self.server = WarmServer([*self.preload, *ours])
        return self.server

    def close(self) -> None:
        """End the shared pools and the server."""
        while self.pools:
            self.pools.popitem()[1].close()
        if self.server is not None:
            self.server.close(REPLY_SECONDS)


_process = Process(os.getpid())


def this_process() -> Process:
    """The state of this process. After a fork the child starts with none: server and pools belong to its parent."""
    global _process  # noqa: PLW0603  one fork server a process, none in its forks
    if _process.pid != os.getpid():
        _process = Process(os.getpid())
    return _process


def shared_pool(nranks: int, *, fingerprints: bool = False) -> WarmPool:
    """The pool of this size that this process keeps until it ends."""
    pools = this_process().pools
    if (nranks, fingerprints) not in pools:
        pools[nranks, fingerprints] = WarmPool(nranks, fingerprints=fingerprints)
    return pools[nranks, fingerprints]


def _log_file() -> IO[bytes]:
    """An unnamed file to which both sides append: it is emptied before each job, and offsets outlive that."""
    file = tempfile.TemporaryFile()
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file


class Rank:
    """The client's end of one rank.

    Args:
        server: forks it.
    """

    def __init__(self, server: WarmServer) -> None:
        # Unlinked files rather than pipes: they never fill up, and can be read after the rank is dead.
        self.out, self.err = _log_file(), _log_file()
        # What the rank is blocked in, as it writes it itself: a rank that waits for another answers no question.
        self.page = tempfile.TemporaryFile()
        os.ftruncate(self.page.fileno(), mmap.PAGESIZE)
        self.server = server
        near, far = socket.socketpair()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # a rank stopped in the middle of a message
            near.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 10, 0))
        with far:
            files = (self.out, self.err, self.page)
            self.pid = self.server.fork(far.fileno(), *(file.fileno() for file in files))
        self.channel = connection.Connection(near.detach())
        self.answer: tuple[Any, Failure | None] | None = None
        self.failure = ""  # how it died, or why its answer is none
        self.gone = False
        self.busy = self.cleaning = False

    def start(self, job: Job) -> None:
        """Send a job; `receive` notices a rank that has died while idle."""
        for file in (self.out, self.err):
            os.ftruncate(file.fileno(), 0)
        self.answer = None
        self.failure = ""
        self.busy = True
        with contextlib.suppress(OSError):
            self.channel.send_bytes(pickle.dumps(tuple(job)))

    def receive(self) -> None:
        """Read the answer, or find out how the rank died."""
        try:
            self.answer = pickle.loads(self.channel.recv_bytes())  # noqa: S301  from a process that this one started
        except (EOFError, OSError):
            self.failure = procs.how_it_ended(self.server.status(self.pid))
            self.gone = True
        except Exception as error:  # whatever unpickling may raise: a class we cannot import, bytes that are none
            self.failure = f"sent an answer that cannot be read: {type(error).__name__}: {error}"

    def release(self) -> bool:
        """Let a rank that has answered leave its group; False if it has not answered."""
        if self.busy and self.answer is None:
            return False
        if self.busy:
            self.busy, self.cleaning = False, True
            with contextlib.suppress(OSError):
                self.channel.send_bytes(b"release")
        return True

    def is_clean(self) -> bool:
        """Whether the rank is ready for another job; waits while it cleans up after the last."""
        try:
            if self.cleaning and (not self.channel.poll(REPLY_SECONDS) or self.channel.recv_bytes()):
                return False
            self.cleaning = False
            return not self.channel.poll(0)
        except (EOFError, OSError):
            return False

    def read(self, file: IO[bytes]) -> str:
        """What the rank has written to one of its files; to its logs since the job began."""
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")

    def waits_in(self) -> str:
        """The communication of this package that blocks the rank, its axis and ranks; "" if none does."""
        return self.read(self.page).partition("\0")[0]

    def end(self) -> None:
        """Kill the rank and the processes that it has started."""
        self.channel.close()
        if not self.gone:
            with contextlib.suppress(RankError):  # the server is dead, and so is the rank
                self.server.end(self.pid)
        for file in (self.out, self.err, self.page):
            file.close()


class WarmServer(ForkServer):
    """The near end of the server that forks warm ranks.

    Args:
        preload: modules that it imports once, instead of every rank for itself.
    """

    def __init__(self, preload: Iterable[str]) -> None:
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, **RANK_ENVIRONMENT, "PYTHONPATH": path}
        with tempfile.TemporaryFile() as log:
            super().__init__("labkit.ranks.worker", *preload, environment=environment, log=log, cwd=os.getcwd())
            if not self._gets_ready():
                self.close(REPLY_SECONDS)
                said = [os.pread(file.fileno(), 1 << 20, 0).decode(errors="replace") for file in (self.trunk.log, log)]
                raise RankError(
                    "the fork server did not start",
                    where="".join(text[-2000:] for text in said),
                    fix="minimegatron doctor says what this machine lacks",
                )

    def _gets_ready(self) -> bool:
        """Whether the server says that it has imported everything; False when it has ended or makes no progress."""
        deadline = StartupDeadline(START_SECONDS, StartupProgress(self.trunk.children).made)
        while not connection.wait([self.sock], 1.0):
            if deadline.is_over():
                return False
        with contextlib.suppress(OSError):
            return bool(self._mail.next() == "ready")
        return False

    def ask(self, request: dict[str, Any], fds: Iterable[int] = ()) -> dict[str, Any]:
        """The answer to a request; RankError when the server has died."""
        try:
            return super().ask(request, fds)
        except (OSError, ValueError):
            raise RankError("the fork server has died, and all ranks with it", fix="run again") from None


def _pickled_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    name = getattr(fn, "__qualname__", repr(fn))
    if getattr(fn, "__module__", None) == "__main__":
        raise ConfigError(
            f"{name} lives in the main program, which ranks cannot import",
            fix="put it into a module of its own",
        )
    try:
        return pickle.dumps((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"{name} and its arguments cannot be sent to the ranks: {error}",
            fix="define the function at the top level of a module; pass numbers, strings, tensors, dataclasses",
        ) from None


def _collect(ranks: list[Rank], deadline: float) -> None:
    """Wait for all answers; after a first failure only as long as the others need to notice it."""
    waiting = {rank.channel: rank for rank in ranks}
    while waiting:
        ready = connection.wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            return
        for channel in ready:
            rank = waiting.pop(channel)  # type: ignore[call-overload]
            rank.receive()
            if rank.answer is None or rank.answer[1] is not None:
                deadline = min(deadline, time.monotonic() + REPLY_SECONDS)


def _raise_first_failure(ranks: list[Rank], name: str, timeout: float) -> None:
    """The cause as an exception, in order of certainty: an error of a rank's own, a death, silence, a lost peer."""
    failed = {r: rank.answer[1] for r, rank in enumerate(ranks) if rank.answer and rank.answer[1]}
    causes = {r: failure for r, failure in failed.items() if not failure.consequence}
    died = {r: rank.failure for r, rank in enumerate(ranks) if rank.failure}
    silent = {r: rank for r, rank in enumerate(ranks) if not rank.answer and not rank.failure}
    if died and not causes:
        raise RankError("; ".join(f"rank {r} {how}" for r, how in died.items()), where=f"in the middle of {name}")
    if silent and not causes:
        raise _deadline(silent, name, timeout)
    if failed:
        raise _failure(causes or failed, sorted(set(failed) - set(causes)) if causes else [])


def _failure(causes: dict[int, Failure], lost: list[int]) -> RankError:
    first = min(causes)
    failure = causes[first]
    same = [r for r, other in causes.items() if (other.name, other.message) == (failure.name, failure.message)]
    then = f"; {named(lost)} then lost the connection: a consequence, not the cause" if lost else ""
    error = RankError(f"{named(same)} raised {failure.name}: {failure.message}", where=failure.frame + then)
    error.add_note(f"On rank {first}:\n{failure.trace}")
    with contextlib.suppress(Exception):  # an exception that only its own rank can unpickle stays a text
        error.__cause__ = pickle.loads(failure.error)  # noqa: S301  from a process that this one started
    return error


def _deadline(silent: dict[int, Rank], name: str, timeout: float) -> DeadlineError:
    pids = {r: rank.pid for r, rank in silent.items()}
    frames = stacks(pids, signal.SIGUSR1, lambda r: silent[r].read(silent[r].err), seconds=1.0)
    blocked = {r: silent[r].waits_in() if stack else "" for r, stack in frames.items()}  # a stopped one does not wait
    waiting = [r for r, stack in frames.items() if blocked[r] or _in_torch_distributed(stack)]
    late = [r for r in silent if r not in waiting]
    where = {r: f"rank {r} {_place(frames[r], blocked[r])}" for r in [*late, *waiting]}
    kept = f"{named(late)} kept {named(waiting)} waiting: " if late and waiting else ""
    return DeadlineError(
        f"{kept}{name} did not finish within {timeout:g} s",
        where="; ".join(where.values()),
        fix="every rank of a group must make the same calls; or give the job a longer timeout",
    )


def _place(frames: list[procs.Frame], blocked: str) -> str:
    if not frames:
        return "does not answer (stopped, or stuck in the kernel)"
    return (f"waits in {blocked} at " if blocked else "is at ") + str(procs.users_frame(frames))


def _in_torch_distributed(frames: list[procs.Frame]) -> bool:
    """Whether a stack (innermost call first) ends inside torch's communications, called by code that does not report it
    itself as `comm/async_ops` does."""
    return bool(frames) and os.path.join("torch", "distributed") in frames[0].file
