"""Processes as Linux shows them: how one ended, its descendants, and which end with which.

The problem in a sentence: a rank that outlives its job holds a port and a GPU. Four mechanisms, each covering what the
others cannot:

| mechanism                        | covers                                | does not cover                          |
|----------------------------------|---------------------------------------|-----------------------------------------|
| end of file on an inherited pipe | any death of the other side           | a process that does not read            |
| `PR_SET_PDEATHSIG`               | one that computes or blocks in C      | grandchildren                           |
| a token in the environment       | all descendants, in whatever session  | one with an emptied environment         |
| (`labkit/ranks/agent`)           |                                       |                                         |
| `PR_SET_CHILD_SUBREAPER`         | all descendants, whatever they did    | the subreaper itself killed by SIGKILL  |

The second fires when the *thread* that forked ends, so fork from a thread that lives as long as the job. The last makes
an orphan the child of its nearest living ancestor that asked for it, so a daemon that forked twice, took a session of
its own and emptied its environment is still found by walking down from there.

On other systems than Linux only the first works, beside deadlines and a walk down the tree by `ps`. `limits` says so,
and `minimegatron doctor` repeats it.
"""

from __future__ import annotations

import contextlib
import ctypes
import linecache
import os
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

# Variables that `labkit/ranks` sets: where ranks check in and report; the pid of an agent that reports on its ranks.
RUN_DIR, AGENT = "MINIMEGATRON_RUN_DIR", "MINIMEGATRON_AGENT"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h
_ALL_KINDS = 0x40000000 if sys.platform == "linux" else 0  # __WALL of wait.h: whatever signal says that one has ended


def usable_cores(root: Path = Path("/sys/fs/cgroup")) -> int:
    """Cores this process may use: the affinity mask, cut by a container's quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):
        return allowed


def limits() -> list[str]:
    """Limits of this system regarding processes that end, in words; none on Linux."""
    if sys.platform.startswith("linux") and os.path.isdir("/proc/self"):
        return []
    missing = ["a rank whose launcher is killed by SIGKILL goes on until its next message"]
    missing += [
        "a daemon that a rank has started outlives the job",
        "a hang is reported without the lines of the ranks",
    ]
    return missing


def die_with_parent(signum: int, parent: int | None = None) -> None:
    """Ask the kernel to send `signum` to this process when the thread that started it ends.

    Args:
        signum: the signal.
        parent: pid of the process that should be our parent; if it is gone already, the signal is raised now.
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


def stat_of(pid: int) -> list[str]:
    """The fields of `/proc/PID/stat` from the state on; [] for a process that has ended, or without `/proc`."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def zombie_status(pid: int) -> int | None:
    """Return code of a process that has ended and whose parent has not waited for it; None when it cannot be read.

    This is how siblings learn of a death: only a parent may `wait`, but any process may read `/proc`.
    """
    fields = stat_of(pid)
    return os.waitstatus_to_exitcode(int(fields[49])) if fields[:1] == ["Z"] else None


def as_batch_job() -> None:
    """Keep the core until the time slice is over, also when another process wakes up (Linux, SCHED_BATCH).

    Ranks on few cores wake each other with every message, in the middle of sending one; then gloo's thread spins on a
    lock whose owner has lost its core. Threads started from now on inherit it. Priorities stay as they are, and a
    process with another policy keeps it. In a container that forbids it the only loss is speed.
    """
    if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
        with contextlib.suppress(PermissionError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def keep_memory() -> None:
    """Keep freed memory for later allocations (glibc), as torch's allocator does on a GPU.

    A training step frees and allocates the same tensors in each layer. By default glibc returns the largest of them to
    the kernel each time, and gets zeroed pages for the next: for a model of 9 M parameters 36 to 50 thousand of them a
    step, and 2 to 7 % of its CPU-seconds. The process then keeps the size of its fullest moment. An environment
    variable for malloc overrides this.
    """
    chosen = [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]
    if sys.platform == "linux" and not chosen:
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_M_MMAP_THRESHOLD, 1 << 30)
            mallopt(_M_TRIM_THRESHOLD, -1)  # never


def no_tokenizer_threads() -> None:
    """Forbid threads of the package `tokenizers` in this process and its children, unless the user has decided."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def children(pid: int) -> list[int]:
    """Living or unreaped children of a process, whichever of its threads started them."""
    if pid == os.getpid() and not _has_children():
        return []
    if not os.path.exists(f"/proc/{os.getpid()}/task/{os.getpid()}/children"):  # a kernel without that list
        return sorted(child for child, parent in _parents().items() if parent == pid)
    pids: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            pids.update(map(int, task.read_text().split()))
        except OSError:
            continue
    return sorted(pids)


def _has_children() -> bool:
    """Whether this process has any; asked of the kernel in one call, where the lists are a file for each thread."""
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | _ALL_KINDS)
    except ChildProcessError:
        return False
    return True


def _parents() -> dict[int, int]:
    """{pid: pid of its parent} of every process; from `ps` if there is no `/proc`."""
    if not os.path.isdir("/proc/self"):
        with subprocess.Popen(["ps", "-A", "-o", "pid=,ppid="], stdout=subprocess.PIPE, text=True) as ps:
            pairs = [line.split() for line in ps.communicate(timeout=10)[0].splitlines()]
        return {int(pid): int(parent) for pid, parent in pairs if int(pid) != ps.pid}
    stats = {pid: stat_of(pid) for pid in map(int, filter(str.isdigit, os.listdir("/proc")))}
    return {pid: int(fields[1]) for pid, fields in stats.items() if fields}


def descendants(pid: int) -> list[int]:
    """Children of a process, their children and so on; parents before their children."""
    of: dict[int, list[int]] = {}
    for child, parent in _parents().items():
        of.setdefault(parent, []).append(child)
    pids = list(of.get(pid, ()))
    for child in pids:
        pids += of.get(child, ())
    return pids


def adopt_orphans() -> None:
    """From now on a descendant whose parent ends becomes a child of this process (Linux), not of init."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_descendants(seconds: float = 5.0, spare: Collection[int] = ()) -> None:
    """SIGKILL all descendants of this process, and return when they are gone or the time is over.

    Args:
        spare: children that stay, with all their descendants.
    """
    deadline = time.monotonic() + seconds
    while (left := _condemned(spare)) and time.monotonic() < deadline:
        for pid in left:
            send(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):  # a grandchild, or it was waited for elsewhere
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.005)


def _condemned(spare: Collection[int]) -> list[int]:
    if not [pid for pid in children(os.getpid()) if pid not in spare]:
        return []  # without looking at every process of the machine
    kept = {pid for child in spare for pid in (child, *descendants(child))}
    return [pid for pid in descendants(os.getpid()) if pid not in kept]


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
        linecache.checkcache(self.file)  # a notebook writes its cells to the same file again
        source = linecache.getline(self.file, self.line).strip()
        return f"{Path(self.file).name}:{self.line} in {self.function}" + (f": {source}" if source else "")


def is_users(file: str) -> bool:
    """Whether a source file is neither Python's, nor an installed library's, nor this package's."""
    installed = {"site-packages", "dist-packages"} & set(Path(file).parts)  # of another environment, seen from this one
    return not installed and not file.startswith(("<frozen", _PACKAGE, *_LIBRARIES))


def users_frame(frames: Iterable[Frame]) -> Frame | None:
    """The innermost of `frames` (given innermost first) that is in user code, else the innermost; None for no
    frames."""
    frames = list(frames)
    return next((f for f in frames if is_users(f.file)), frames[0] if frames else None)


_LIBRARIES = tuple({sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGE = str(Path(__file__).resolve().parents[1])
