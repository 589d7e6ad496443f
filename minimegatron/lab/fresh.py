"""Run a function in fresh processes, one a rank, and get plain data back: safe, quick, and never waiting for ever.

Learners' code loops, deadlocks, prints, patches torch and calls `os._exit`. It must run where it can break nothing, and
yet `check("...")` must feel instant, while `import torch` alone takes a second or two. Hence a *nursery*: a server
process that imports torch once, has a single thread, and forks a fresh process for every rank of every job.

    notebook or grader ──socket──> nursery (torch imported, one thread, clean environment)
           ^                          │ fork, once a rank
           └────── pipe, JSON ──── rank 0, rank 1, ...   own session, resource limits, own empty folder

* The environment of the ranks is a short white list; their standard output goes nowhere.
* What comes back is one line of JSON a rank (`plain`), read with a limit and a deadline. Never a pickle.
* The deadline runs from the moment all ranks have started. At the end the ranks are asked for their Python stacks, so
  that a hang can be explained line by line; then their process groups are killed. Nothing of a job outlives it.
* If the caller dies, the nursery reads the end of its socket and ends; if the nursery dies, the kernel ends its ranks.

Forking is safe only from the nursery: a notebook's kernel has threads, whose locks a fork would copy in any state.
"""

from __future__ import annotations

import ctypes
import dataclasses
import faulthandler
import importlib
import json
import os
import re
import resource
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minimegatron.errors import DeadlineError, MinimegatronError, RankError
from minimegatron.lab import plain

_PRELOAD = "minimegatron.lab.player"  # imports all that a rank needs; its `rehearse` loads what torch loads late
_START_SECONDS = 120.0  # for the nursery's imports on a machine that is busy with something else


@dataclasses.dataclass(frozen=True)
class Limits:
    """What one rank may use.

    Attributes:
        seconds: from the start of all ranks to the last answer.
        memory: bytes of address space above what the process starts with.
        file: bytes of the largest file it may write.
        answer: bytes of the answer.
    """

    seconds: float = 20.0
    memory: int = 4 << 30
    file: int = 64 << 20
    answer: int = 64 << 20


@dataclasses.dataclass(frozen=True)
class Reply:
    """What became of one rank: an answer, or the reason why there is none.

    Attributes:
        value: the plain data it returned; None without an answer.
        ended: "" with an answer; "late" at the deadline; else how the process ended ("exit code 3", "signal 9 ...").
        stack: frames (file, line), the innermost first, where a late rank was.
        order: position in the order of arrival of the answers.
    """

    value: Any = None
    ended: str = ""
    stack: tuple[tuple[str, int], ...] = ()
    order: int = 0


class Failed(Exception):
    """Raised by a rank's function to answer `value` and leave at once.

    A rank that has returned stays until all have answered, so that nobody loses a connection; one that failed goes,
    so that nobody waits for it.
    """

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.value = value


