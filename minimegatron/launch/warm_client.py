"""The near side of warm ranks: one object for the server that forks them, one for each rank.

The problem in a sentence: a pool must know at any moment whether a rank is idle, busy, cleaning up or dead, and must
never wait for a dead one. A rank's channel tells: an idle rank has nothing to say, so a readable channel means its end,
and end of file means that the process is gone; the server, its parent, then knows how it died.

The server ends when this process does: the kernel closes the socket, whatever the cause, and the ranks carry
`PR_SET_PDEATHSIG`.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import pickle
import socket
import struct
import tempfile
from collections.abc import Iterable
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any

from minimegatron.errors import RankError
from minimegatron.launch import procs
from minimegatron.launch.fork_server import REPLY_SECONDS, START_SECONDS, ForkServer, receive
from minimegatron.launch.patience import Patience, Starting
from minimegatron.launch.warm_server import RANK_ENVIRONMENT, Failure, Job


def _log_file() -> IO[bytes]:
    """An unnamed file that both sides write at its end: it is emptied before each job, and offsets outlive that."""
    file = tempfile.TemporaryFile()
    fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
    return file


class Rank:
    """The near end of one rank.

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
        """Hand over a job; a rank that has died while idle is found out by `receive`."""
        for file in (self.out, self.err):
            os.ftruncate(file.fileno(), 0)
        self.answer = None
        self.failure = ""
        self.busy = True
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
        """What the rank has written to one of its files; to its logs since the job began."""
        return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode(errors="replace")

    def waits_in(self) -> str:
        """The communication of this package that the rank is blocked in, its axis and ranks; "" where it is in none."""
        return self.read(self.page).partition("\0")[0]

    def end(self) -> None:
        """Kill the rank and what it has started."""
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
            super().__init__("minimegatron.launch.warm_server", *preload, environment=environment, log=log)
            if not self._gets_ready():
                self.close(REPLY_SECONDS)
                log.seek(0)
                raise RankError(
                    "the fork server did not start",
                    where=log.read()[-2000:].decode(errors="replace"),
                    fix="minimegatron doctor says what this machine lacks",
                )

    def _gets_ready(self) -> bool:
        """Whether the server says that it has imported everything; False when it has ended or makes no progress."""
        patience = Patience(START_SECONDS, Starting(lambda: [self.process.pid]).gained)
        while not connection.wait([self.sock], 1.0):
            if patience.is_over():
                return False
        with contextlib.suppress(OSError):
            return receive(self.sock)[0] == "ready"
        return False

    def ask(self, request: dict[str, Any], fds: Iterable[int] = ()) -> dict[str, Any]:
        """The answer to a request; RankError when the server has died."""
        try:
            return super().ask(request, fds)
        except (OSError, ValueError):
            raise RankError("the fork server has died, and all ranks with it", fix="run again") from None
