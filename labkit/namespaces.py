"""A root file system and a network of its own for a learner's process.

The problem in a sentence: a list of what is forbidden is never complete (`.git`, another learner's notebook, a command
line in `/proc`, a socket of the host), so a learner's process gets a root folder in which there is almost nothing.

    /usr/lib, /lib, the interpreter's lib, site-packages   as outside, read-only
    minimegatron/, labkit/ of this checkout                as outside, read-only; nothing else of it
    /dev/null, zero, random, urandom                       as outside; their modes and times cannot be changed
    /cell                                                  empty, of limited size, its own
    /ranks                                                 empty, of all ranks of its job; nothing else exists

It is a tmpfs with bind mounts, made by each process for itself in a mount namespace (2 ms), which it then enters with
`pivot_root`; the old root is detached. There is no `/proc`, so other processes are not visible. Files count
against the size of the tmpfs also when they have no name any more, and are gone with the process.

A process without privileges gets a user namespace first, in which it may mount. Not every machine allows that:
`begin` tries all of it in a child, and returns whether it works. If it does not, an audit hook alone says no.

Sources: man 7 mount_namespaces, 7 user_namespaces, 2 pivot_root ("pivot_root(".", ".")"), 2 mount_setattr, 5 tmpfs.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

HOME = "/cell"
SHARED = "/ranks"  # the folder that all ranks of a job see
MAX_FILES = 20_000
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

_NEWNS, _NEWUSER, _NEWNET = 0x20000, 0x10000000, 0x40000000
_READ_ONLY, _NO_SUID, _NO_DEVICES, _REMOUNT, _BIND, _RECURSIVE, _PRIVATE = 1, 2, 4, 32, 4096, 16384, 1 << 18
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR = 442
_LIBC = ctypes.CDLL(None, use_errno=True)  # made once: 40 calls a process, and each new handle makes classes


def begin(paths: Sequence[str], scratch: str) -> bool:
    """Move this process, which must have one thread, into namespaces in which its children can make their own root.

    Tried in a child first: a kernel that allows half of it would leave us with nothing that works.

    Args:
        paths: as for `own_root`.
        scratch: an empty folder.

    Returns:
        Whether that was possible. The process itself still sees all files, and no network.
    """
    if sys.platform != "linux" or os.uname().machine not in _PIVOT_ROOT:
        return False

    def all_of_it() -> None:
        _unshare(_NEWNET)
        _loopback()
        own_root(paths, (), scratch, 1 << 20)

    if not _works(all_of_it):
        return False
    _unshare(_NEWNET)
    _loopback()
    return True


def without_network() -> bool:
    """Only leave the network, for a kernel that does not allow the rest."""
    if sys.platform != "linux" or not _works(lambda: _unshare(_NEWNET)):
        return False
    _unshare(_NEWNET)
    _loopback()
    return True


def _loopback() -> None:
    """Set up the loopback interface of a new network, the only one that it has: ranks meet there."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP


def has_own_users() -> bool:
    """Whether this process is in a user namespace of one user, in which the kernel counts its processes apart."""
    try:
        return Path("/proc/self/uid_map").read_text().split()[2] == "1"
    except (OSError, IndexError):
        return False


