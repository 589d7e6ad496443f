"""The real `torchrun`, in a process that dies with its launcher, listens on loopback, and ends quietly.

    minimegatron torchrun --standalone --nproc-per-node=4 script.py

takes the arguments of `torchrun`, calls the function behind `torchrun`, and differs in what is around it:

| plain `torchrun`                                        | here                                                   |
|---------------------------------------------------------|--------------------------------------------------------|
| survives the death of the process that started it       | gets SIGHUP then, and passes it on to the ranks        |
| its key-value stores listen on all interfaces           | on 127.0.0.1, with `--standalone`                      |
| Ctrl-C: SIGINT to ranks that may block in C; tracebacks | SIGTERM, which ends those too; 130, silent             |
| daemons of ranks outlive the job                        | are adopted, and ended with it                         |
| leaves a folder of logs in the temporary folder         | removes it (`--log-dir` is kept)                       |
| a failed rank: a table of 15 lines, exit status 1       | "rank 1 was killed by SIGKILL" (an exception has been  |
|                                                         | printed by its rank); the rank's status, or 5          |

What happened to which rank is also written to `agent.json` in the run directory, for `ranks/torchrun`.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
import tempfile
import time
import uuid
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from labkit.ranks import early
from minimegatron.launch import procs
from minimegatron.launch.procs import AGENT, RUN_DIR

LAUNCHER = "MINIMEGATRON_LAUNCHER"  # pid of the process that must outlive us
TOKEN = "MINIMEGATRON_RUN"  # marks every process of one launch
FORK = "--fork-ranks"  # our own option, the first one
INTERRUPTED = 128 + signal.SIGINT
OUR_STATUSES = (2, 3, 4, 5, 6, 7, INTERRUPTED)  # see `minimegatron.errors`


@dataclasses.dataclass
class RankEnd:
    """How a rank that failed has ended.

    Attributes:
        returncode: exit status, or minus a signal.
        message, traceback: of its exception, if it left one.
        time: time of the end, seconds since the epoch.
    """

    rank: int
    returncode: int
    message: str = ""
    traceback: str = ""
    time: int = 0


def main(argv: list[str]) -> int:
    """`torchrun` with these arguments; the exit status.

    Args:
        argv: with `FORK` in front of them ranks are forked (`ranks/early`); then `--nproc-per-node` is a number.
    """
    fork = argv[:1] == [FORK]
    signal.signal(
        signal.SIGINT, lambda *_: os._exit(INTERRUPTED)
    )  # until torch sets its own; an import may swallow one
    if launcher := os.environ.get(LAUNCHER):
        procs.die_with_parent(signal.SIGHUP, int(launcher))
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    procs.adopt_orphans()
    os.environ[AGENT] = str(os.getpid())
    os.environ.setdefault(TOKEN, uuid.uuid4().hex)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    gc.disable()  # while it imports, of which it takes a quarter
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    args = run.parse_args(argv[fork:])
    if fork:
        early.hand_out(int(args.nproc_per_node) * (1 + args.max_restarts), args.training_script)
    gc.enable()
    signals = _quiet_signals()
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    if args.standalone:
        _listen_on_loopback()
    logs = tempfile.TemporaryDirectory(prefix="minimegatron-")  # torchrun leaves the folder that it makes
    args.log_dir = args.log_dir or logs.name
    try:
        run.run(args)
    except ChildFailedError as error:
        return _report([_rank_end(rank, failure) for rank, failure in error.failures.items()])
    except SignalException:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return 128 + signals[0]
    finally:
        # What the ranks have started: loaders, compilers, daemons.
        end_marked(f"{TOKEN}={os.environ[TOKEN]}")
        procs.end_descendants()
        logs.cleanup()
    return 0


def serve(sock: socket.socket, folder: str, argv: list[str]) -> NoReturn:
    """As a fork of the trunk: `python -m labkit.ranks.agent`, with what `torchrun.ENVIRONMENT` says to Python."""
    sock.close()
    faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    for name in (TOKEN, RUN_DIR):
        mark(f"{name}={os.environ[name]}")
    early.leave(main(argv))


def mark(token: str) -> None:
    """Let `marked` find this process and its forks, whose `/proc/PID/environ` is that of the trunk."""
    os.memfd_create(token[:200])


def first(ends: list[RankEnd]) -> RankEnd:
    """The end that caused the others: not one that our SIGTERM caused; the earliest; one with a message."""
    return min(ends, key=lambda e: (e.returncode == -signal.SIGTERM, e.time, not e.message))


def _report(ends: list[RankEnd]) -> int:
    if folder := os.environ.get(RUN_DIR):
        Path(folder, "agent.json").write_text(json.dumps([dataclasses.asdict(e) for e in ends]))
    cause = first(ends)
    if cause.returncode < 0:
        print(f"rank {cause.rank} {procs.how_it_ended(cause.returncode)}", file=sys.stderr)
    return cause.returncode if cause.returncode in OUR_STATUSES else 5


def _rank_end(rank: int, failure: Any) -> RankEnd:
    written = failure.error_file_data.get("message")
    if not isinstance(written, dict):  # the rank left no error file, or not in the format of `launch/error_report`
        return RankEnd(rank, failure.exitcode, time=failure.timestamp)
    return RankEnd(rank, failure.exitcode, written["message"], written["extraInfo"]["py_callstack"], failure.timestamp)


def _quiet_signals() -> list[int]:
    """Make torch's launcher end the ranks by SIGTERM also when it gets SIGINT; returns the list of received signals."""
    from torch.distributed.elastic.multiprocessing import api

    received: list[int] = []

    def handler(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        pass_on = signal.SIGTERM if signum == signal.SIGINT else signal.Signals(signum)
        raise api.SignalException(f"received {signal.Signals(signum).name}", pass_on)

    api._terminate_process_handler = handler
    return received


def _listen_on_loopback() -> None:
    """Give the stores of torch's launcher a socket that is bound to 127.0.0.1 already."""
    import torch.distributed as dist
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend

    class LoopbackStore(dist.TCPStore):
        def __init__(self, host_name: str, port: int, *, is_master: bool = False, **kwargs: Any) -> None:
            if is_master:
                kwargs.pop("multi_tenant", None)
                listener = socket.create_server(("127.0.0.1", port))
                host_name, port = listener.getsockname()
                kwargs.update(master_listen_fd=listener.detach(), wait_for_workers=False)
            super().__init__(host_name, port, is_master=is_master, **kwargs)

    dist.TCPStore = LoopbackStore  # type: ignore[assignment, misc]
    c10d_rendezvous_backend.TCPStore = LoopbackStore  # type: ignore[assignment, misc]


def marked(token: str) -> set[int]:
    """Pids of all processes, but this one, that were started with `token` in their environment, or have its `mark`."""
    return {int(entry.name) for entry in Path("/proc").glob("[0-9]*") if _bears(entry, token)} - {os.getpid()}


def _bears(process: Path, token: str) -> bool:
    try:
        if token.encode() in (process / "environ").read_bytes():
            return True
        return any(os.readlink(fd).startswith(f"/memfd:{token[:200]}") for fd in (process / "fd").iterdir())
    except OSError:  # gone, or another user's
        return False


def end_marked(token: str, seconds: float = 5.0) -> None:
    """SIGKILL every process that carries the token, and return when none is left or the time is over."""
    deadline = time.monotonic() + seconds
    while (pids := marked(token)) and time.monotonic() < deadline:
        for pid in pids:
            procs.send(pid, signal.SIGKILL)
        time.sleep(0.02)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
