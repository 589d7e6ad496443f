"""The near side of the fork server: one object for the server, one for each warm rank.

The problem in a sentence: a pool must know at any moment whether a rank is idle, busy, cleaning up or dead, and must
never wait for a dead one. A rank's channel tells: an idle rank has nothing to say, so a readable channel means its end,
and end of file means that the process is gone; the server, its parent, then knows how it died.

There is one fork server per process, started by the first pool, and it ends when this process does: the kernel closes
the socket, whatever the cause, and the ranks carry `PR_SET_PDEATHSIG`.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import fcntl
import json
import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from multiprocessing import connection
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from minimegatron.errors import RankError
from minimegatron.launch import procs
from minimegatron.launch.forkserver import RANK_ENVIRONMENT, Failure, Job
from minimegatron.launch.patience import Patience, Starting

if TYPE_CHECKING:
    from minimegatron.launch.workers import WarmPool

START_SECONDS = 120.0  # for the imports of the server, without progress; for its answers
REPLY_SECONDS = 3.0  # for anything that a healthy process does at once
# Where this package keeps what ranks work with.
ROOMS = tuple(f"minimegatron.{room}." for room in "kernels data layers parallel optim models training".split())


def _log_file() -> IO[bytes]:
    """An unnamed file that both sides write at its end: it is emptied before each job, and offsets outlive that."""
    file = tempfile.TemporaryFile()
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file


class Rank:
    """The near end of one rank."""

    def __init__(self) -> None:
        # Unlinked files rather than pipes: they never fill up, and can be read after the rank is dead.
        self.out, self.err = _log_file(), _log_file()
        self.server = this_process().running_server()
        near, far = socket.socketpair()
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # a rank stopped in the middle of a message
            near.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", 10, 0))
        with far:
            self.pid = self.server.fork(far.fileno(), self.out.fileno(), self.err.fileno())
        self.channel = connection.Connection(near.detach())
        self.answer: tuple[Any, Failure | None] | None = None
        self.failure = ""  # how it died, or why its answer is none
        self.gone = False
        self.busy = self.cleaning = False

    def start(self, job: Job) -> None:
        """Hand over a job; a rank that has died while idle is found out by `receive`."""
        for file in (self.out, self.err):
            os.ftruncate(file.fileno(), 0)
        self.answer, self.failure, self.busy = None, "", True
        with contextlib.suppress(OSError):
            self.channel.send_bytes(pickle.dumps(tuple(job)))

    def receive(self) -> None:
        """Take the answer, or learn how the rank died."""
        try:
            self.answer = pickle.loads(self.channel.recv_bytes())
        except (EOFError, OSError):
            self.failure = procs.how_it_ended(self.server.status(self.pid))
            self.gone = True
        except Exception as error:  # whatever unpickling may raise: a class we cannot import, bytes that are none
            self.failure = f"sent an answer that cannot be read: {type(error).__name__}: {error}"

    def release(self) -> bool:
        """Let a rank that has answered leave its group; False when it has not answered."""
        if self.busy and self.answer is None:
            return False
        if self.busy:
            self.busy, self.cleaning = False, True
            with contextlib.suppress(OSError):
                self.channel.send_bytes(b"release")
        return True

    def is_clean(self) -> bool:
        """Whether the rank is ready for another job; waits for it while it cleans up after the last."""
        try:
            if self.cleaning and (not self.channel.poll(REPLY_SECONDS) or self.channel.recv_bytes()):
                return False
            self.cleaning = False
            return not self.channel.poll(0)
        except (EOFError, OSError):
            return False

    def read(self, file: IO[bytes]) -> str:
        """What the rank has written since the job began."""
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")

    def end(self) -> None:
        """Kill the rank and what it has started."""
        self.channel.close()
        if not self.gone:
            with contextlib.suppress(RankError):  # the server is dead, and so is the rank
                self.server.kill(self.pid)
        self.out.close()
        self.err.close()


class Server:
    """The near end of the fork server.

    Args:
        preload: modules that it imports once, instead of every rank for itself.

    Attributes:
        folder: where ranks meet; the server removes it when it ends, hence also when this process was killed.
    """

    def __init__(self, preload: Iterable[str]) -> None:
        # One message is under way at a time, so a stream does where there are no packets (macOS).
        kind = socket.SOCK_SEQPACKET if sys.platform.startswith("linux") else socket.SOCK_STREAM
        self.sock, far = socket.socketpair(socket.AF_UNIX, kind)
        self.sock.settimeout(1.0)
        self.lock = threading.Lock()
        package = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        with tempfile.TemporaryFile() as log:
            with far:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "minimegatron.launch.forkserver", str(far.fileno()), *preload],
                    pass_fds=[far.fileno()],
                    env={**os.environ, **RANK_ENVIRONMENT, "PYTHONPATH": path},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C in a terminal is for this process, which decides about its ranks
                )
            ready = self._first_words()
            self.sock.settimeout(START_SECONDS)
            if not ready:
                self.close()
                log.seek(0)
                raise RankError(
                    "the fork server did not start",
                    where=log.read()[-2000:].decode(errors="replace"),
                    fix="minimegatron doctor says what this machine lacks",
                )
        self.folder: str = json.loads(ready)["folder"]

    def _first_words(self) -> bytes:
        """What the server says when it has imported everything; b"" when it has ended or stands still."""
        patience = Patience(START_SECONDS, Starting(lambda: [self.process.pid]).gained)
        while not patience.is_over():
            try:
                return self.sock.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                break
        return b""

    def fork(self, *fds: int) -> int:
        """Fork a rank with these descriptors (channel, stdout, stderr); its pid."""
        return int(self._ask({"do": "fork"}, fds)["pid"])

    def kill(self, pid: int) -> None:
        """End a rank; returns when it is gone."""
        self._ask({"do": "kill", "pid": pid})
        self.status(pid)

    def status(self, pid: int) -> int:
        """Return code of a rank that has hung up or was killed."""
        deadline = time.monotonic() + REPLY_SECONDS
        while (status := self._ask({"do": "status", "pid": pid})["status"]) is None and time.monotonic() < deadline:
            time.sleep(0.005)
        return -signal.SIGKILL if status is None else int(status)

    def _ask(self, request: dict[str, Any], fds: tuple[int, ...] = ()) -> dict[str, Any]:
        try:
            with self.lock:
                socket.send_fds(self.sock, [json.dumps(request).encode()], fds)
                return json.loads(self.sock.recv(4096))  # type: ignore[no-any-return]
        except (OSError, ValueError):
            raise RankError("the fork server has died, and all ranks with it", fix="run again") from None

    def close(self) -> None:
        """Hang up; the server ends, and with it every rank."""
        self.sock.close()
        try:
            self.process.wait(REPLY_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(REPLY_SECONDS)


@dataclasses.dataclass
class Process:
    """What one process owns: at most one fork server, and the pools that everything in it shares.

    Attributes:
        preload: modules that its ranks will want besides those of this package that it has itself.
    """

    pid: int
    server: Server | None = None
    pools: dict[tuple[int, bool], WarmPool] = dataclasses.field(default_factory=dict)
    preload: tuple[str, ...] = ()

    def running_server(self) -> Server:
        """The fork server; started when there is none, or when it has died."""
        if self.server is None or self.server.process.poll() is not None:
            if self.server is None:
                atexit.register(self.close)
            ours = sorted(name for name in sys.modules if name.startswith(ROOMS))
            self.server = Server([*self.preload, *ours])
        return self.server

    def close(self) -> None:
        """End the shared pools and the server."""
        while self.pools:
            self.pools.popitem()[1].close()
        if self.server is not None:
            self.server.close()


_process = Process(os.getpid())


def this_process() -> Process:
    """The one holder of state. After a fork the child starts with none: server and pools belong to its parent."""
    global _process
    if _process.pid != os.getpid():
        _process = Process(os.getpid())
    return _process