class Nursery:
    """The server that forks. It starts at its first use, or at `warm_up`; `close`, or leaving `with`, ends it."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def warm_up(self) -> None:
        """Start the server if it does not run; returns at once, the imports go on by themselves."""
        if self._server is not None and self._server.poll() is None:
            return
        self.close()
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "minimegatron.lab.fresh", str(theirs.fileno())]
            self._server = subprocess.Popen(
                command, env=_environment(), cwd="/", pass_fds=(theirs.fileno(),), start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        ours.settimeout(_START_SECONDS)
        self._socket = ours

    def close(self) -> None:
        """End the server and whatever it runs."""
        if self._socket is not None:
            self._socket.close()
        if self._server is not None:
            self._server.kill()
            self._server.wait(10)
        self._server = self._socket = None

    def call(
        self, function: Callable[..., Any], jobs: Sequence[Any], limits: Limits = Limits(), *, path: Sequence[str] = ()
    ) -> list[Reply]:
        """Run `function(rank, world, job)` in one fresh process for each job; the replies by rank.

        Args:
            function: a top-level function, found by its name in the new process; it returns plain data, or raises
                `Failed` with some.
            jobs: plain data, one a rank.
            limits: what a rank may use.
            path: put in front of the ranks' `sys.path`.
        Raises:
            RankError: the nursery itself cannot be started or was killed.
            DeadlineError: the nursery did not answer.
        """
        folder = Path(tempfile.mkdtemp(prefix="minimegatron-"))
        try:
            for rank, job in enumerate(jobs):
                (folder / f"job.{rank}").write_text(plain.dumps(job))
            order = {
                "function": f"{function.__module__}:{function.__qualname__}",
                "folder": str(folder), "world": len(jobs), "path": list(path), "limits": dataclasses.asdict(limits),
            }  # fmt: skip
            return self._run(order, limits)
        except TimeoutError:
            self.close()
            raise DeadlineError(f"the process that starts ranks gave no sign for {_START_SECONDS:g} s") from None
        except (OSError, ValueError) as error:
            self.close()
            raise RankError(f"the process that starts ranks ended: {error}", fix="run the cell again") from None
        except BaseException:  # an interrupt: leave nobody behind
            self.close()
            raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _run(self, order: dict[str, Any], limits: Limits) -> list[Reply]:
        self.warm_up()
        assert self._socket is not None, "warm_up connects"
        pipes = [os.pipe() for _ in range(order["world"])]
        try:
            socket.send_fds(self._socket, [json.dumps(order).encode() + b"\n"], [write for _, write in pipes])
            for _, write in pipes:
                os.close(write)
            pids = _receive(self._socket)
            texts, late = _read_answers([read for read, _ in pipes], limits)
            stacks = _stacks({rank: pids[rank] for rank in late}, Path(order["folder"]))
            self._socket.sendall(b"end\n")
            statuses = _receive(self._socket)
        finally:
            for read, _ in pipes:
                os.close(read)
        return [_reply(rank, texts, stacks, statuses[rank]) for rank in range(order["world"])]


def _environment() -> dict[str, str]:
    """All that ranks know of the outside: no keys, no tokens, no home."""
    root = str(Path(__file__).resolve().parents[2])
    return {
        "PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "PYTHONPATH": root, "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "FATAL",
        "GLOO_SOCKET_IFNAME": "lo" if sys.platform == "linux" else "lo0",
    }  # fmt: skip


def _receive(connection: socket.socket) -> Any:
    line = bytearray()
    while not line.endswith(b"\n"):
        part = connection.recv(4096)
        if not part:
            raise OSError("its connection closed")
        line += part
    return json.loads(line)


def _read_answers(pipes: list[int], limits: Limits) -> tuple[dict[int, tuple[int, bytes]], list[int]]:
    """Per rank (order of arrival, line) for those who wrote a whole line; and the ranks that were late.

    A rank first writes "+", its sign of life, then one line. The clock starts when all have signed.
    """
    answers: dict[int, tuple[int, bytes]] = {}
    partial = {rank: bytearray() for rank in range(len(pipes))}
    deadline = time.monotonic() + _START_SECONDS
    signed: set[int] = set()
    with selectors.DefaultSelector() as selector:
        for rank, pipe in enumerate(pipes):
            selector.register(pipe, selectors.EVENT_READ, rank)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                rank, data = key.data, os.read(key.fd, 1 << 20)
                partial[rank] += data
                if data and rank not in signed:
                    signed.add(rank)
                    if len(signed) == len(pipes):
                        deadline = time.monotonic() + limits.seconds
                if partial[rank].endswith(b"\n"):
                    answers[rank] = (len(answers), bytes(partial[rank][1:]))
                if not data or rank in answers or len(partial[rank]) > limits.answer:
                    selector.unregister(key.fd)
        late = sorted(key.data for key in selector.get_map().values())
    return answers, late


def _stacks(late: dict[int, int], folder: Path) -> dict[int, tuple[tuple[str, int], ...]]:
    """Ask ranks that are late where they are: the fault handler of each answers SIGABRT with its Python stack."""
    for pid in late.values():  # all before the first answer: a rank whose peer has died would move on
        os.kill(pid, signal.SIGABRT)
    if late:
        time.sleep(0.5)
    return {rank: _parse_stack(folder / f"stack.{rank}") for rank in late}


def _parse_stack(file: Path) -> tuple[tuple[str, int], ...]:
    try:
        text = _read_text(file)
    except OSError:
        return ()
    current = re.search(r"Current thread.*?(?=\n\n|\Z)", text, re.S)
    frames = re.findall(r'File "([^"]+)", line (\d+)', current[0] if current else text)
    return tuple((name, int(line)) for name, line in frames)


def _read_text(file: Path) -> str:
    """The first bytes of a file that a rank may have replaced by something else."""
    descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with open(descriptor, "rb") as stream:
        return stream.read(1 << 16).decode(errors="replace")


def _reply(rank: int, texts: dict[int, tuple[int, bytes]], stacks: dict[int, Any], status: int) -> Reply:
    if rank in texts:
        order, text = texts[rank]
        try:
            return Reply(value=plain.loads(text), order=order)
        except MinimegatronError as error:
            return Reply(ended=error.what)
    if rank in stacks:
        return Reply(ended="late", stack=stacks[rank])
    if os.WIFEXITED(status):
        return Reply(ended=f"exit code {os.WEXITSTATUS(status)}")
    return Reply(ended=f"signal {os.WTERMSIG(status)}, {signal.strsignal(os.WTERMSIG(status))}")


# Everything below runs in the nursery or in its children.


def serve(descriptor: int) -> None:
    """The nursery: read an order, fork its ranks, wait for the word that it is over, kill and reap. For ever."""
    importlib.import_module(_PRELOAD).rehearse()
    threads = os.listdir("/proc/self/task") if sys.platform == "linux" else [""]
    assert len(threads) == 1, f"the nursery must have one thread to be forked safely, it has {len(threads)}"
    with socket.socket(fileno=descriptor) as connection:
        while True:
            line, pipes, _, _ = socket.recv_fds(connection, 1 << 16, 64)
            while line and not line.endswith(b"\n"):
                line += connection.recv(1 << 16)
            if not line:
                return
            order = json.loads(line)
            ranks = [_fork(rank, order, pipes, connection) for rank in range(order["world"])]
            for pipe in pipes:
                os.close(pipe)
            try:
                connection.sendall(json.dumps(ranks).encode() + b"\n")
                word = connection.recv(16)
            except OSError:
                word = b""
            statuses = [_reap(pid) for pid in ranks]
            if not word:
                return
            connection.sendall(json.dumps(statuses).encode() + b"\n")


def _reap(pid: int) -> int:
    # A rank that ended by itself keeps its status until now, so its number cannot belong to anybody else.
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return os.waitpid(pid, 0)[1]


def _fork(rank: int, order: dict[str, Any], pipes: list[int], connection: socket.socket) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive the nursery
        connection.close()
        for other, pipe in enumerate(pipes):
            if other != rank:
                os.close(pipe)
        _live(rank, order, pipes[rank])
    finally:
        os._exit(70)


def _live(rank: int, order: dict[str, Any], pipe: int) -> None:
    """The life of a rank: limits, sign of life, work, answer, and waiting for the end."""
    folder, limits = Path(order["folder"]), Limits(**order["limits"])
    os.chdir(folder)
    os.environ["HOME"] = os.environ["TMPDIR"] = str(folder)
    stack = open(folder / f"stack.{rank}", "w")  # noqa: SIM115  open as long as the process lives
    faulthandler.enable(stack)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file, limits.file))
    resource.setrlimit(resource.RLIMIT_CPU, (int(2 * limits.seconds) + 5,) * 2)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + limits.memory,) * 2)
    job = plain.loads((folder / f"job.{rank}").read_text())
    sys.path[:0] = order["path"]
    module, name = order["function"].split(":")
    function = getattr(importlib.import_module(module), name)
    os.write(pipe, b"+")
    try:
        _send(pipe, function(rank, order["world"], job))
        signal.pause()
    except Failed as failure:
        _send(pipe, failure.value)


def _send(pipe: int, value: Any) -> None:
    line = memoryview(plain.dumps(value).encode() + b"\n")
    while line:
        line = line[os.write(pipe, line) :]


if __name__ == "__main__":
    serve(int(sys.argv[1]))
