"""A process that imports once and forks on request: the common part of warm ranks and the judge's fresh processes.

The problem in a sentence: `import torch` costs 1.4 CPU-seconds a process, and a process that has used torch has threads
and must not fork. So one process imports everything, runs nothing, stays single-threaded, and forks: 0.01 s a rank.

|                 | warm ranks                                 | fresh processes of the judge                 |
|-----------------|--------------------------------------------|----------------------------------------------|
| client          | `ranks/pool`                               | `labkit/fresh`                               |
| server          | `ranks/worker`                             | `labkit/nursery`                             |
| a rank lives    | for many jobs                              | for one                                      |
| it answers with | pickles: it runs the parent's own code     | JSON: it runs a learner's code               |

* `ForkServer` starts the server at the other end of a socket pair, has it fork ranks and end them, and ends it;
* `obey` is the server's loop, until the client hangs up;
* `stacks` asks late ranks for their Python stacks.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any

from minimegatron.launch import procs

START_SECONDS = 120.0  # for the imports of the server, on a machine that is busy with something else
REPLY_SECONDS = 3.0  # for anything that a healthy process does at once
_MOST_FDS = 128  # that a process may get
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # what has used a GPU cannot be forked, and ranks do the same on every machine
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform.startswith("linux") else "lo0",  # listen on 127.0.0.1 only
}


class ForkServer:
    """The client's end of a server process.

    Args:
        module: its `serve(sock, folder, arguments)` is the program of the process.
        environment: all of its environment.
        log: file for its output.
        cwd: its working directory; default: this process's.

    Attributes:
        folder: for the files of ranks; the server removes it when it ends, also if this process was killed.
    """

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str],
        log: IO[bytes] | int = subprocess.DEVNULL, cwd: str | None = None,
    ) -> None:  # fmt: skip
        self.folder, self.lock = tempfile.mkdtemp(prefix="minimegatron-"), threading.Lock()
        self.sock, far = socket.socketpair()
        self.sock.settimeout(START_SECONDS)
        with far:
            command = [sys.executable, "-m", __name__, module, str(far.fileno()), self.folder, *arguments]
            self.process = subprocess.Popen(
                command, env=environment, cwd=cwd, pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True,  # Ctrl-C in a terminal is for this process, which decides about its ranks
            )  # fmt: skip

    def fork(self, *fds: int, order: Any = None) -> int:
        """Fork a rank with these descriptors, and send it an order; returns its pid."""
        return int(self.ask({"do": "fork", "order": order}, fds)["pid"])

    def end(self, *pids: int) -> list[int]:
        """Kill ranks and their process groups; returns their return codes, also of those that had ended before."""
        for pid in pids:
            self.ask({"do": "kill", "pid": pid})
        return [self.status(pid) for pid in pids]

    def status(self, pid: int) -> int:
        """Return code of a rank that has hung up or was killed; it can be read once."""
        deadline = time.monotonic() + REPLY_SECONDS
        while (status := self.ask({"do": "status", "pid": pid})["status"]) is None and time.monotonic() < deadline:
            time.sleep(0.001)
        return -signal.SIGKILL if status is None else int(status)

    def ask(self, request: dict[str, Any], fds: Iterable[int] = ()) -> dict[str, Any]:
        """The answer to a request, from any thread; OSError when the server has ended or does not answer."""
        with self.lock:
            send(self.sock, request, fds)
            return receive(self.sock)[0]  # type: ignore[no-any-return]

    def close(self, seconds: float) -> None:
        """Hang up, and kill the server if it has not ended after these seconds; its ranks end with it."""
        self.sock.close()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)
        shutil.rmtree(self.folder, ignore_errors=True)


def send(sock: socket.socket, message: Any, fds: Iterable[int] = ()) -> None:
    """Send a message, one line of JSON, and descriptors."""
    line = json.dumps(message).encode() + b"\n"
    sent = socket.send_fds(sock, [line], list(fds))
    sock.sendall(line[sent:])


def receive(sock: socket.socket, most_fds: int = 0) -> tuple[Any, list[int]]:
    """The next message and its descriptors. One message is under way at a time.

    Raises:
        ConnectionError: the other side has hung up.
    """
    line, fds, _, _ = socket.recv_fds(sock, 1 << 16, most_fds)
    while not line.endswith(b"\n"):
        part = sock.recv(1 << 16) if line else b""
        if not part:
            raise ConnectionError("its connection closed")
        line += part
    return json.loads(line), fds


def obey(sock: socket.socket, folder: str, live: Callable[..., object]) -> None:
    """Obey `fork`, `kill` and `status` until the other side hangs up or its process ends; leave nothing behind.

    Args:
        folder: removed at the end.
        live: the program of a rank, called with (order, *descriptors).
    """
    parent, deaths = os.getppid(), _deaths()
    ranks, statuses = set[int](), dict[int, int]()
    procs.adopt_orphans()
    try:
        while os.getppid() == parent:  # end of file would do, had no other child of the parent inherited the socket
            ready = select.select([sock.fileno(), deaths[0]], [], [], 2.0)[0]
            if deaths[0] in ready:
                os.read(deaths[0], 4096)
            _reap(ranks, statuses)
            if sock.fileno() not in ready:
                continue
            request, fds = receive(sock, most_fds=_MOST_FDS)
            answer: dict[str, int | None] = {}
            if request["do"] == "fork":
                answer["pid"] = pid = _fork(functools.partial(live, request["order"], *fds), [sock.fileno(), *deaths])
                ranks.add(pid)
                for fd in fds:
                    os.close(fd)
            elif request["do"] == "kill" and request["pid"] in ranks:
                procs.send(request["pid"], signal.SIGKILL, group=True)
                procs.send(request["pid"], signal.SIGKILL)  # if it had no time yet to found its group
            elif request["do"] == "status":
                answer["status"] = statuses.pop(request["pid"], None)
            send(sock, answer)
    except ConnectionError:
        return
    finally:
        procs.end_descendants()
        shutil.rmtree(folder, ignore_errors=True)


def _deaths() -> tuple[int, int]:
    """A pipe that becomes readable when a child ends."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # a signal without a handler is not written to the pipe
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    return read, write


