"""What a learner's process may do to the machine: compute, and write into its own empty folder.

Limits and fresh processes (`nursery`) keep a check from taking too much; this keeps it from reaching out. Every part
is the operating system's, needs no root and no extra program, and is left out where the kernel does not have it. So
`minimegatron grade` does not rely on it: it tries (`probe`), and says in its report what held on this machine.

| part                      | since            | forbids                                                               |
|---------------------------|------------------|-----------------------------------------------------------------------|
| network namespace         | Linux            | every network but its own loopback, over which gloo's ranks talk      |
| mount namespace           | Linux            | reading `course/` (checks, solutions) and `solutions/`                |
| Landlock                  | Linux 5.13       | writing, making, removing outside of the job's folder                 |
| seccomp                   | Linux 3.5        | processes, programs, signals to others, own limits, sockets if alone  |
| audit hook                | Python           | the same from Python code, on every system, with a readable message   |

A fork bomb does not explode and `kill(-1)` reaches no other process. The audit hook alone stops no native code.
For submissions of strangers grade in a container or a virtual machine all the same (SECURITY.md).

Sources: man 2 seccomp, man 7 landlock, man 7 user_namespaces; PEP 578.
"""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import struct
import sys
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
HIDDEN = (_ROOT / "course", _ROOT / "solutions")

_NEWNS, _NEWUSER, _NEWNET = 0x20000, 0x10000000, 0x40000000


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


# ------------------------------------------------------------------------------------------------- namespaces


def leave_network() -> bool:
    """Move this process, which must have one thread, into a network of its own that has only loopback.

    Tried in a child first: a kernel that allows half of it would leave us with no network to talk to our ranks.

    Returns:
        Whether that was possible. A process without privileges gets a user namespace of its own first.
    """
    if sys.platform != "linux":
        return False
    if (child := os.fork()) == 0:
        try:
            _own_network()
            os._exit(0)
        finally:
            os._exit(1)
    if os.waitpid(child, 0)[1]:
        return False
    _own_network()
    return True


def _own_network() -> None:
    import fcntl

    libc, uid, gid = _libc(), os.getuid(), os.getgid()
    if libc.unshare(_NEWNET):
        if libc.unshare(_NEWUSER | _NEWNET):
            raise OSError(ctypes.get_errno(), "no namespaces here")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        request = struct.pack("16sh14x", b"lo", 0x1 | 0x40)  # up, running
        fcntl.ioctl(any_socket, 0x8914, request)  # SIOCSIFFLAGS


def _hide(folders: tuple[Path, ...]) -> bool:
    """Put an empty file system over the folders, in a mount namespace of this process alone."""
    libc = _libc()
    if libc.unshare(_NEWNS) or libc.mount(None, b"/", None, 0x4000 | 0x40000, None):  # MS_REC | MS_PRIVATE
        return False
    there = [str(folder).encode() for folder in folders if folder.is_dir() and folder not in Path.cwd().parents]
    return not any([libc.mount(b"none", folder, b"tmpfs", 1, None) for folder in there])  # 1: read-only


# --------------------------------------------------------------------------------------------------- landlock

# Everything that changes the file system: writing, removing, making each kind of file, renaming across, truncating.
_CHANGES = sum(1 << bit for bit in (1, 4, 5, 6, 7, 8, 9, 10, 11, 12))
_REFER, _TRUNCATE = 1 << 13, 1 << 14  # known since versions 2 and 3


def _write_only_below(folders: tuple[Path, ...]) -> bool:
    """Landlock: from now on this process changes nothing outside of these folders."""
    libc = _libc()
    libc.syscall.restype = ctypes.c_long
    version = libc.syscall(444, None, 0, 1)
    if version < 1:
        return False
    rights = _CHANGES | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    attributes = struct.pack("Q", rights)
    rules = libc.syscall(444, attributes, len(attributes), 0)
    if rules < 0:
        return False
    for folder in folders:
        descriptor = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        mine = rights if folder.is_dir() else rights & (1 << 1 | _TRUNCATE)
        libc.syscall(445, rules, 1, struct.pack("=Qi", mine, descriptor), 0)
        os.close(descriptor)
    failed = libc.syscall(446, rules, 0)
    os.close(rules)
    return not failed


# ---------------------------------------------------------------------------------------------------- seccomp

