"""Processes that import once and fork on request: what warm ranks and the judge's fresh processes have in common.

The problem in a sentence: `import torch` costs 1.4 CPU-seconds a process, with all that ranks want 2.8, and a process
that has used torch has threads and must not fork. So one process imports everything, runs nothing, stays
single-threaded, and forks: 0.01 s a rank.

    this process ──> trunk: imports, once a process ──fork──> server of warm ranks ──fork──> rank, rank, ...
                                                   ├──fork──> the judge's nursery  ──fork──> rank, rank, ...
                                                   └──fork──> an agent of torchrun ──fork──> rank, rank, ...

|                 | warm ranks                                 | fresh processes of the judge                 |
|-----------------|--------------------------------------------|----------------------------------------------|
| client          | `ranks/pool`                               | `labkit/fresh`                               |
| server          | `ranks/worker`                             | `labkit/nursery`                             |
| a rank lives    | for many jobs                              | for one                                      |
| it answers with | pickles: it runs the parent's own code     | JSON: it runs a learner's code               |

* `ForkServer` has the trunk fork a server that listens at the other end of a socket pair, has it fork ranks and end
  them, and ends it;
* `obey` is what trunk and servers do, until the near side hangs up;
* `share` lets the processes that this one starts fork their trunks from its own: a run of tests, whose workers and
  notebooks are many processes, imports once;
* `stacks` asks ranks that are late where they are.

The trunk knows nothing of the outside: its environment is a short white list. A server gets what it needs as an order.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import hashlib
import importlib
import itertools
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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from minimegatron.launch import procs

START_SECONDS = 120.0  # for the imports of the trunk, on a machine that is busy with something else
REPLY_SECONDS = 3.0  # for anything that a healthy process does at once
SHARED = "MINIMEGATRON_TRUNK"  # folder of the sockets at which a trunk of this user forks others
_MOST_FDS = 128  # that a process may get
_LARGE, _COLLAPSE = 1 << 21, 25  # bytes of a large page; MADV_COLLAPSE
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",  # what has used a GPU cannot be forked, and ranks do the same on every machine
    "GLOO_SOCKET_IFNAME": "lo" if sys.platform.startswith("linux") else "lo0",  # listen on 127.0.0.1 only
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
# Which instructions torch, oneDNN and MKL may use: all ranks compute with those that the notebook computes with.
_INSTRUCTIONS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")
_READ_AT_START = ("OMP_", "KMP_", "MKL_", "ATEN_", "ONEDNN_", "TORCH_", "LD_", "MALLOC_", "GLIBC_")
# First use of FSDP2, DTensor or an optimizer costs 1 to 7 s without these.
PRELOAD = (
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "torch.distributed.run",
    "torch.distributed._functional_collectives",
    "labkit.ranks.worker",
    "labkit.player",
)


class _NearSide:
    """Of a process that obeys.

    Attributes:
        process: it; at least what `Popen` has of `pid`, `poll`, `kill` and `wait`.
    """

    process: subprocess.Popen[bytes] | Forked

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(START_SECONDS)
        self._mail = Mail(self.sock)
        self.lock, self._ids = threading.Lock(), itertools.count()
        self._ahead: dict[int, Forked] = {}  # what has been forked by a request whose answer has not been read

    def fork(self, *fds: int, order: Any = None) -> int:
        """Fork a process with these descriptors, and tell it an order; its pid."""
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
        """The answer to a request, from any thread; OSError when the process has ended or does not answer."""
        with self.lock:
            number = self._send(request, fds)
            while (answer := self._receive())["id"] != number:
                pass  # of what has been forked ahead, or of somebody whom Ctrl-C has kept from reading it
            return answer

    def _send(self, request: dict[str, Any], fds: Iterable[int]) -> int:
        given = list(fds)
        send(self.sock, {**request, "id": (number := next(self._ids)), "fds": len(given)}, given)
        return number

    def _receive(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._mail.next()
        if (forked := self._ahead.pop(answer["id"], None)) is not None:
            forked.number = answer["pid"]
        return answer

    def close(self, seconds: float) -> None:
        """Hang up, and kill the process when it has not ended after these seconds; its ranks end with it."""
        self.sock.close()
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(10)


class Trunk(_NearSide):
    """The process that has imported, of which servers are forked. It starts at once, and imports by itself.

    Args:
        environment: all of its environment.
        modules: what it imports beside `PRELOAD`.
    """

    def __init__(self, environment: Mapping[str, str], modules: Iterable[str] = ()) -> None:
        near, far = socket.socketpair()
        super().__init__(near)
        self.log = tempfile.TemporaryFile()
        with far:
            self.process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(far.fileno()), *modules],
                env=environment, cwd="/", pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
                start_new_session=True,  # Ctrl-C in a terminal is for this process, which decides about its ranks
            )  # fmt: skip

    def children(self) -> list[int]:
        """Its pid, if it is a child of this process."""
        return [self.process.pid]

    def fork_ahead(self, process: Forked, order: Any, fds: Iterable[int]) -> None:
        """Fork as soon as all is imported, without waiting for it."""
        with self.lock:
            self._ahead[self._send({"do": "fork", "order": order}, fds)] = process

    def settle(self) -> None:
        """Wait for the pids of what has been forked ahead."""
        with self.lock:
            while self._ahead:
                self._receive()

    def is_importing(self) -> bool:
        """Whether it has not answered yet."""
        return bool(self._ahead) and not select.select([self.sock], [], [], 0)[0]

    def close(self, seconds: float) -> None:
        super().close(seconds)
        self.log.close()


class SharedTrunk(Trunk):
    """A trunk that the trunk of another process has forked for this one (`share`).

    Args:
        sock: connected to the process that forks it.
    """

    def __init__(self, sock: socket.socket) -> None:
        _NearSide.__init__(self, sock)
        self.log = tempfile.TemporaryFile()
        self.process = self._ahead[_WHO] = _Elsewhere(self)

    def children(self) -> list[int]:
        return []

    def close(self, seconds: float) -> None:
        """Hang up, upon which it ends."""
        self.sock.close()
        self.log.close()


class Forked:
    """A process that the trunk forks; used as a `Popen`.

    Args:
        module: its `serve(sock, folder, arguments)` is what the process does.
        sock: for it.
        environment: all of its environment; default: the trunk's, which says nothing of the outside.
        log: file for what it writes; default: it goes nowhere.
        cwd: its working directory.

    Attributes:
        number: its pid; 0 as long as the trunk has not said it.
        returncode: None while it lives.
    """

    def __init__(
        self, trunk: Trunk, module: str, sock: socket.socket, folder: str, arguments: Sequence[str], *,
        environment: Mapping[str, str] | None, log: IO[Any] | None, cwd: str,
    ) -> None:  # fmt: skip
        self.trunk, self.number = trunk, 0
        self.returncode: int | None = None
        order: dict[str, Any] = {"module": module, "arguments": list(arguments), "folder": folder, "cwd": cwd}
        order |= {"environment": environment and dict(environment), "path": sys.path}
        trunk.fork_ahead(self, order, [sock.fileno(), *([log.fileno()] if log else [])])

    @property
    def pid(self) -> int:
        self.trunk.settle()
        return self.number

    def poll(self) -> int | None:
        """Its return code, if it has ended, or its trunk."""
        if self.returncode is None and not self.trunk.is_importing():
            try:
                self.returncode = self.trunk.ask({"do": "status", "pid": self.pid})["status"]
            except (OSError, ValueError):
                self.returncode = -signal.SIGKILL
        return self.returncode

    def terminate(self) -> None:
        if self.poll() is None:
            procs.send(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.trunk.ask({"do": "kill", "pid": self.pid})

    def wait(self, timeout: float) -> int:
        """Its return code; `subprocess.TimeoutExpired` when it has not ended after these seconds."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("a fork server", timeout)
            time.sleep(0.001)
        return status


