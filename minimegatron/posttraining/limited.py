"""A program that nobody has read, in a child with limits: it computes values, and can do nothing else.

The problem in a sentence: an answer to "write the function" has to be run to be judged, and a model that learns by
trial writes programs that hang, fork, fill the memory, leave, and delete files.

    this process    code, calls -->                                       --> values, as JSON    right? -> reward
    the child                      namespaces, Landlock, limits, execute

What the child gives up is in `limited_child`. Here are the deadline, after which its whole group is killed, and the
most bytes that it may say. Values are compared outside, as JSON: the child does not know the right ones.

**Held or refused.** Each part is the kernel's. `check` tries all of it from inside, and refuses where one is not held:
Linux 5.13 or later with Landlock, run by root or where users may make namespaces. What remains is what a fault of the
kernel or a side channel opens (SECURITY.md).
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from minimegatron.errors import ConfigError
from minimegatron.launch.procs import how_it_ended, usable_cores

GRACE = 1.0  # seconds
CHILD = Path(__file__).with_name("limited_child.py")


class Limits(NamedTuple):
    """What one program may use.

    Attributes:
        seconds: of the clock, the start of the interpreter included.
        cpu_seconds: of a core, whole ones.
        memory: bytes of address space.
        output: bytes of all values as JSON.
    """

    seconds: float = 10.0
    cpu_seconds: int = 2
    memory: int = 512 << 20
    output: int = 64 << 10


LIMITS = Limits()


class Job(NamedTuple):
    """A program and what to call.

    Attributes:
        code: of Python.
        name: a function that it defines.
        calls: arguments of each call, plain values.
    """

    code: str
    name: str
    calls: Sequence[Sequence[Any]]


class Outcome(NamedTuple):
    """What came of a program.

    Attributes:
        values: of the calls up to the first that failed.
        reason: why they are not all there; "" where they are.
    """

    values: list[Any]
    reason: str


def run(job: Job, limits: Limits = LIMITS) -> Outcome:
    """Run a program under limits; returns in `limits.seconds`, whatever it does, and a second more at most."""
    task = {**job._asdict(), "memory": limits.memory, "seconds": limits.cpu_seconds}
    until = time.monotonic() + limits.seconds
    with tempfile.TemporaryDirectory() as empty:
        child = subprocess.Popen(
            [sys.executable, "-ISB", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=empty,
            env={},
            start_new_session=True,
        )
        try:
            said, ended = _talk(child, json.dumps(task).encode(), limits.output, until)
            if not ended:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, until - time.monotonic()))
        finally:
            _end(child)
    return _outcome(said, ended, child.returncode, len(job.calls), limits)


def _talk(child: subprocess.Popen[bytes], task: bytes, most: int, until: float) -> tuple[bytes, str]:
    """(what the child says, why no more was read: "" at the end of file)."""
    assert child.stdin is not None and child.stdout is not None
    said = b""
    with child.stdin, child.stdout, selectors.DefaultSelector() as ready:
        for pipe, event in ((child.stdin, selectors.EVENT_WRITE), (child.stdout, selectors.EVENT_READ)):
            os.set_blocking(pipe.fileno(), False)
            ready.register(pipe, event)
        while (left := until - time.monotonic()) > 0:
            for key, _ in ready.select(left):
                if key.fileobj is child.stdin:
                    try:
                        task = task[os.write(key.fd, task) :] if task else task
                    except BrokenPipeError:
                        task = b""
                    if not task:
                        ready.unregister(child.stdin)
                        child.stdin.close()
                    continue
                piece = os.read(key.fd, 1 << 16)
                said += piece
                if not piece or len(said) > most:
                    return said[:most], "" if not piece else "output"
    return said, "time"


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child, which ends the answer and reaps it; the whole group, if that takes long."""
    child.terminate()
    try:
        child.wait(GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()  # no deadline: it was killed


def _outcome(said: bytes, ended: str, returncode: int, calls: int, limits: Limits) -> Outcome:
    values: list[Any] = []
    for line in said.split(b"\n"):
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            break
        if not isinstance(found, dict) or "value" not in found:
            error = str(found.get("error", "no value")) if isinstance(found, dict) else "no value"
            if isinstance(found, dict) and "unlimited" in found and not values:
                return Outcome([], f"not limited: {found['unlimited']}")
            return Outcome(values, error[:200])
        values.append(found["value"])
    if len(values) >= calls:
        return Outcome(values[:calls], "")
    if ended == "time":
        return Outcome(values, f"took longer than {limits.seconds:g} s")
    if ended == "output":
        return Outcome(values, f"said more than {limits.output} bytes")
    code = returncode if returncode < 128 else 128 - returncode
    return Outcome(values, f"{how_it_ended(code)} before call {len(values)} was answered")


def run_all(jobs: Sequence[Job], limits: Limits = LIMITS) -> list[Outcome]:
    """Run programs, as many at once as there are cores: n of them take n / cores times `limits.seconds` at most."""
    with ThreadPoolExecutor(min(len(jobs), usable_cores()) or 1, "limited") as pool:
        return list(pool.map(lambda job: run(job, limits), jobs))


# Each line must raise OSError or RuntimeError inside.
FORBIDDEN = {
    "processes": "os.fork()",
    "threads": "threading.Thread(target=print).start()",
    "signals to others": "os.kill({pid}, 0)",
    "to read files": "os.listdir('/')",
    "to write files": "open({here!r} + '/x', 'w')",
    "to change modes": "os.chmod({here!r}, 0o700)",
    "the network": "socket.create_connection(('127.0.0.1', {port}), 2)",
    "its limits": "resource.setrlimit(resource.RLIMIT_CPU, (600, 600))",
}
TRIES = """
import os, resource, socket, threading
def held(what):
    try:
        exec(what)
    except (OSError, RuntimeError, ValueError) as error:
        return type(error).__name__
    return ""
"""


def check() -> None:
    """Try from inside what a program must not be able to do.

    Raises:
        ConfigError: naming what this machine does not keep it from.
    """
    import socket

    with tempfile.TemporaryDirectory() as here, socket.create_server(("127.0.0.1", 0)) as server:
        facts = {"pid": os.getpid(), "here": here, "port": server.getsockname()[1]}
        calls = [[line.format(**facts)] for line in FORBIDDEN.values()]
        found = run(Job(TRIES, "held", calls), Limits(60.0, 5))
    open_ = [name for name, refused in zip(FORBIDDEN, found.values, strict=False) if not refused]
    if open_ or found.reason:
        what = f"a program would not be kept from {', '.join(open_)}" if open_ else found.reason
        raise ConfigError(
            f"programs cannot be limited on this machine: {what}",
            fix="Linux 5.13 or later with Landlock, as root or with user namespaces (sysctl user.max_user_namespaces)",
        )
