"""Limits what a learner's process can do to the machine: compute, and write into its own empty folder.

Limits and fresh processes (`nursery`) keep a check from taking too much; the sandbox keeps it from reaching out. Every
part is the operating system's, needs no root and no extra program, and is left out if the kernel does not have it. So
`minimegatron grade` does not rely on it: it tests each promise (`promises`), and gives no marks if one is not held.

| part              | since         | forbids                                                                       |
|-------------------|---------------|-------------------------------------------------------------------------------|
| `namespaces`      | Linux 3.8     | to see: other files, other processes, the host's sockets and networks         |
| `seccomp`         | Linux 3.5     | processes, programs, sockets, signals, uncounted memory, other limits         |
| capabilities      | Linux 2.2     | what only root may, if the grader runs as root                                |
| limits            | POSIX         | memory, time, files, threads                                                  |
| audit hook        | Python 3.8    | the same from Python code, on every system, with a readable message           |

The audit hook alone stops no native code. Grade submissions of strangers in a container or a virtual machine all the
same (SECURITY.md).

Sources: man 7 capabilities, 2 setrlimit; PEP 578.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
import resource
import site
import struct
import sys
import tempfile
from pathlib import Path
from typing import Any

from labkit import namespaces, seccomp

_ROOT = Path(__file__).resolve().parents[1]
HIDDEN = (_ROOT / "course", _ROOT / "solutions")
# Of the first: the tools that labs give to learners.
GIVEN = (_ROOT / "course" / "__init__.py", *sorted(_ROOT.glob("course/[0-9][0-9]_*/given")))
THREADS = 128  # of all ranks together, where the kernel counts them so; else of each

# Of the libraries that a program loads, and of the compiler.
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_PROGRAMS = ("/bin", "/usr", "/etc/alternatives", "/opt/rh")


@dataclasses.dataclass
class _Here:
    """Facts about this process, collected before it is closed.

    Attributes:
        rooted: whether processes forked from this one can have a root of their own.
        disk: bytes that it may write.
        shared: a folder in which all ranks of its job may write; "" for none.
        packages: folders of packages outside of the usual places.
    """

    rooted: bool = False
    disk: int = 64 << 20
    shared: str = ""
    packages: list[str] = dataclasses.field(default_factory=list)


_HERE = _Here()


# -------------------------------------------------------------------------------------------- before the first fork


def begin(scratch: str) -> None:
    """In the nursery: leave the network, and test whether its processes can have a root of their own.

    Args:
        scratch: an empty folder.
    """
    _HERE.packages = _elsewhere(readable())
    _HERE.rooted = namespaces.begin(readable(), scratch)
    if not _HERE.rooted:
        namespaces.without_network()


def readable(programs: bool = False) -> list[str]:
    """Paths that a learner's code needs: libraries, the interpreter, and of this checkout two packages and the labs'
    tools."""
    prefixes = dict.fromkeys([sys.prefix, sys.base_prefix, sys.exec_prefix])
    places = [os.path.join(prefix, name) for prefix in prefixes for name in ("lib", "lib64", "pyvenv.cfg")]
    places += [*_LIBRARIES, *namespaces.DEVICES, site.getusersitepackages()]
    places += [*_PROGRAMS, *prefixes] if programs else []
    places += [str(_ROOT / name) for name in ("minimegatron", "labkit")] + [str(one) for one in GIVEN]
    found = [os.path.abspath(place) for place in places if os.path.lexists(place)]
    return list(dict.fromkeys(found + _HERE.packages))


def _elsewhere(places: list[str]) -> list[str]:
    """Loaded packages that are in none of these places, links resolved; of a checkout nothing more is given.

    Where labkit is installed, `_ROOT` is a folder of packages, and may be one that a `.pth` file or PYTHONPATH names.
    """
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    real = {os.path.dirname(os.path.realpath(file)) for file in files if file and os.path.isabs(file)}
    checkout = [_ROOT] * (_ROOT / "pyproject.toml").is_file()
    known = [*map(os.path.realpath, places), *map(os.fspath, [*HIDDEN, *checkout])]
    return sorted(folder for folder in real if not any(f"{folder}/".startswith(f"{place}/") for place in known))


# ------------------------------------------------------------------------------------------------------- audit hook

_NEVER = {
    "os.fork": "processes", "os.forkpty": "processes", "os.system": "processes", "os.exec": "processes",
    "os.posix_spawn": "processes", "os.spawn": "processes", "pty.spawn": "processes", "subprocess.Popen": "processes",
    "os.killpg": "signals to others", "socket.__new__": "the network", "socket.getaddrinfo": "the network",
    "socket.gethostbyname": "the network", "resource.setrlimit": "its own limits", "resource.prlimit": "its own limits",
}  # fmt: skip
_CHANGING = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.truncate", "os.link",
             "os.symlink", "shutil.rmtree")  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _audit(folders: tuple[Path, ...], hidden: tuple[Path, ...]) -> None:
    """Refuse from Python what the parts above refuse from anywhere, with a message that says why."""
    own, closed = os.getpid(), tuple(map(os.fspath, hidden))
    mine = tuple(os.fspath(folder.resolve()) for folder in folders)
    absolute, fsdecode, given = os.path.abspath, os.fsdecode, tuple(map(os.fspath, GIVEN))

    def under(path: str, folders: tuple[str, ...]) -> bool:
        return any(path == one or path.startswith(one + os.sep) for one in folders)

    def outside(path: Any) -> bool:
        return isinstance(path, str | bytes | os.PathLike) and not under(absolute(fsdecode(path)), mine)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in _NEVER or (event == "os.kill" and args[0] != own):
            raise PermissionError(f"a check may not use {_NEVER.get(event, 'signals to others')}")
        if event == "open" and isinstance(args[0], str | bytes):
            path = absolute(fsdecode(args[0]))
            if under(path, closed) and not under(path, given):
                raise PermissionError("a check may not read the checks or the solutions")
            if args[2] & _WRITING and path != os.devnull and outside(path):
                raise PermissionError("a check may write in its own folder only")
        elif event in _CHANGING and (outside(args[0]) or (event == "os.rename" and outside(args[1]))):
            raise PermissionError("a check may change its own folder only")

    sys.addaudithook(hook)


# --------------------------------------------------------------------------------------------------------- together


def room(disk: int, shared: str = "") -> None:
    """Set, before `enter`, the bytes that this process may write, and the folder that all ranks of its job share."""
    _HERE.disk, _HERE.shared = disk, shared


def shared_folder() -> Path:
    """The folder that the ranks of a job share, where `enter(ranks=True)` has left it."""
    return Path(_HERE.shared)


def enter(
    folder: Path, *, hidden: tuple[Path, ...] = (), programs: bool = False, ranks: bool = False,
    extra: tuple[Path, ...] = (),
) -> None:  # fmt: skip
    """Give up, for the rest of this process, everything that a check does not need. Only the main thread may exist yet.

    Its working directory is then an empty folder, the only one in which it may write.

    Args:
        folder: an empty folder.
        hidden: folders that it may not read, beside `HIDDEN`.
        programs: whether it may start programs: for our own code that calls a compiler, never for a learner's.
        ranks: whether it may open sockets to the other ranks of its job, which share a network of their own with it
            (where the kernel has none, the machine's), and write in their common folder.
        extra: further paths that it may read.
    """
    sys.dont_write_bytecode = True
    closed = tuple(one for one in (*HIDDEN, *hidden) if one not in _ROOT.parents and one != _ROOT)
    restrict(folder, hidden=closed, programs=programs, ranks=ranks, extra=extra)
    if not programs:
        _audit((Path.cwd(), *([shared_folder()] if ranks else [])), closed)


def restrict(
    folder: Path, *, hidden: tuple[Path, ...] = HIDDEN, programs: bool = False, ranks: bool = False,
    extra: tuple[Path, ...] = (),
) -> None:  # fmt: skip
    """The kernel's part of `enter`."""
    read, closed = [*readable(programs), *map(os.fspath, extra)], [os.fspath(one) for one in hidden]
    if sys.platform == "linux":
        if _HERE.rooted:
            shared, given = _HERE.shared if ranks else "", [*map(os.fspath, GIVEN)]
            namespaces.own_root(read, closed, os.fspath(folder), _HERE.disk, shared, given)
            _HERE.shared = namespaces.SHARED
        if not programs:
            _limit_threads()
        _drop_capabilities()
        seccomp.restrict(programs=programs, sockets=ranks)
    os.environ["HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = os.getcwd()


def _limit_threads() -> None:
    """RLIMIT_NPROC counts by user: in a user namespace of its own, or for a user that no other process has.

    Root is exempt by its user id, not by what it may. So a process of root gets another *real* user; which files it
    may read is decided by the effective one, which stays.
    """
    libc = ctypes.CDLL(None)
    apart = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2])) >= (5, 14) and namespaces.has_own_users()
    if apart or (os.geteuid() == 0 and libc.setresuid(1_000_000_000 + os.getpid(), -1, -1) == 0):
        resource.setrlimit(resource.RLIMIT_NPROC, (THREADS, THREADS))


def _drop_capabilities() -> None:
    ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), bytes(24))