class _Elsewhere(Forked):
    """The process of a shared trunk, which is no child of this one's trunk: it has ended when its connection has."""

    def __init__(self, trunk: SharedTrunk) -> None:
        self.trunk, self.number, self.returncode = trunk, 0, None

    def poll(self) -> int | None:
        sock = self.trunk.sock
        if self.returncode is None and select.select([sock], [], [], 0)[0]:
            with contextlib.suppress(ConnectionError):
                if sock.recv(1, socket.MSG_PEEK):
                    return None
            self.returncode = -signal.SIGKILL
        return self.returncode

    def kill(self) -> None:
        procs.send(self.pid, signal.SIGKILL)


class ForkServer(_NearSide):
    """The near end of a server process.

    Args:
        module, arguments, environment, log, cwd: see `Forked`.

    Attributes:
        folder: for the files of ranks; the server removes it when it ends, hence also when this process was killed.
    """

    def __init__(
        self, module: str, *arguments: str, environment: Mapping[str, str] | None = None,
        log: IO[bytes] | None = None, cwd: str = "/",
    ) -> None:  # fmt: skip
        near, far = socket.socketpair()
        super().__init__(near)
        self.folder = tempfile.mkdtemp(prefix="minimegatron-")
        self.trunk = trunk()
        with far:
            self.process: Forked = Forked(
                self.trunk, module, far, self.folder, arguments, environment=environment, log=log, cwd=cwd
            )

    def close(self, seconds: float) -> None:
        super().close(seconds)
        shutil.rmtree(self.folder, ignore_errors=True)


