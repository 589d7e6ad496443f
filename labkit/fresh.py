"""Run a function in fresh processes, one a rank, and get plain data back: safe, quick, and never waiting for ever.

Learners' code loops, deadlocks, prints, patches torch and calls `os._exit`. It must run where it can break nothing, and
yet `check("...")` must feel instant, while `import torch` alone takes a second or two. Hence a *nursery*: a server
process that imports torch once, has a single thread, and forks a fresh process for every rank of every job.

    notebook or grader ──socket──> nursery (torch imported, one thread, clean environment)
           ^                          │ fork, once a rank
           └────── pipe, JSON ──── rank 0, rank 1, ...   own session, resource limits, own empty folder

* The environment of the ranks is a short white list; their standard output goes nowhere.
* What comes back is one line of JSON a rank (`plain`), read with a limit and a deadline. Never a pickle.
* The deadline runs from the moment all ranks have started. At the end the ranks are asked for their Python stacks, so
  that a hang can be explained line by line; then their process groups are killed. Nothing of a job outlives it.
* If the caller dies, the nursery reads the end of its socket and ends; if the nursery dies, the kernel ends its ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from labkit import plain
from labkit.nursery import Limits
from minimegatron.errors import DeadlineError, MinimegatronError, RankError
from minimegatron.launch import procs
from minimegatron.launch.fork_server import ENVIRONMENT, START_SECONDS, ForkServer, stacks

_LOOK_SECONDS = 0.5  # between two looks at how full the ranks' folder is
_MAX_FILES = 20_000  # in it
# Which instructions torch, oneDNN and MKL may use: an exercise is judged with those that the notebook computes with.
_INSTRUCTIONS = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR")


@dataclasses.dataclass(frozen=True)
class Reply:
    """What became of one rank: an answer, or the reason why there is none.

    Attributes:
        value: the plain data it returned; None without an answer.
        ended: "" with an answer; "late" at the deadline; else how the process ended ("was killed by SIGKILL").
        stack: where a late rank was, the innermost frame first.
        order: position in the order of arrival of the answers.
    """

    value: Any = None
    ended: str = ""
    stack: tuple[procs.Frame, ...] = ()
    order: int = 0


class Nursery:
    """The server that forks. It starts at its first use, or at `warm_up`; `close`, or leaving `with`, ends it."""

    def __init__(self) -> None:
        self._server: ForkServer | None = None
        self._over = False

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def warm_up(self) -> ForkServer:
        """The server; started if it does not run. Returns at once, the imports go on by themselves."""
        if self._over:
            raise RankError("the run was interrupted")
        if self._server is None or self._server.process.poll() is not None:
            self.close()
            self._server = ForkServer("labkit.nursery", environment=_environment(), cwd="/")
        return self._server

    def close(self) -> None:
        """End the server and whatever it runs."""
        if self._server is not None:
            self._server.close(0)
        self._server = None

    def interrupt(self) -> None:
        """From another thread: end the server for good; a `call` under way, and any after it, raise RankError."""
        self._over = True
        if (server := self._server) is not None:
            server.process.kill()

    def call(
        self, function: Callable[..., Any], jobs: Sequence[Any], limits: Limits, *, path: Sequence[str] = ()
    ) -> list[Reply]:
        """Run `function(rank, world, job)` in one fresh process for each job; the replies by rank.

        Args:
            function: a top-level function, found by its name in the new process; it returns plain data, or raises
                `Failed` with some.
            jobs: plain data, one a rank.
            limits: what a rank may use.
            path: put in front of the ranks' `sys.path`.
        Raises:
            RankError: the nursery itself cannot be started or was killed.
            DeadlineError: the nursery did not answer.
        """
        folder = None
        try:
            server = self.warm_up()
            folder = Path(tempfile.mkdtemp(dir=server.folder))
            for rank, job in enumerate(jobs):
                (folder / f"job.{rank}").write_text(plain.dumps(job, most=None))
            order = {
                "function": f"{function.__module__}:{function.__qualname__}",
                "folder": str(folder), "world": len(jobs), "path": list(path), "limits": dataclasses.asdict(limits),
            }  # fmt: skip
            return _run(server, order, limits, folder)
        except TimeoutError:
            self.close()
            raise DeadlineError(f"the process that starts ranks gave no sign for {START_SECONDS:g} s") from None
        except (OSError, ValueError) as error:
            self.close()
            raise RankError(f"the process that starts ranks ended: {error}", fix="run the cell again") from None
        except BaseException:  # an interrupt: leave no process behind
            self.close()
            raise
        finally:
            if folder is not None:
                _remove(folder)


def _run(server: ForkServer, order: dict[str, Any], limits: Limits, folder: Path) -> list[Reply]:
    pids, pipes = list[int](), list[int]()
    try:
        for rank in range(order["world"]):
            read, write = os.pipe()
            pipes.append(read)
            try:
                pids.append(server.fork(write, order={**order, "rank": rank}))
            finally:
                os.close(write)
        answers, late = _read_answers(pipes, limits, folder)
        unanswered = _why_late({rank: pids[rank] for rank in late}, limits, folder)
        statuses = server.end(*pids)
    finally:
        for read in pipes:
            os.close(read)
    return [unanswered.get(rank) or _reply(answers.get(rank), status) for rank, status in enumerate(statuses)]


def _environment() -> dict[str, str]:
    """All that ranks know of the outside: no keys, no tokens, no home."""
    root = str(Path(__file__).resolve().parents[1])
    return {
        **{name: os.environ[name] for name in _INSTRUCTIONS if name in os.environ},
        "PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8", "PYTHONPATH": root, "PYTHONHASHSEED": "0",
        **ENVIRONMENT, "OPENBLAS_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "FATAL",
    }  # fmt: skip


def _read_answers(pipes: list[int], limits: Limits, folder: Path) -> tuple[dict[int, tuple[int, bytes]], list[int]]:
    """Per rank that wrote a line (order of arrival, line), b"" if it is too long; and the ranks that were late.

    A rank first writes "+", its sign of life, then one line. The clock starts when all have signed, and ends early when
    the ranks' folder is too full.
    """
    answers: dict[int, tuple[int, bytes]] = {}
    partial = {rank: bytearray() for rank in range(len(pipes))}
    deadline = time.monotonic() + START_SECONDS
    signed: set[int] = set()
    with selectors.DefaultSelector() as selector:
        for rank, pipe in enumerate(pipes):
            selector.register(pipe, selectors.EVENT_READ, rank)
        looked = time.monotonic()
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            if time.monotonic() - looked > _LOOK_SECONDS:
                looked = time.monotonic()
                if _used(folder, limits.disk) > limits.disk:
                    break
            for key, _ in selector.select(min(left, _LOOK_SECONDS)):
                rank, data = key.data, os.read(key.fd, 1 << 20)
                partial[rank] += data
                if data and rank not in signed:
                    signed.add(rank)
                    if len(signed) == len(pipes):
                        deadline = time.monotonic() + limits.seconds
                if len(partial[rank]) > limits.answer:
                    answers[rank] = (len(answers), b"")
                elif partial[rank].endswith(b"\n"):
                    answers[rank] = (len(answers), bytes(partial[rank][1:]))
                if not data or rank in answers:
                    selector.unregister(key.fd)
        late = sorted(key.data for key in selector.get_map().values())
    return answers, late


def _used(folder: Path, enough: int) -> int:
    """Bytes on disk below a folder, counted until there are more than `enough`; too many files are too much."""
    total, files, wanted = 0, 0, [str(folder)]
    while wanted:
        with contextlib.suppress(OSError), os.scandir(wanted.pop()) as entries:
            for entry in entries:
                files += 1
                total += entry.stat(follow_symlinks=False).st_blocks * 512
                wanted += [entry.path] if entry.is_dir(follow_symlinks=False) else []
                if files > _MAX_FILES or total > enough:
                    return max(total, enough + 1)
    return total


def _remove(folder: Path) -> None:
    """Remove what ranks have left, whatever it is."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # closed folders, or a chain of folders deeper than Python's stack
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run([*command, "--", str(folder)], capture_output=True, timeout=60)


