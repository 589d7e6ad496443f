"""Landlock: from now on this process, and whatever it starts, reads, writes and runs only below the folders named.

It needs no privileges, since Linux 5.13, in most containers too. Where a process has a root of its own (`namespaces`)
this is the second line; where it has none, the first. It does not forbid to change modes, times and attributes of
files (`seccomp` does) nor to ask whether a file exists.

| version | since      | can forbid as well                                      |
|---------|------------|---------------------------------------------------------|
| 1       | Linux 5.13 | reading, running, making, removing, writing             |
| 2, 3    | 5.19, 6.2  | moving into other folders; cutting files                |
| 4       | 6.7        | TCP connections                                         |
| 5       | 6.10       | ioctl on devices                                        |
| 6       | 6.12       | abstract UNIX sockets and signals to processes outside  |

Sources: man 7 landlock; linux/landlock.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from collections.abc import Iterable, Iterator
from typing import Any

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_CHANGES = sum(1 << bit for bit in (1, 4, 5, 6, 7, 8, 9, 10, 11, 12))  # write, remove, make each kind of file
_REFER, _TRUNCATE, _IOCTL_DEV = 1 << 13, 1 << 14, 1 << 15
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV


def version() -> int:
    """Landlock's version; 0 if the kernel has none."""
    return max(0, _libc().syscall(_CREATE_RULESET, None, 0, 1))


def restrict(read: Iterable[str], write: Iterable[str], hidden: Iterable[str], *, run: bool, connect: bool) -> bool:
    """Forbid all other files; and, if the kernel can, all connections.

    Args:
        read: may be read; with `run` also executed.
        write: may be read, and changed in every way.
        hidden: folders below those of `read` whose files may not be read.
        run: whether what may be read may be executed.
        connect: whether TCP connections stay allowed.

    Returns:
        Whether the kernel has Landlock.
    """
    libc, known = _libc(), version()
    if known < 1:
        return False
    libc.prctl(38, 1, 0, 0, 0)  # no new privileges, without which only root may restrict itself
    change = _CHANGES | (_REFER if known >= 2 else 0) | (_TRUNCATE if known >= 3 else 0)
    look = _READ_FILE | _READ_DIR | (_EXECUTE if run else 0)
    files = change | _EXECUTE | _READ_FILE | _READ_DIR | (_IOCTL_DEV if known >= 5 else 0)
    attributes = struct.pack("QQQ", files, 3 if known >= 4 and not connect else 0, 3 if known >= 6 else 0)
    size = 8 if known < 4 else 16 if known < 6 else 24
    rules = libc.syscall(_CREATE_RULESET, attributes, size, 0)
    if rules < 0:
        return False
    for path, rights in _rights(read, look, list(hidden)):
        _allow(libc, rules, path, rights)
    for path in write:
        _allow(libc, rules, path, look | change)
    failed = libc.syscall(_RESTRICT_SELF, rules, 0)
    os.close(rules)
    return not failed


def _rights(paths: Iterable[str], look: int, hidden: list[str]) -> Iterator[tuple[str, int]]:
    """(Path, rights) of each rule. A rule applies to everything below its folder, so a folder that contains a hidden
    one is replaced by its entries."""
    for path in paths:
        real = os.path.realpath(path)
        if not any(one == real or one.startswith(real.rstrip(os.sep) + os.sep) for one in hidden):
            yield path, look
        elif real not in hidden and os.path.isdir(real):
            yield path, _READ_DIR  # names of files, not what is in them
            with contextlib.suppress(OSError):
                yield from _rights([os.path.join(real, name) for name in os.listdir(real)], look, hidden)


def _allow(libc: Any, rules: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    mine = rights if os.path.isdir(path) else rights & _OF_FILES
    libc.syscall(_ADD_RULE, rules, 1, struct.pack("=Qi", mine, descriptor), 0)
    os.close(descriptor)


def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return libc
