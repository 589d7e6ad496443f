"""seccomp: a filter on the calls that this process makes to the kernel, which it cannot take off again.

It sees numbers, not what pointers point to. So it forbids whole calls: to start processes and programs, to look into
others, to send them signals, to open sockets (but for ranks), to hold memory that no limit counts, and to survive its
parent.

Sources: man 2 seccomp; linux/filter.h; the tables of calls of x86_64 and aarch64.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Sequence

# name -> (number on x86_64, on aarch64; None where it does not exist)
_FORBIDDEN: dict[str, tuple[int | None, int | None]] = {
    # processes, and a look into them
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221), "execveat": (322, 281), "ptrace": (101, 117),
    "setpgid": (109, 154), "setsid": (112, 157), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "kcmp": (312, 272),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "setrlimit": (160, 164),
    "process_madvise": (440, 440), "perf_event_open": (298, 241),
    # another root, another user
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "move_mount": (429, 429),
    "open_tree": (428, 428), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "mount_setattr": (442, 442), "chroot": (161, 51), "pivot_root": (155, 41), "open_by_handle_at": (304, 265),
    "setuid": (105, 146), "setgid": (106, 144), "setreuid": (113, 145), "setregid": (114, 143), "setresuid": (117, 147),
    "setresgid": (119, 149), "setfsuid": (122, 151), "setfsgid": (123, 152), "setgroups": (116, 159),
    # memory that is no address space, rings of calls that no filter sees, sockets
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "io_setup": (206, 0), "bpf": (321, 280), "fanotify_init": (300, 262),
    "socket": (41, 198), "socketpair": (53, 199),
    # the machine
    "reboot": (169, 142), "init_module": (175, 105), "finit_module": (313, 273), "keyctl": (250, 219),
    "add_key": (248, 217), "request_key": (249, 218), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "sethostname": (170, 161), "syslog": (103, 116), "acct": (163, 89), "swapon": (167, 224),
}  # fmt: skip
_SOCKETS = ("socket", "socketpair")
_TO_START = ("fork", "vfork", "execve")  # what a compiler needs to call its parts
_CLONE, _CLONE3, _KILL, _TGKILL, _PRLIMIT, _PRCTL = (56, 220), (435, 435), (62, 129), (234, 131), (302, 261), (157, 167)
_ALLOW, _EPERM, _ENOSYS, _KILL_PROCESS = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
_LOAD, _IF_EQUAL, _IF_ANY_BIT, _IF_ABOVE, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06

Instruction = tuple[int, int, int, int]  # code, jump if true, jump if false, constant


def restrict(*, programs: bool, sockets: bool) -> bool:
    """Forbid the calls.

    Args:
        programs: whether programs may be started.
        sockets: whether sockets may be opened.

    Returns:
        Whether the kernel has it.
    """
    program = [*_head(), *_program(programs, sockets), (_RETURN, 0, 0, _ALLOW)]
    return _install(program) if platform.machine() in ("x86_64", "aarch64") else False


def refuse(*names: str) -> bool:
    """Refuse these calls, as a kernel would that does not allow them. For tests: another machine on this one."""
    numbers = [_number(_FORBIDDEN[name]) for name in names]
    return _install([*_head(), *(one for nr in numbers for one in _refuse(nr)), (_RETURN, 0, 0, _ALLOW)])


def _head() -> list[Instruction]:
    intel = platform.machine() == "x86_64"
    head = [(_LOAD, 0, 0, 4), (_IF_EQUAL, 1, 0, 0xC000003E if intel else 0xC00000B7), (_RETURN, 0, 0, _KILL_PROCESS)]
    head += [(_LOAD, 0, 0, 0)]
    if intel:  # the same calls under the numbers of another convention
        head += [(_IF_ABOVE, 0, 1, 0x40000000), (_RETURN, 0, 0, _EPERM)]
    return head


def _refuse(nr: int | None, answer: int = _EPERM) -> list[Instruction]:
    return [] if nr is None else [(_IF_EQUAL, 0, 1, nr), (_RETURN, 0, 0, answer)]


def _number(pair: tuple[int | None, int | None]) -> int | None:
    return pair[0 if platform.machine() == "x86_64" else 1]


def _program(programs: bool, sockets: bool) -> list[Instruction]:
    own, program = os.getpid(), list[Instruction]()
    allowed = (*(_TO_START if programs else ()), *(_SOCKETS if sockets else ()))
    for name, pair in _FORBIDDEN.items():
        program += [] if name in allowed else _refuse(_number(pair))
    program += _refuse(_number(_CLONE3), _ENOSYS)  # glibc then takes clone, whose flags a filter can read
    if not programs:
        program += _unless(_CLONE, _IF_ANY_BIT, 0x10000)  # a thread, not a process
    program += _unless(_KILL, _IF_EQUAL, own)
    program += _unless(_TGKILL, _IF_EQUAL, own)
    program += _when(_PRCTL, _IF_EQUAL, [1])  # PR_SET_PDEATHSIG: it ends with its parent
    return program + _ask_only(_PRLIMIT)


def _unless(pair: tuple[int, int], test: int, value: int) -> list[Instruction]:
    """Refuse the call, unless the low word of its first argument passes the test."""
    nr = pair[0 if platform.machine() == "x86_64" else 1]
    return [
        (_IF_EQUAL, 0, 4, nr), (_LOAD, 0, 0, 16), (test, 0, 1, value), (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM)
    ]  # fmt: skip


def _when(pair: tuple[int, int], test: int, values: Sequence[int]) -> list[Instruction]:
    """Refuse the call if the low word of its first argument passes the test with one of the values."""
    nr, tests = pair[0 if platform.machine() == "x86_64" else 1], list[Instruction]()
    for value in values:
        tests += [(test, 0, 1, value), (_RETURN, 0, 0, _EPERM)]
    body = [(_LOAD, 0, 0, 16), *tests, (_RETURN, 0, 0, _ALLOW)]
    return [(_IF_EQUAL, 0, len(body), nr), *body]


def _ask_only(pair: tuple[int, int]) -> list[Instruction]:
    """prlimit may ask for limits (its third argument, a pointer, is null), not set them."""
    nr = pair[0 if platform.machine() == "x86_64" else 1]
    return [
        (_IF_EQUAL, 0, 6, nr), (_LOAD, 0, 0, 32), (_IF_EQUAL, 0, 3, 0), (_LOAD, 0, 0, 36), (_IF_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _EPERM),
    ]  # fmt: skip


def _install(program: list[Instruction]) -> bool:
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(packed, len(packed))
    header = struct.pack("HxxxxxxQ", len(packed) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(38, 1, 0, 0, 0)  # no new privileges, without which only root may set a filter
    return not libc.prctl(22, 2, header, 0, 0)
