"""Processes as Linux sees them: who dies with whom, how one died, where one waits.

The problem in a sentence: a rank that outlives its job holds a port, a GPU and your afternoon. Three mechanisms, each
covering what the one before cannot:

| mechanism                        | covers                                | does not cover                          |
|----------------------------------|---------------------------------------|-----------------------------------------|
| end of file on an inherited pipe | any death of the other side           | a process that does not read            |
| `PR_SET_PDEATHSIG`               | one that computes or blocks in C      | grandchildren                           |
| a token in the environment       | all descendants, in whatever session  | nothing, if somebody lives to look      |

The second has a trap: it fires when the *thread* that forked ends, so fork from a thread that lives as long as the job.
On other systems than Linux the functions here do nothing or return nothing; the deadlines remain.
"""

from __future__ import annotations

import contextlib
import ctypes
import linecache
import os
import re
import signal
import sys
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

_PR_SET_PDEATHSIG = 1


def die_with_parent(signum: int, parent: int | None = None) -> None:
    """Ask the kernel to send `signum` to this process when the thread that started it ends.

    Args:
        signum: what to receive.
        parent: pid of the process that should be our parent; if it is gone already, the signal is taken as sent.
    """
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if parent is not None and os.getppid() != parent:  # it died between our start and the line above
        os._exit(128 + signum)


def how_it_ended(returncode: int) -> str:
    """-9 -> "was killed by SIGKILL"; 3 -> "left with exit status 3"."""
    if returncode >= 0:
        return f"left with exit status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-returncode}"


def zombie_status(pid: int) -> int | None:
    """Return code of a process that has ended but was not yet waited for, by anybody; None when it cannot be seen.

    This is how siblings learn of a death: only a parent may `wait`, but everybody may read `/proc`.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    if fields[0] != "Z":
        return None
    return os.waitstatus_to_exitcode(int(fields[49]))


def as_batch_job() -> None:
    """Keep the core until the time slice is over, where otherwise whoever wakes up may take it (Linux, SCHED_BATCH).

    Ranks on a few cores wake each other with every message, in the middle of sending one; then the thread of gloo that
    should go on spins on a lock whose owner has lost its core. Threads started from now on inherit it. Priorities stay
    as they are, and who has chosen another policy keeps that. A container that forbids it costs time, and nothing else.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def children(pid: int) -> list[int]:
    """Living or unreaped children of a process, whichever of its threads started them."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found.update(map(int, task.read_text().split()))
        except OSError:
            continue
    return sorted(found)


def marked(token: str) -> dict[int, dict[str, str]]:
    """{pid: environment} of all processes, but this one, that were started with `token` in their environment."""
    needle, found = token.encode(), {}
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            raw = entry.read_bytes()
        except OSError:  # gone, or somebody else's
            continue
        pid = int(entry.parent.name)
        if needle in raw and pid != os.getpid():
            pairs = (item.partition("=") for item in raw.decode(errors="replace").split("\0") if "=" in item)
            found[pid] = {key: value for key, _, value in pairs}
    return found


def end_marked(token: str, seconds: float = 5.0) -> None:
    """SIGKILL every process that carries the token, and return when none is left or the time is over."""
    deadline = time.monotonic() + seconds
    while (pids := marked(token)) and time.monotonic() < deadline:
        for pid in pids:
            send(pid, signal.SIGKILL)
        time.sleep(0.02)


def send(pid: int, signum: int, *, group: bool = False) -> None:
    """Send a signal to a process or to its whole process group; a target that is gone already is no error."""
    try:
        (os.killpg if group else os.kill)(pid, signum)
    except ProcessLookupError:
        return


class Frame(NamedTuple):
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        source = linecache.getline(self.file, self.line).strip()
        return f"{Path(self.file).name}:{self.line} in {self.function}" + (f": {source}" if source else "")


def dumped_frames(dump: str) -> list[Frame]:
    """The stack that Python's `faulthandler` wrote last for the thread that got the signal, innermost call first."""
    blocks = re.findall(r"^(?:Current thread|Stack) .*\n((?:  File .*\n?)+)", dump, re.MULTILINE)
    lines = re.findall(r'File "(.*)", line (\d+) in (.*)', blocks[-1]) if blocks else []
    return [Frame(file, int(line), function.strip()) for file, line, function in lines]


def waits_for_a_peer(frames: list[Frame]) -> bool:
    """Whether a stack (innermost call first) ends inside a communication."""
    rooms = (os.path.join(_PACKAGE, "comm", name) for name in ("collectives.py", "p2p.py"))
    inside = (os.path.join("torch", "distributed"), *rooms)
    return bool(frames) and any(place in frames[0].file for place in inside)


def is_users(file: str) -> bool:
    """Whether a source file is neither Python's, nor an installed library's, nor this package's."""
    return not file.startswith(("<frozen", _PACKAGE, *_LIBRARIES))


def users_frame(frames: Iterable[Frame]) -> Frame | None:
    """The innermost of `frames` (given innermost first) that lies in user code, else the innermost; None of none."""
    frames = list(frames)
    return next((f for f in frames if is_users(f.file)), frames[0] if frames else None)


_LIBRARIES = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGE = str(Path(__file__).resolve().parents[1])
