"""What the child of `limited` runs: it gives up all that an answer does not need, and then executes the answer.

| what is given up                    | by                                          | from then on            |
|-------------------------------------|---------------------------------------------|-------------------------|
| other processes, signals to them    | a PID namespace, of which it is the first   | what it starts ends too |
| networks                            | a network namespace without an interface    | nothing is reached      |
| to change a file, or its mode       | a mount namespace, read-only                | EROFS                   |
| to read files, but Python's library | Landlock                                    | EACCES                  |
| processes and threads               | RLIMIT_NPROC 0, by a user who is not root   | EAGAIN                  |
| time, memory, files, dumps          | RLIMIT_CPU, _AS, _FSIZE, _NOFILE, _CORE     | SIGKILL, MemoryError, . |

The script is started by its path in an interpreter of its own, with no environment, and imports nothing of this
package. It reads {"code", "name", "calls", "memory", "seconds"} from its standard input, and writes a line of JSON for
each call: {"value": ...} or {"error": ...}. It is not told what the right values are, so an answer that writes such
lines itself has to know them.

Sources: man 7 landlock, 7 pid_namespaces, 7 user_namespaces, 2 mount_setattr, 2 setrlimit.
"""

from __future__ import annotations

import copy
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import sysconfig
from typing import Any

LIBC = ctypes.CDLL(None, use_errno=True)
NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x20000, 0x8000000, 0x10000000, 0x20000000, 0x40000000
NOBODY = 65534
FULLY = 97  # exit status: the kernel does not give all of it up


def call(name: str, *arguments: Any) -> int:
    """A function of libc that returns -1 for an error.

    Raises:
        OSError: it did.
    """
    found: int = getattr(LIBC, name)(*arguments)
    if found < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name} {arguments[0]!r}: {os.strerror(error)}")
    return found


def leave_all() -> None:
    """Leave processes, networks and writable files, in the child of a fork whose parent waits for it."""
    apart = NEWNS | NEWIPC | NEWPID | NEWNET
    as_root = os.geteuid() == 0
    call("unshare", apart if as_root else apart | NEWUSER)
    call("mount", b"none", b"/", None, ctypes.c_ulong(1 << 18 | 1 << 14), None)  # private, recursive
    read_only = struct.pack("QQQQ", 1 | 2 | 4, 0, 0, 0)  # no set-user-id, no devices
    call("syscall", 442, -100, b"/", 0x8000, read_only, ctypes.c_size_t(len(read_only)))  # mount_setattr, recursive
    if as_root:  # whose processes are not counted; files are read by the effective user, which stays
        os.setresuid(NOBODY, -1, -1)
    if (pid := os.fork()) != 0:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGKILL))  # of `limited`, at the deadline
        _, status = os.waitpid(pid, 0)  # no deadline: see above
        code = os.waitstatus_to_exitcode(status)
        os._exit(code if code >= 0 else 128 - code)
    call("prctl", 1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def read_alone(folders: list[str]) -> None:
    """Read files below these folders, and no others (Landlock)."""
    call("prctl", 38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    version = call("syscall", 444, None, ctypes.c_size_t(0), 1)
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    rules = struct.pack("QQQ", files, 3, 3)[: 8 if version < 4 else 16 if version < 6 else 24]  # TCP; signals, sockets
    ruleset = call("syscall", 444, rules, ctypes.c_size_t(len(rules)), 0)
    for folder in filter(os.path.isdir, folders):
        opened = os.open(folder, os.O_PATH | os.O_CLOEXEC)
        call("syscall", 445, ruleset, 1, struct.pack("=Qi", 1 << 2 | 1 << 3, opened), 0)  # read files, and folders
        os.close(opened)
    call("syscall", 446, ruleset, 0)
    os.close(ruleset)


def limit(memory: int, seconds: int) -> None:
    """The limits of this process."""
    for which, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 32),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(which, (most, most))
    call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))


def main() -> None:
    """Read the task, give up everything, execute it."""
    task = json.loads(sys.stdin.buffer.read())
    out, nothing = os.dup(1), os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)
    try:
        paths = sysconfig.get_paths()
        leave_all()
        read_alone([paths["stdlib"], paths["platstdlib"]])
        limit(task["memory"], task["seconds"])
    except OSError as error:
        os.write(out, json.dumps({"unlimited": str(error)}).encode())
        os._exit(FULLY)

    def say(what: dict[str, Any]) -> None:
        line = json.dumps(what).encode() + b"\n"
        while line:
            line = line[os.write(out, line) :]

    names: dict[str, Any] = {"__name__": "answer"}
    try:
        exec(compile(task["code"], "answer", "exec"), names)  # noqa: S102  the answer, under the limits above
    except BaseException as error:
        say({"error": f"{type(error).__name__}: {error}"[:200]})
        os._exit(1)
    for arguments in task["calls"]:
        try:
            said = {"value": names[task["name"]](*copy.deepcopy(arguments))}
            json.dumps(said)
        except BaseException as error:
            said = {"error": f"{type(error).__name__}: {error}"[:200]}
        say(said)
    os._exit(0)


if __name__ == "__main__":
    main()