_WHO = -1  # number of the message in which a shared trunk says its pid
_trunks: dict[tuple[int, frozenset[tuple[str, str]]], Trunk] = {}  # by the process that they belong to
_starting = threading.Lock()


def trunk(*modules: str) -> Trunk:
    """The trunk of this process; started when there is none, when it has died, or when `PATH` or the instructions
    that torch may use are others. It is forked from a shared one of the same environment, where there is one; if not,
    it imports these modules, too."""
    with _starting:
        environment = _environment()
        key = os.getpid(), frozenset(environment.items())
        if key not in _trunks or _trunks[key].process.poll() is not None:
            sock = _shared(environment)
            _trunks[key] = Trunk(environment, modules) if sock is None else SharedTrunk(sock)
            atexit.register(_trunks[key].close, REPLY_SECONDS)
        return _trunks[key]


def share(folder: str, *modules: str) -> None:
    """From now on the trunks of processes that this one starts are forked from its own, as long as this one lives.

    Not where learners' code is in a sandbox: whoever can reach the socket has this user's rights.

    Args:
        folder: an empty one that no other user may enter; its path has at most 80 bytes.
        modules: what the trunk imports beside `PRELOAD`, if it is started here.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(_place(folder, _environment()))
        listener.listen(128)
        forker = Forked(trunk(*modules), __name__, listener, "", [], environment=None, log=None, cwd="/")
    atexit.register(forker.kill)  # it never ends by itself, and the trunk waits for its children
    os.environ[SHARED] = folder


@functools.cache
def share_once() -> None:
    """`share`, in a folder of its own, unless this process's trunk is shared already.

    For a capstone, whose code has this user's rights and starts ranks itself.
    """
    if not os.environ.get(SHARED):
        folder = tempfile.mkdtemp(prefix="mm-")
        share(folder)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _shared(environment: Mapping[str, str]) -> socket.socket | None:
    """A connection to what forks trunks of this environment; None where nothing does."""
    if not os.environ.get(SHARED):
        return None
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.connect(_place(os.environ[SHARED], environment))
    except OSError:  # it has another environment, or has ended
        sock.close()
        return None
    return sock


def _place(folder: str, environment: Mapping[str, str]) -> str:
    return os.path.join(folder, hashlib.sha256(repr(sorted(environment.items())).encode()).hexdigest()[:16])


def suits(environment: Mapping[str, str]) -> bool:
    """Whether this process's trunk has all that libraries read in an environment when they are loaded."""
    mine = _environment()
    names = [name for name in {*mine, *environment} if name.startswith(_READ_AT_START)]
    return sys.platform == "linux" and all(mine.get(name) == environment.get(name) for name in names)


def trunks() -> list[Trunk]:
    """Of this process: a fork of it has none."""
    return [one for (pid, _), one in _trunks.items() if pid == os.getpid()]


def _environment() -> dict[str, str]:
    """All that a trunk knows of the outside: no keys, no tokens, no home."""
    root = str(Path(__file__).resolve().parents[2])
    return {
        **{name: os.environ[name] for name in _INSTRUCTIONS if name in os.environ},
        "PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "PYTHONPATH": root, "PYTHONHASHSEED": "0",
        **ENVIRONMENT, "OPENBLAS_NUM_THREADS": "1",
    }  # fmt: skip


def send(sock: socket.socket, message: Any, fds: Iterable[int] = ()) -> None:
    """Send a message, one line of JSON, and descriptors."""
    line = json.dumps(message).encode() + b"\n"
    sent = socket.send_fds(sock, [line], list(fds))
    sock.sendall(line[sent:])