def reap() -> dict[int, int]:
    """Reap the children that have ended, and adopted ones; {pid: return code}."""
    statuses = {}
    with contextlib.suppress(ChildProcessError):  # there are no children
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            statuses[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return statuses


def _reap(ranks: set[int], statuses: dict[int, int]) -> None:
    """Note how ranks ended, and kill the processes that they had started, which have become children of this one.

    While those live they hold the socket of their rank open, and the other side sees no end of file.
    """
    for pid, status in reap().items():
        if pid in ranks:
            procs.send(pid, signal.SIGKILL, group=True)  # where orphans are not adopted
            ranks.remove(pid)
            statuses[pid] = status
    procs.end_descendants(spare=ranks)


def _fork(live: Callable[[], object], close: Iterable[int]) -> int:
    """Fork a process with a session of its own that does `live` and dies with this one; its pid."""
    server, pid = os.getpid(), os.fork()
    if pid:
        return pid
    try:
        os.setsid()  # a signal to the group of the server is not for its ranks
        procs.die_with_parent(signal.SIGKILL, server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for fd in close:
            os.close(fd)
        live()
    finally:
        os._exit(os.EX_SOFTWARE)  # never unwind into the server's frames


def stacks(
    pids: Mapping[int, int], signum: int, dump: Callable[[int], str], seconds: float
) -> dict[int, list[procs.Frame]]:
    """Ask ranks by signal for their stacks; those that do not answer in time have no frames.

    Args:
        pids: rank -> pid.
        signum: signal at which the rank's `faulthandler` writes its stack.
        dump: rank -> what it has written so far.
        seconds: longest wait; it ends when all have answered and nothing has been added for a moment.
    """
    for pid in pids.values():  # all before the first answer: a rank whose peer has died would move on
        procs.send(pid, signum)
    deadline, before = time.monotonic() + seconds, dict[int, str]()
    while True:
        written = {rank: dump(rank) for rank in pids}
        frames = {rank: dumped_frames(text) for rank, text in written.items()}
        if (all(frames.values()) and written == before) or time.monotonic() > deadline:
            return frames
        before = written
        time.sleep(0.02)


def dumped_frames(dump: str) -> list[procs.Frame]:
    """The stack that Python's `faulthandler` wrote last for the thread that got the signal, innermost call first."""
    blocks = re.findall(r"^(?:Current thread|Stack) .*\n((?:  File .*\n?)+)", dump, re.MULTILINE)
    lines = re.findall(r'File "(.*)", line (\d+) in (.*)', blocks[-1]) if blocks else []
    return [procs.Frame(file, int(line), function.strip()) for file, line, function in lines]


if __name__ == "__main__":
    _, module, descriptor, folder, *arguments = sys.argv
    importlib.import_module(module).serve(socket.socket(fileno=int(descriptor)), folder, arguments)
