"""Ranks of `torchrun` that are forked in place of executed: what a script imports is imported once, not once a rank.

The problem in a sentence: torchrun executes `python script.py` N times, each time `import torch` costs 1.4 CPU-seconds,
and with an optimizer `torch._dynamo` another 1.3. The launcher cannot fork later, since its store has threads, whose
locks a fork would copy in any state. So it forks N processes that wait before it has one, and hands them out where
torch would execute Python. It is itself a fork of the trunk (`fork_server`), unless libraries would find something else
in its environment.

    agent      imports what the script imports, and forks ───────> rank: waits for an order
               rendezvous, store (threads)                         │
               SubprocessHandler ──order: arguments, environment,──> its own session, streams, `sys.argv`, `__main__`
                                   descriptors of its log files      runs the script, ends as Python does

A rank differs from an executed one in this: its modules were imported without `RANK` in the environment; all ranks have
the same hash seed; `/proc/PID/environ` and the command line say nothing of it (`agent.mark`). On other systems than
Linux Python is executed as ever.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from labkit.ranks.fork_server import Mail, send

_OURS = ("torch", "numpy", "minimegatron", "labkit")  # what is the same in every process that imports it
_SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD)


def hand_out(most: int, script: str) -> None:
    """Fork `most` ranks, and let torchrun take one of them wherever it would execute `python -u script`.

    Returns in the agent alone.
    """
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

    _import_what_it_imports(script)
    gc.freeze()  # a collection in a rank copies no page that all share
    if sys.platform != "linux" or len(os.listdir("/proc/self/task")) > 1:
        return
    early: list[EarlyRank] = []
    for _ in range(most):
        early.append(EarlyRank(early))
    execute = SubprocessHandler._popen

    def popen(handler: Any, args: Sequence[str], env: Mapping[str, str]) -> Any:
        if not early or list(args[:3]) != [sys.executable, "-u", script]:
            return execute(handler, tuple(args), dict(env))
        rank = early.pop(0)
        rank.begin(args[2:], env, handler._stdout, handler._stderr)
        return rank

    SubprocessHandler._popen = popen  # type: ignore[assignment, method-assign]


class EarlyRank:
    """The near end of a rank: what torchrun asks of a `Popen`. Made in the agent, which has a single thread.

    Args:
        earlier: the others, whose near ends a fork must not hold: it sees by the end of file that the agent has ended.

    Attributes:
        pid: also of its process group.
        returncode: None while it lives.
    """

    def __init__(self, earlier: Sequence[EarlyRank]) -> None:
        self.returncode: int | None = None
        self._sock, far = socket.socketpair()
        self.pid = os.fork()
        if not self.pid:
            for rank in (self, *earlier):
                rank._sock.close()
            _become_rank(far)
        far.close()
        self._sock.recv(1)  # no deadline: our own fork, which has founded its group when it writes

    def begin(self, args: Sequence[str], env: Mapping[str, str], *logs: Any) -> None:
        """Tell it what to run and where to write; None for a stream that stays the agent's."""
        streams = {number: log.fileno() for number, log in enumerate(logs, 1) if log is not None}
        order = {"args": list(args), "env": dict(env), "streams": list(streams)}
        with self._sock, contextlib.suppress(ConnectionError):  # it was killed, as `poll` will say
            send(self._sock, order, streams.values())

    def poll(self) -> int | None:
        """Its return code as soon as it has ended."""
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Its return code; `subprocess.TimeoutExpired` when it has not ended after these seconds."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"rank of pid {self.pid}", timeout)
            time.sleep(0.01)
        return status


def _import_what_it_imports(script: str) -> None:
    """Of the modules that the script names, those that are the same everywhere; whatever fails does so in each rank."""
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        text = Path(script).read_bytes()
        for name in _imported(ast.parse(text)):
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        if b"optim" in text or "minimegatron.models" in sys.modules:  # a model is trained: an optimizer's first use
            importlib.import_module("torch._dynamo")


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and not node.level:
            names = [str(node.module)]
        yield from (name for name in names if name.partition(".")[0] in _OURS)


def _become_rank(sock: socket.socket) -> NoReturn:
    """Wait for an order, run its script, end the process."""
    os.setsid()
    for signum in _SIGNALS:
        signal.signal(signum, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sock.sendall(b"+")
    try:
        order = (mail := Mail(sock)).next()
    except ConnectionError:  # the agent has ended
        os._exit(0)
    sock.close()
    for number, descriptor in zip(order["streams"], mail.fds(2), strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(order["env"])
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # as in a process of its own; of `random` Python does it, and torch begins with a constant
    gc.enable()
    leave(_run(order["args"]))


def leave(status: int) -> NoReturn:
    """End a fork that is a Python of its own."""
    threading._shutdown()  # type: ignore[attr-defined]  # as Python ends, without taking apart what all ranks share
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # the script may have closed or replaced it
            stream.flush()
    os._exit(status)


def _run(args: list[str]) -> int:
    """Run a script as `__main__`; the exit status."""
    script = args[0]
    sys.argv[:], sys.path[0] = args, str(Path(script).resolve().parent)
    main = types.ModuleType("__main__")
    main.__dict__.update(__file__=script, __builtins__=__builtins__)
    sys.modules["__main__"] = main
    try:
        code = compile(Path(script).read_bytes(), script, "exec")
        exec(code, vars(main))  # noqa: S102  what torchrun was asked to run
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        where = error.__traceback__
        sys.excepthook(type(error), error, where and where.tb_next)  # without the line of this file
        return 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