# name -> (number on x86_64, on aarch64; None where it does not exist)
_FORBIDDEN: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "setpgid": (109, 154), "setsid": (112, 157), "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    "umount2": (166, 39), "move_mount": (429, 429), "open_tree": (428, 428), "fsmount": (432, 432),
    "chroot": (161, 51), "pivot_root": (155, 41), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "tkill": (200, 130), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "setrlimit": (160, 164), "io_uring_setup": (425, 425), "bpf": (321, 280),
    "reboot": (169, 142), "init_module": (175, 105), "finit_module": (313, 273), "keyctl": (250, 219),
    "shmget": (29, 194), "settimeofday": (164, 170), "clock_settime": (227, 112), "sethostname": (170, 161),
}  # fmt: skip
_TO_START = ("fork", "vfork", "execve")  # what a compiler needs to call its parts
_SOCKET, _CLONE, _CLONE3, _KILL, _TGKILL, _PRLIMIT = (41, 198), (56, 220), (435, 435), (62, 129), (234, 131), (302, 261)
_ALLOW, _EPERM, _ENOSYS, _KILL_PROCESS = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
_LOAD, _IF_EQUAL, _IF_ANY_BIT, _IF_ABOVE, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06


def _program(network: bool, programs: bool = False) -> list[tuple[int, int, int, int]]:
    """The filter as instructions (code, jump if true, jump if false, constant)."""
    intel = platform.machine() == "x86_64"
    own = os.getpid()

    def number(pair: tuple[int | None, int | None]) -> int | None:
        return pair[0 if intel else 1]

    def refuse(nr: int | None, answer: int = _EPERM) -> list[tuple[int, int, int, int]]:
        return [] if nr is None else [(_IF_EQUAL, 0, 1, nr), (_RETURN, 0, 0, answer)]

    def unless(nr: int | None, word: int, test: int, value: int) -> list[tuple[int, int, int, int]]:
        """Refuse call `nr`, unless the 32-bit word `word` of its arguments passes the test."""
        assert nr is not None, "these calls exist on both machines"
        return [
            (_IF_EQUAL, 0, 4, nr), (_LOAD, 0, 0, 16 + 4 * word), (test, 0, 1, value), (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, _EPERM),
        ]  # fmt: skip

    program = [(_LOAD, 0, 0, 4), (_IF_EQUAL, 1, 0, 0xC000003E if intel else 0xC00000B7), (_RETURN, 0, 0, _KILL_PROCESS)]
    program += [(_LOAD, 0, 0, 0)]
    if intel:  # the same calls under the numbers of another convention
        program += [(_IF_ABOVE, 0, 1, 0x40000000), (_RETURN, 0, 0, _EPERM)]
    for name, pair in _FORBIDDEN.items():
        program += [] if programs and name in _TO_START else refuse(number(pair))
    program += refuse(number(_CLONE3), _ENOSYS)  # glibc then takes clone, whose flags a filter can read
    if not network:
        program += refuse(number(_SOCKET))
    if not programs:
        program += unless(number(_CLONE), 0, _IF_ANY_BIT, 0x10000)  # a thread, not a process
    program += unless(number(_KILL), 0, _IF_EQUAL, own)
    program += unless(number(_TGKILL), 0, _IF_EQUAL, own)
    program += _ask_only(number(_PRLIMIT))
    return [*program, (_RETURN, 0, 0, _ALLOW)]


def _ask_only(nr: int | None) -> list[tuple[int, int, int, int]]:
    """prlimit may ask for limits (its third argument, a pointer, is null), not set them."""
    assert nr is not None, "prlimit exists on both machines"
    return [
        (_IF_EQUAL, 0, 6, nr), (_LOAD, 0, 0, 32), (_IF_EQUAL, 0, 3, 0), (_LOAD, 0, 0, 36), (_IF_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM),
    ]  # fmt: skip


