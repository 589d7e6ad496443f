"""A process that imports once and forks on request: what warm ranks and the judge's fresh processes have in common.

The problem in a sentence: `import torch` costs 1.4 CPU-seconds a process, and a process that has used torch has threads
and must not fork. So one process imports everything, runs nothing, stays single-threaded, and forks: 0.01 s a rank.

|                 | warm ranks (`launch.workers`)              | fresh processes (`labkit.fresh`)             |
|-----------------|--------------------------------------------|----------------------------------------------|
| near side       | `launch.warm_client`                       | `labkit.fresh`                               |
| far side        | `launch.warm_server`                       | `labkit.nursery`                             |
| a process lives | for many jobs                              | for one                                      |
| it answers with | pickles: it runs the parent's own code     | JSON: it runs a learner's code               |
| environment     | the parent's                               | a short white list                           |

Here is what both need, whatever travels between parent and rank:

* `ForkServer` starts the server on one end of a socket pair, and ends it; `send` and `receive` are the messages there;
* `serve(sock, arguments)` of the server's module is its life, until the other end hangs up; `fork` makes a rank;
* `stacks` asks ranks that are late where they are.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any

from minimegatron.launch import procs

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # what has used a GPU cannot be forked, and ranks do the same on every machine
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform.startswith("linux") else "lo0",  # listen on 127.0.0.1 only
}


class ForkServer:
    """The near end of a server process.

    Args:
        module: its `serve(sock, arguments)` is what the process does.
        environment: all of its environment.
        log: file for what it writes.
        cwd: its working directory; default: this process's.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str],
        log: IO[bytes] | int = subprocess.DEVNULL,
        cwd: str | None = None,
    ) -> None:
        self.sock, far = socket.socketpair()
        with far:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(far.fileno()), module, *arguments],
                pass_fds=[far.fileno()],
                env=environment,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C in a terminal is for this process, which decides about its ranks
            )

    def is_running(self) -> bool:
        return self.process.poll() is None

    def close(self, seconds: float) -> None:
        """Hang up, and kill the server when it has not ended after these seconds; its ranks end with it."""
        self.sock.close()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


def send(sock: socket.socket, message: Any, fds: Iterable[int] = ()) -> None:
    """Send a message, one line of JSON, and with it descriptors."""
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


def fork(live: Callable[[], object], close: Iterable[int]) -> int:
    """Fork a process with a session of its own that does `live` and dies with this one; its pid.

    Args:
        close: descriptors that are not for it.
    """
    server, pid = os.getpid(), os.fork()
    if pid:
        return pid
    try:
        os.setsid()  # a signal to the group of the server is not for its ranks
        procs.die_with_parent(signal.SIGKILL, server)
        for fd in close:
            os.close(fd)
        live()
    finally:
        os._exit(os.EX_SOFTWARE)  # never unwind into the server's frames


def stacks(
    pids: Mapping[int, int], signum: int, dump: Callable[[int], str], seconds: float
) -> dict[int, list[procs.Frame]]:
    """Ask ranks by signal where they are; those that do not answer in time have no frames.

    Args:
        pids: rank -> pid.
        signum: upon which the rank's `faulthandler` writes its stack.
        dump: what a rank has written so far.
        seconds: longest wait; it ends when all have answered and nothing has been added for a moment.
    """
    for pid in pids.values():  # all before the first answer: a rank whose peer has died would move on
        procs.send(pid, signum)
    deadline, before = time.monotonic() + seconds, dict[int, str]()
    while True:
        written = {rank: dump(rank) for rank in pids}
        found = {rank: procs.dumped_frames(text) for rank, text in written.items()}
        if (all(found.values()) and written == before) or time.monotonic() > deadline:
            return found
        before = written
        time.sleep(0.02)


if __name__ == "__main__":
    importlib.import_module(sys.argv[2]).serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[3:])