def _why_late(late: dict[int, int], limits: Limits, folder: Path) -> dict[int, Reply]:
    """What became of the ranks (rank -> pid) that have not answered and still run."""
    if late and _used(folder, limits.disk) > limits.disk:
        return dict.fromkeys(late, Reply(ended=f"wrote more than {limits.disk >> 20} MiB of files"))
    # The fault handler of each answers SIGABRT with its Python stack.
    found = stacks(late, signal.SIGABRT, lambda rank: _read_text(folder / f"stack.{rank}"), seconds=0.5)
    return {rank: Reply(ended="late", stack=tuple(frames)) for rank, frames in found.items()}


def _read_text(file: Path) -> str:
    """The first bytes of a file; "" when the rank has removed it, or replaced it by something else."""
    with contextlib.suppress(OSError):
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as stream:
            return stream.read(1 << 16).decode(errors="replace")
    return ""


def _reply(answer: tuple[int, bytes] | None, status: int) -> Reply:
    """What a rank that is not late has sent, or how it ended."""
    if answer is None:
        return Reply(ended=procs.how_it_ended(status))
    order, text = answer
    if not text:
        return Reply(ended="sent more than an answer may be")
    try:
        return Reply(value=plain.loads(text), order=order)
    except MinimegatronError as error:
        return Reply(ended=error.what)
