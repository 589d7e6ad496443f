"""Tests the sandbox on this machine: each thing that a submission must not be able to do is tried, from inside.

The problem in a sentence: a part of the sandbox that the kernel does not have is missing silently, and marks that
were given there may be stolen. So `minimegatron grade` starts a process as it would for a learner, and tries:

| promise: it cannot ...          | tried by                                                                 |
|---------------------------------|--------------------------------------------------------------------------|
| read what others wrote          | listing the submissions, the checks, the solutions, the history          |
| read the inputs of other ranks  | listing the folder that holds the ranks' folders                         |
| see other processes             | the command line of the process that started it                          |
| reach the network               | a socket                                                                 |
| write outside its folder        | making a file beside                                                     |
| change files outside its folder | the mode of a file                                                       |
| start processes                 | fork                                                                     |
| signal other processes          | signal 0 to the process that started it                                  |
| outlive the grader              | undoing that it dies with its parent                                     |
| hold memory without a limit     | a file in memory                                                         |

No audit hook is active, so what fails, fails in the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from labkit import sandbox
from labkit.fresh import Nursery
from labkit.nursery import Limits
from minimegatron.errors import ConfigError

_SETTINGS = {  # sysctl -> the value that forbids user namespaces, the value that allows them
    "kernel.unprivileged_userns_clone": ("0", "1"),
    "kernel.apparmor_restrict_unprivileged_userns": ("1", "0"),
    "user.max_user_namespaces": ("0", "15000"),
}


def tried(nursery: Nursery, secrets: Iterable[Path]) -> dict[str, bool]:
    """{what a submission might do: whether this machine prevents it}.

    Args:
        secrets: files and folders that it must not read, beside the checks, the solutions and the history.
    """
    root = Path(sandbox.__file__).resolve().parents[1]
    course = [one for one in root.glob("course/[0-9][0-9]_*/*") if one not in sandbox.GIVEN]
    names = [*secrets, *course, *(root / name for name in ("solutions", "course/solutions", ".git", "tests"))]
    with tempfile.TemporaryDirectory(prefix="minimegatron-") as folder:
        (Path(folder) / "file").touch()
        job = {"outside": folder, "secrets": [str(one.resolve()) for one in names if one.exists()]}
        [reply] = nursery.call(probe, [job], Limits(seconds=20))
    return dict(reply.value) if isinstance(reply.value, dict) else dict.fromkeys(_TRIALS, False)


def required(held: Mapping[str, bool]) -> None:
    """Refuse to go on if a promise is not held.

    Raises:
        ConfigError: what a submission could do, and how to prevent it.
    """
    if could := [name for name, prevented in held.items() if not prevented]:
        raise ConfigError(
            f"this machine does not keep submissions apart. One could {', '.join(could)}", where="grade",
            fix=f"{advice()}; or say --trust, and every mark carries a remark",
        )  # fmt: skip


def advice(settings: Path = Path("/proc/sys")) -> str:
    """How to get the missing parts on this machine."""
    if sys.platform != "linux":
        return "grade on Linux, in a container or a virtual machine"
    for name, (bad, good) in _SETTINGS.items():
        with contextlib.suppress(OSError):
            if settings.joinpath(*name.split(".")).read_text().strip() == bad:
                return f"sudo sysctl {name}={good}"
    if any(Path(mark).exists() for mark in ("/.dockerenv", "/run/.containerenv")):
        return "start the container with --security-opt seccomp=unconfined --security-opt apparmor=unconfined"
    return "take a kernel with user namespaces"


# ----------------------------------------------------------------------------------------- in a process of its own


def probe(rank: int, world: int, job: dict[str, Any]) -> dict[str, bool]:
    """Whether each attempt fails, in a process that has given up what a learner's gives up."""
    job = {**job, "ranks": os.path.dirname(os.getcwd())}
    sys.dont_write_bytecode = True
    sandbox.restrict(Path.cwd(), ranks=True)
    return {name: not _succeeds(trial, job) for name, trial in _TRIALS.items()}


def _succeeds(trial: Callable[[dict[str, Any]], object], job: dict[str, Any]) -> bool:
    try:
        return bool(trial(job))
    except (OSError, AttributeError):
        return False


def _readable(path: str) -> bool:
    with contextlib.suppress(OSError):
        if os.path.isdir(path):
            return any(_readable(one.path) for one in os.scandir(path))
        with open(path, "rb") as stream:
            return bool(stream.read(1))
    return False


def _connects(job: dict[str, Any]) -> bool:
    with socket.socket() as out:
        out.settimeout(1.0)
        try:
            out.connect(("192.0.2.1", 9))  # an address kept free for documentation
        except TimeoutError:
            return True  # the packet has left
    return True


def _writes(job: dict[str, Any]) -> bool:
    path = os.path.join(job["outside"], "new")
    with open(path, "w"):
        return True


def _changes(job: dict[str, Any]) -> bool:
    os.chmod(os.path.join(job["outside"], "file"), 0o600)
    return True


def _forks(job: dict[str, Any]) -> bool:
    pid = ctypes.CDLL(None).fork()
    if pid == 0:
        os._exit(0)
    if pid > 0:
        os.waitpid(pid, 0)
    return bool(pid > 0)


def _clears_parent_death(job: dict[str, Any]) -> bool:
    return sys.platform != "linux" or ctypes.CDLL(None).prctl(1, 0, 0, 0, 0) == 0


def _holds_memory(job: dict[str, Any]) -> bool:
    return bool(os.memfd_create("x") >= 0)


_TRIALS: dict[str, Callable[[dict[str, Any]], object]] = {
    "read what others wrote": lambda job: any(map(_readable, job["secrets"])),
    "read the inputs of other ranks": lambda job: os.listdir(job["ranks"]),
    "see other processes": lambda job: sys.platform != "linux" or _readable(f"/proc/{os.getppid()}/cmdline"),
    "reach the network": _connects,
    "write outside its folder": _writes,
    "change files outside its folder": _changes,
    "start processes": _forks,
    "signal other processes": lambda job: ctypes.CDLL(None).kill(os.getppid(), 0) == 0,
    "outlive the grader": _clears_parent_death,
    "hold memory without a limit": _holds_memory,
}
