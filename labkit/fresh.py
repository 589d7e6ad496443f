"""Run a function in fresh processes, one a rank, and get plain data back: safe, quick, and never waiting for ever.

Learners' code loops, deadlocks, prints, patches torch and calls `os._exit`. It must run where it can break nothing, and
yet `check("...")` must feel instant, while `import torch` alone takes a second or two. Hence a *nursery*: a server
process that has torch from the trunk (`ranks/fork_server`) and a single thread, and forks a fresh process for every
rank of every job.

    notebook or grader ──socket──> nursery (torch imported, one thread, clean environment)
           ^                          │ fork, once a rank
           └────── pipe, JSON ──── rank 0, rank 1, ...   own session, resource limits, own empty folder, own job

* The environment of the ranks is a short white list; their standard output goes nowhere.
* What comes back is one line of JSON a rank (`plain`), read with a limit and a deadline. Never a pickle.
* The deadline runs from the moment all ranks have started. Ranks that all wait, and use no processor, wait for each
  other: they are not waited for. Those that give no answer are asked for their Python stacks, so that a hang can be
  explained line by line; then their process groups are killed. Nothing of a job outlives it.
* If the caller dies, the nursery reads the end of its socket and ends; if the nursery dies, the kernel ends its ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from labkit import plain
from labkit.nursery import Limits
from labkit.ranks.fork_server import START_SECONDS, ForkServer
from labkit.replies import Answers, Process, Reply, ends, held, processor, used
from labkit.sandbox import THREADS
from minimegatron.errors import DeadlineError, RankError

_LOOK_SECONDS = 0.5  # between two looks at how full the ranks' folder is
_STILL_SECONDS = 2.5  # in which ranks that wait for each other use no processor
_IDLE_SECONDS = 0.001  # of processor, between two looks


class Nursery:
    """The server that forks. It starts at its first use, or at `warm_up`; `close`, or leaving `with`, ends it.

    Args:
        without: system calls that are refused to it, as on another machine; for tests.
    """

    def __init__(self, without: Sequence[str] = ()) -> None:
        self._without = without
        self._server: ForkServer | None = None
        self._over = False

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def warm_up(self) -> ForkServer:
        """The server; started if it does not run. Returns at once, imports continue in the background."""
        if self._over:
            raise RankError("the run was interrupted")
        if self._server is None or self._server.process.poll() is not None:
            self.close()
            self._server = ForkServer("labkit.nursery", *self._without)
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
        self, function: Callable[..., Any], jobs: Sequence[Any], limits: Limits, *, path: Sequence[str] = (),
    ) -> list[Reply]:  # fmt: skip
        """Run `function(rank, world, job)` in one fresh process for each job; the replies by rank.

        Args:
            function: a top-level function, found by its name in the new process; it returns plain data, or raises
                `Failed` with some; a generator's values arrive as a list, as far as it came.
            jobs: plain data, one a rank. A rank gets its own only.
            limits: what a rank may use.
            path: put in front of the processes' `sys.path`.
        Raises:
            RankError: the nursery itself cannot be started or was killed.
            DeadlineError: the nursery did not answer.
        """
        with self._job(limits, path) as job:
            return job.run(function, jobs)

    def confer(
        self, function: Callable[..., Any], job: Any, limits: Limits, between: Callable[[Any], Any], *,
        path: Sequence[str] = (),
    ) -> Reply:  # fmt: skip
        """Run `function(control, job)` of the judge's own in a fresh process that asks a question meanwhile.

        Args:
            between: called with the question (`plain.confer`), returns the answer; it may `call`.
            limits: its time counts before the question and after the answer, not while `between` runs.
        Raises:
            RankError, DeadlineError: as `call`; and what `between` raises.
        """
        with self._job(limits, path) as here:
            return here.confer(function, job, between)

    @contextlib.contextmanager
    def _job(self, limits: Limits, path: Sequence[str]) -> Iterator[_Job]:
        """A job; at the end its processes are dead and its folder is removed."""
        folder = None
        try:
            server = self.warm_up()
            folder = Path(tempfile.mkdtemp(dir=server.folder))
            job = _Job(server, folder, limits, path)
            with job.processes:
                yield job
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


class _Job:
    """One call: its processes, from the first fork to the last death."""

    def __init__(self, server: ForkServer, folder: Path, limits: Limits, path: Sequence[str]) -> None:
        self.server, self.folder, self.limits = server, folder, limits
        (folder / "shared").mkdir()
        self.order = {"path": list(path), "limits": dataclasses.asdict(limits), "shared": str(folder / "shared")}
        self.started: list[Process] = []
        self.processes = contextlib.ExitStack()

    def run(self, function: Callable[..., Any], jobs: Sequence[Any]) -> list[Reply]:
        for rank, job in enumerate(jobs):
            self._start(function, job, (), rank=rank, world=len(jobs))
        return self._answers()

    def _answers(self) -> list[Reply]:
        answers = Answers([process.answer for process in self.started], self.limits.answer)
        self.processes.callback(answers.close)
        wrong = self._watch(answers)
        return ends(self.server, self.started, answers, *wrong)

    def confer(self, function: Callable[..., Any], job: Any, between: Callable[[Any], Any]) -> Reply:
        control, far = socket.socketpair()
        self.processes.callback(control.close)
        with far:
            self._start(function, job, [far], rank=None, world=1)
        control.settimeout(START_SECONDS + self.limits.seconds)
        try:
            question = plain.receive(control)
        except OSError:  # it has ended or is late, as its reply will say
            return self._answers()[0]
        given = between(question)
        with contextlib.suppress(OSError):
            plain.send(control, given)
        return self._answers()[0]

    def _start(
        self, function: Callable[..., Any], job: Any, sockets: Sequence[socket.socket], rank: int | None, world: int
    ) -> None:
        name = f"{function.__module__}:{function.__qualname__}"
        folder = str(self.folder / f"rank.{rank}")
        order = {**self.order, "function": name, "folder": folder, "rank": rank, "world": world}
        process = Process(self.server, order, job, [one.fileno() for one in sockets])
        self.processes.callback(process.close)
        self.started.append(process)

    def _watch(self, answers: Answers) -> tuple[dict[int, str], bool]:
        """Read until all ranks have answered, ended, or are late; {rank: the limit that it has exceeded}, and whether
        those that have not answered only wait.

        The clock starts when all processes have given a sign of life.
        """
        deadline, looked, running = time.monotonic() + START_SECONDS, time.monotonic(), False
        still: dict[int, tuple[float, float]] = {}  # rank -> (seconds of processor, since when it has not used more)
        while answers.waiting and (left := deadline - time.monotonic()) > 0:
            if time.monotonic() - looked > _LOOK_SECONDS:
                looked = time.monotonic()
                if self.server.process.poll() is not None:
                    raise ConnectionError("it was killed")
                if self._too_much():
                    break
                if running and self._all_wait(answers.waiting, still):
                    return {}, True
            answers.read(min(left, _LOOK_SECONDS))
            if not running and len(answers.started) == len(self.started):
                running, deadline = True, time.monotonic() + self.limits.seconds
        why = self._too_much()  # also when all have answered: each still holds what it has taken
        return dict.fromkeys(range(len(self.started)), why) if why else {}, False

    def _all_wait(self, waiting: Collection[int], still: dict[int, tuple[float, float]]) -> bool:
        """Whether each of these ranks has slept for `_STILL_SECONDS`: then it waits for one that never answers."""
        now = time.monotonic()
        for rank in waiting:
            sleeps, used = processor(self.started[rank].pid)
            before, since = still.get(rank, (-1.0, now))
            idle = sleeps and used - before < _IDLE_SECONDS
            still[rank] = used, since if idle else now
        return all(now - still[rank][1] > _STILL_SECONDS for rank in waiting)

    def _too_much(self) -> str:
        """The limit that the ranks have exceeded, in words, or ""."""
        unnamed, threads = zip(*(held(process.pid) for process in self.started), strict=True)
        if used(self.folder, self.limits.disk) + sum(unnamed) > self.limits.disk:
            return f"wrote more than {self.limits.disk >> 20} MiB of files"
        return f"started more than {THREADS} threads" if max(threads) > THREADS else ""


def _remove(folder: Path) -> None:
    """Remove everything that ranks have left."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():  # closed folders, or a chain of folders deeper than Python's stack
        for command in (["chmod", "-R", "u+rwx"], ["rm", "-rf"]):
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run([*command, "--", str(folder)], capture_output=True, timeout=60)