def _filter_calls(network: bool, programs: bool = False) -> bool:
    """Install the filter."""
    if platform.machine() not in ("x86_64", "aarch64"):
        return False
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in _program(network, programs))
    buffer = ctypes.create_string_buffer(packed, len(packed))
    header = struct.pack("HxxxxxxQ", len(packed) // 8, ctypes.addressof(buffer))
    return not _libc().prctl(22, 2, header, 0, 0)


# ------------------------------------------------------------------------------------------------- audit hook

_NEVER = {
    "os.fork": "processes", "os.forkpty": "processes", "os.system": "processes", "os.exec": "processes",
    "os.posix_spawn": "processes", "os.spawn": "processes", "pty.spawn": "processes", "subprocess.Popen": "processes",
    "os.killpg": "signals to others", "socket.__new__": "the network", "socket.getaddrinfo": "the network",
    "socket.gethostbyname": "the network", "resource.setrlimit": "its own limits", "resource.prlimit": "its own limits",
}  # fmt: skip
_CHANGING = ("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.chmod", "os.chown", "os.truncate", "os.link",
             "os.symlink", "shutil.rmtree")  # fmt: skip
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def _audit(folder: Path, hidden: tuple[Path, ...]) -> None:
    """Refuse from Python what the parts above refuse from anywhere, with a message that says why."""
    mine, own, closed = os.fspath(folder.resolve()), os.getpid(), tuple(map(os.fspath, hidden))
    absolute, fsdecode, below = os.path.abspath, os.fsdecode, os.path.commonpath

    def outside(path: Any) -> bool:
        return isinstance(path, str | bytes | os.PathLike) and below([absolute(fsdecode(path)), mine]) != mine

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in _NEVER or (event == "os.kill" and args[0] != own):
            raise PermissionError(f"a check may not use {_NEVER.get(event, 'signals to others')}")
        if event == "open" and isinstance(args[0], str | bytes):
            path = absolute(fsdecode(args[0]))
            if any(path == one or path.startswith(one + os.sep) for one in closed):
                raise PermissionError("a check may not read the checks or the solutions")
            if args[2] & _WRITING and path != os.devnull and outside(path):
                raise PermissionError("a check may write in its own folder only")
        elif event in _CHANGING and (outside(args[0]) or (event == "os.rename" and outside(args[1]))):
            raise PermissionError("a check may change its own folder only")

    sys.addaudithook(hook)


# --------------------------------------------------------------------------------------------------- together


def enter(
    folder: Path, *, network: bool, hidden: tuple[Path, ...] = (), programs: bool = False, shared: Path | None = None
) -> None:
    """Give up, for the rest of this process, all that a check does not need. Only the main thread may exist yet.

    Args:
        folder: where it may write.
        network: whether its ranks talk over loopback.
        hidden: folders that it may not read, beside `HIDDEN`.
        programs: whether it may start programs: for our own code that calls a compiler, never for a learner's.
        shared: where its ranks meet.
    """
    sys.dont_write_bytecode = True
    closed = tuple(one for one in (*HIDDEN, *hidden) if one not in _ROOT.parents and one != _ROOT)
    if sys.platform == "linux":
        _hide(closed)
        _libc().prctl(38, 1, 0, 0, 0)  # no new privileges: what the two below ask for
        _write_only_below((folder, Path(os.devnull), *filter(None, [shared])))
        _filter_calls(network, programs)
    if not programs:
        _audit(folder, closed)


def probe(rank: int, world: int, job: dict[str, Any]) -> dict[str, bool]:
    """{what a submission could do here: whether it is prevented}, found out by trying, past the audit hook."""
    libc = _libc()
    target, hidden = Path(job["outside"]), False
    sys.dont_write_bytecode = True
    if sys.platform == "linux":
        hidden = _hide(HIDDEN)
        libc.prctl(38, 1, 0, 0, 0)
        _write_only_below((Path.cwd(), Path(os.devnull)))
        _filter_calls(network=True)
    held = {"read the checks": hidden and not any(HIDDEN[0].glob("*.py"))}
    with socket.socket() as out:
        out.settimeout(1.0)
        try:
            out.connect(("192.0.2.1", 9))  # an address kept free for documentation
            held["reach the network"] = False
        except OSError as error:
            held["reach the network"] = not isinstance(error, TimeoutError)
    try:
        target.write_text("")
        target.unlink()
        held["write outside its folder"] = False
    except OSError:
        held["write outside its folder"] = True
    pid = libc.fork()
    if pid == 0:
        os._exit(0)
    if pid > 0:
        os.waitpid(pid, 0)
    held["start processes"] = pid < 0
    held["signal other processes"] = libc.kill(os.getppid(), 0) != 0
    return held