def own_root(
    paths: Iterable[str], hidden: Iterable[str], scratch: str, size: int, shared: str = "", given: Iterable[str] = (),
) -> None:  # fmt: skip
    """Give this process a root folder of its own; its working directory is then `HOME`, which is empty.

    Args:
        paths: files and folders to be there, read-only; those that do not exist are left out.
        hidden: folders and files below them that are empty, but for what is `given`.
        scratch: an empty folder; the new root is put there.
        size: bytes of all files that it may write.
        shared: a folder that is there as `SHARED`, to be written in; "" for none.
        given: files and folders in hidden ones that are there, read-only.
    Raises:
        OSError: the kernel does not allow it.
    """
    _call("unshare", _NEWNS)
    _mount(None, "/", None, _PRIVATE | _RECURSIVE)
    _mount("none", scratch, "tmpfs", _NO_SUID | _NO_DEVICES, f"size=1m,nr_inodes={MAX_FILES},mode=755")
    shown: list[str] = []
    for path in sorted(map(os.path.normpath, paths), key=len):
        if os.path.lexists(path) and not _below(path, shown):
            _show(path, scratch + path)
            shown += [] if os.path.islink(path) else [path]
    covered: list[str] = []
    for path in sorted(map(os.path.normpath, hidden), key=len):
        if _below(path, covered):
            continue
        if _below(path, shown) and os.path.isdir(path):
            _mount("none", scratch + path, "tmpfs", _NO_SUID | _NO_DEVICES, "size=4k,mode=755")
            for one in given:
                if _below(one, [path]):
                    _show(one, scratch + one)
            _mount(None, scratch + path, None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES)
            covered.append(path)
        elif _below(path, shown) and os.path.isfile(path):
            _mount(os.devnull, scratch + path, None, _BIND)
            _protect(scratch + path, 0)
    os.makedirs(scratch + HOME)
    quota = f"size={size},nr_inodes={MAX_FILES},mode=777"
    _mount("none", scratch + HOME, "tmpfs", _NO_SUID | _NO_DEVICES, quota)
    if shared:
        os.makedirs(scratch + SHARED)
        _mount(shared, scratch + SHARED, None, _BIND)
    _mount(None, scratch, None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | _NO_DEVICES)
    os.chdir(scratch)
    _call("syscall", _PIVOT_ROOT[os.uname().machine], b".", b".")
    _call("umount2", b".", 2)  # MNT_DETACH: the old root, which now lies over the new one
    os.chdir(HOME)


def _below(path: str, folders: Iterable[str]) -> bool:
    return any(path == one or path.startswith(one + os.sep) for one in folders)


def _show(path: str, there: str) -> None:
    os.makedirs(os.path.dirname(there), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), there)
        return
    if os.path.isdir(path):
        os.makedirs(there, exist_ok=True)
    else:
        os.close(os.open(there, os.O_CREAT | os.O_WRONLY, 0o444))
    _mount(path, there, None, _BIND | _RECURSIVE)
    _protect(there, 0 if path in DEVICES else _NO_DEVICES)


def _protect(there: str, devices: int) -> None:
    """Make a mount and those below it read-only, which a user namespace may do without knowing their other flags.

    A device that is read-only can still be written to: what cannot be changed is its mode and its times.
    """
    attributes = struct.pack("QQQQ", _READ_ONLY | _NO_SUID | devices, 0, 0, 0)
    try:
        _call("syscall", _MOUNT_SETATTR, -100, os.fsencode(there), 0x8000, attributes, len(attributes))
    except OSError:  # before Linux 5.12
        kept = os.statvfs(there).f_flag & 0xF
        _mount(None, there, None, _REMOUNT | _BIND | _READ_ONLY | _NO_SUID | devices | kept)


def _unshare(what: int) -> None:
    uid, gid, libc = os.getuid(), os.getgid(), ctypes.CDLL(None)
    if libc.unshare(what) == 0 and _works(lambda: _call("unshare", _NEWNS)):
        return
    _call("unshare", _NEWUSER | what)
    Path("/proc/self/setgroups").write_text("deny")  # before any file is made: it would belong to no user
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind)]
    _call("mount", *words, flags, None if data is None else data.encode())


def _call(name: str, *arguments: Any) -> int:
    function = getattr(_LIBC, name)
    function.restype = ctypes.c_long if name == "syscall" else ctypes.c_int
    result = function(*(ctypes.c_long(one) if isinstance(one, int) else one for one in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")
    return int(result)


def _works(function: Callable[[], object]) -> bool:
    """Whether it raises nothing, tried in a child."""
    if (child := os.fork()) == 0:
        try:
            function()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0