class Mail:
    """Messages as they arrive, several at once, and the descriptors that came with them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._bytes, self._fds = sock, b"", list[int]()

    def next(self) -> Any:
        """The next message; waits for it.

        Raises:
            ConnectionError: the other side has hung up.
        """
        while b"\n" not in self._bytes:
            self._read()
        return self._first()

    def arrived(self) -> Iterator[Any]:
        """Once something can be read: the messages that are whole.

        Raises:
            ConnectionError: the other side has hung up.
        """
        self._read()
        while b"\n" in self._bytes:
            yield self._first()

    def fds(self, number: int) -> list[int]:
        """The descriptors of the message that was taken last."""
        taken, self._fds = self._fds[:number], self._fds[number:]
        return taken

    def _read(self) -> None:
        part, fds, _, _ = socket.recv_fds(self._sock, 1 << 16, _MOST_FDS)
        if not part:
            raise ConnectionError("its connection closed")
        self._bytes += part
        self._fds += fds

    def _first(self) -> Any:
        line, _, self._bytes = self._bytes.partition(b"\n")
        return json.loads(line)


def obey(sock: socket.socket, folder: str, live: Callable[..., object], patience: float = 0.0) -> None:
    """Obey `fork`, `kill` and `status` until the other side hangs up or its process ends; leave nothing behind.

    Args:
        folder: is removed at the end; "" for none.
        live: what a rank does with (order, *descriptors).
        patience: seconds in which children may end by themselves when the other side has hung up.
    """
    parent, deaths, mail = os.getppid(), _deaths(), Mail(sock)
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
            for request in mail.arrived():
                answer: dict[str, int | None] = {"id": request["id"]}
                if request["do"] == "fork":
                    fds = mail.fds(request["fds"])
                    answer["pid"] = pid = _fork(
                        functools.partial(live, request["order"], *fds), [sock.fileno(), *deaths]
                    )
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
        deadline = time.monotonic() + patience
        while ranks and time.monotonic() < deadline:
            _reap(ranks, statuses)
            time.sleep(0.01)
        procs.end_descendants()
        if folder:
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


# ------------------------------------------------------------------------------------------------------ the trunk


def grow(sock: socket.socket, modules: Iterable[str]) -> None:
    """Import, then fork servers until the process that has started this one hangs up."""
    gc.disable()  # while it imports, of which it takes a quarter
    for name in (*PRELOAD, *modules):
        importlib.import_module(name)
    sys.modules["labkit.player"].rehearse()
    gc.collect()
    gc.freeze()  # nothing above is ever garbage: collections stay cheap and pages stay shared
    gc.enable()
    large_pages()
    obey(sock, "", _become_server, patience=2.0)


def _become_server(order: dict[str, Any], far: int, *log: int) -> NoReturn:
    os.chdir(order["cwd"])
    with open(os.devnull, "wb") as nothing:
        for stream in (1, 2):
            os.dup2(log[0] if log else nothing.fileno(), stream)
    for fd in log:
        os.close(fd)
    if order["environment"] is not None:
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.path[:] = order["path"]
    importlib.import_module(order["module"]).serve(socket.socket(fileno=far), order["folder"], order["arguments"])
    os._exit(0)


def serve(sock: socket.socket, folder: str, _: list[str]) -> NoReturn:
    """As a fork of the trunk: fork a trunk for each process that connects (`share`)."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody asks how they end
    while True:
        near, _address = sock.accept()  # no deadline: it ends with the trunk
        with near:
            _fork(functools.partial(_become_trunk, near), [sock.fileno()])


def _become_trunk(near: socket.socket) -> None:
    send(near, {"id": _WHO, "pid": os.getpid()})
    obey(near, "", _become_server, patience=2.0)


def large_pages() -> None:
    """Gather the memory that all ranks share in pages of 2 MiB, where Linux can (6.1): a fork copies an entry a page.

    Of 54,000 entries 100 remain, and an empty process costs half: 7 ms in place of 15. What a rank writes to is copied
    4 KiB at a time as before. Where the kernel refuses, nothing changes.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, rights, _, _, inode, *_ = line.split()
        first, last = (int(end, 16) // _LARGE for end in place.split("-"))
        if rights == "rw-p" and inode == "0" and last > first + 1:
            libc.madvise(ctypes.c_void_p((first + 1) * _LARGE), ctypes.c_size_t((last - first - 1) * _LARGE), _COLLAPSE)


if __name__ == "__main__":
    # Servers import this module by its name, and would find another copy of it.
    importlib.import_module("labkit.ranks.fork_server").grow(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
