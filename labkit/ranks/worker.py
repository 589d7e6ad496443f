"""A warm rank: runs jobs for a pool (`ranks/pool`), and restores its process between two of them.

Each job gets a default process group of its own over a file (no port to collide with, and no message of an earlier job
can arrive in a later one) and a process that looks as if it had just been started, because a test that passes only
after another test is worse than one that fails::

    parent                                    rank
      |-- job ---------------------------------> join the group, run
      |<------------------------ result or error  (an error leaves the group at once: the peers must not wait)
      |-- release (all have answered) ----------> leave the group, clean up
      |<---------------------- "" or what is dirty

| after a job      |                                                                                                  |
|------------------|--------------------------------------------------------------------------------------------------|
| restored         | random generators, default dtype and device, grad mode, thread count, matmul precision,          |
|                  | determinism, anomaly mode, signal handlers, streams, warning filters, umask; by the next job:    |
|                  | environment, working directory, `sys.path`, process group                                        |
| removed          | the user's modules (not Python's, installed or this package's), which the next job imports anew, |
|                  | but those that it was told to keep; names that were added to `builtins`                          |
| the rank is      | a thread or a process left running, process groups that something still holds (each has a thread |
| replaced after   | that wakes a hundred times a second), a library function replaced, a library module removed, a   |
|                  | global module hook left behind, a trace still recording                                          |

Pickles travel here over a socket pair between a process and its own descendants, never from a file or a network.
"""

from __future__ import annotations

import builtins
import contextlib
import datetime
import faulthandler
import gc
import importlib
import itertools
import mmap
import operator
import os
import pickle
import random
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

import numpy
import torch
import torch.distributed as dist

from labkit.ranks.fork_server import ENVIRONMENT, obey, reap, send
from minimegatron import trace
from minimegatron.comm.async_ops import publish_waiting, set_transport
from minimegatron.comm.fingerprints import fingerprints
from minimegatron.comm.gloo import GlooTransport
from minimegatron.launch import procs
from minimegatron.launch.error_report import is_consequence

RANK_ENVIRONMENT = {
    **ENVIRONMENT,
    "NO_COLOR": "1",
    "TQDM_DISABLE": "1",
}


class Job(NamedTuple):
    """An order for a rank.

    Attributes:
        keeps: how the names of the user's modules begin that stay for the next job.
        call: the pickled (function, arguments), opened after `sys_path` is in place.
    """

    rank: int
    world: int
    store: str
    timeout: float
    fingerprints: bool
    sys_path: list[str]
    cwd: str
    environment: dict[str, str]
    keeps: tuple[str, ...]
    call: bytes


class Failure(NamedTuple):
    """An exception for the parent.

    Attributes:
        name, message: type and text.
        trace: the traceback as Python prints it.
        frame: the innermost line of user code.
        consequence: whether it only says that the connection to another rank was lost.
        error: the pickled exception, or b"" if it cannot be pickled.
    """

    name: str
    message: str
    trace: str
    frame: str
    consequence: bool
    error: bytes


# ------------------------------------------------------------------------------------------------- the server


def serve(sock: socket.socket, folder: str, preload: list[str]) -> None:
    """Import what the trunk has not, say so, then fork ranks until the parent hangs up."""
    gc.disable()
    for name in preload:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # nothing above is ever garbage: collections stay cheap and pages stay shared
    gc.enable()
    send(sock, "ready")
    obey(sock, folder, _become_rank)


def _become_rank(_: None, channel: int, out: int, err: int, page: int) -> NoReturn:
    procs.adopt_orphans()  # so that `CleanState` sees what a job leaves behind
    os.dup2(out, 1)
    os.dup2(err, 2)
    publish_waiting(mmap.mmap(page, 0))
    for fd in (out, err, page):
        os.close(fd)
    live(Connection(channel))


# --------------------------------------------------------------------------------------------------- the rank


def live(channel: Connection) -> NoReturn:
    """Run jobs until the parent hangs up."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # "where are you?"
    torch.set_num_threads(1)
    procs.as_batch_job()
    procs.keep_memory()
    random.seed(0)  # after the fork, where Python has just reseeded it
    numpy.random.seed(0)
    torch.manual_seed(0)
    clean = CleanState()
    while True:
        try:
            job = Job(*pickle.loads(channel.recv_bytes()))  # noqa: S301  from the parent
        except EOFError:
            os._exit(0)
        answer = _run(job, clean)
        channel.send_bytes(answer)
        try:
            channel.recv_bytes()
        except EOFError:
            os._exit(0)
        _leave_group()
        channel.send_bytes(clean.restore(job.keeps).encode())


def _run(job: Job, clean: CleanState) -> bytes:
    """The pickled (result, None) or (None, Failure) of one job."""
    try:
        return pickle.dumps((_call(job, clean), None))
    except BaseException as error:  # SystemExit and KeyboardInterrupt too: the rank itself goes on living
        answer = pickle.dumps((None, _failure(error)))
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the job may have closed or replaced it
                stream.flush()
    _leave_group()  # the peers may be waiting for us: let their calls fail now
    return answer


def _call(job: Job, clean: CleanState) -> Any:
    sys.path[:] = job.sys_path
    os.environ.clear()
    os.environ.update(job.environment, **RANK_ENVIRONMENT)
    os.chdir(job.cwd)
    try:
        _join_group(job)
    except BaseException:
        clean.spoiled = "its process group was never complete"
        raise
    fn, args, kwargs = pickle.loads(job.call)  # noqa: S301  from the parent
    with fingerprints(job.fingerprints):
        return fn(job.rank, job.world, *args, **kwargs)


def _join_group(job: Job) -> None:
    """Build the job's process group, and return when every rank has built it.

    gloo's constructor returns on one rank while others still connect. A job that ends at once would then take its end
    of their connections away. A rank on which that happens counts one group more than the others from then on, names
    the next one differently, and never meets them again: hence `spoiled`.
    """
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(job.store, job.world),
        rank=job.rank,
        world_size=job.world,
        timeout=datetime.timedelta(seconds=job.timeout),
    )
    set_transport(GlooTransport())
    dist.barrier()


def _failure(error: BaseException) -> Failure:
    where = error.__traceback__
    while where is not None and where.tb_frame.f_code.co_filename == __file__:
        where = where.tb_next  # how the job was called is of no interest
    frames = [procs.Frame(f.filename, f.lineno or 0, f.name) for f in reversed(traceback.extract_tb(where))]
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)  # noqa: S301  its own
    except Exception:
        pickled = b""
    return Failure(
        type(error).__name__,
        str(error),
        "".join(traceback.format_exception(type(error), error, where)),
        str(procs.users_frame(frames) or ""),
        is_consequence(error),
        pickled,
    )


def _leave_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        # DTensor keeps the results of its operations by mesh. The next job's mesh is equal to one of this job, whose
        # groups have other names or are gone.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


# ---------------------------------------------------------------------------------------- between two jobs


THREADS = 24  # of the kernel's, more than at the start: a few groups may linger until the next collection


class CleanState:
    """The state of a rank before its first job, to which it is restored.

    Attributes:
        spoiled: why this rank cannot be used again, or "".
    """

    def __init__(self) -> None:
        self.spoiled = ""
        self.modules = dict(sys.modules)
        self.random = (random.getstate(), numpy.random.get_state(), torch.get_rng_state())
        self.signals = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGHUP)}
        self.streams = {name: getattr(sys, name) for name in ("stdin", "stdout", "stderr", "excepthook")}
        self.lists: list[tuple[Any, list[Any]]] = [(x, list(x)) for x in (sys.argv, warnings.filters)]
        self.builtins = set(vars(builtins))
        self.threads, self.tasks = set(threading.enumerate()), _tasks()
        watched = ("builtins", "torch", "torch.distributed", "torch.nn.functional")
        self.functions: dict[str, dict[str, Callable[..., Any]]] = {
            name: {key: value for key, value in vars(module).items() if callable(value)}
            for name, module in sys.modules.items()
            if name in watched or name.startswith("minimegatron.")
        }

    def restore(self, keeps: tuple[str, ...] = ()) -> str:
        """Undo the job's changes to the process.

        Args:
            keeps: see `Job`.

        Returns:
            What could not be undone, or "".
        """
        random.setstate(self.random[0])
        numpy.random.set_state(self.random[1])
        torch.set_rng_state(self.random[2])
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)
        for signum, handler in self.signals.items():
            signal.signal(signum, handler)
        for name, stream in self.streams.items():
            setattr(sys, name, stream)
        for mutable, original in self.lists:
            mutable[:] = original
        os.umask(0o022)
        for name in set(vars(builtins)) - self.builtins:
            delattr(builtins, name)
        dirty = self._left_over()
        for name in sys.modules.keys() - self.modules.keys():
            if not name.startswith(keeps) and _is_users(sys.modules[name]):
                del sys.modules[name]
        gc.collect()
        if _tasks() > self.tasks + THREADS:
            gc.unfreeze()  # something that outlived its own job may hold them
            gc.collect()
        gc.freeze()  # what outlives its job is a module's: the next collection need not look at it again
        if not dirty and _tasks() > self.tasks + THREADS:
            return f"{_tasks() - self.tasks} threads of process groups that are still held"
        return dirty

    def _left_over(self) -> str:
        if self.spoiled:
            return self.spoiled
        if name := _replaced(self.modules, sys.modules):
            return f"module {name} removed or replaced"
        for name, functions in self.functions.items():
            if key := _replaced(functions, vars(self.modules[name])):
                return f"{name}.{key} replaced"
        if threads := [t.name for t in threading.enumerate() if t not in self.threads]:
            return f"thread {threads[0]} left running"
        reap()
        if procs.children(os.getpid()):
            return "a process left running"
        if torch.nn.modules.module._has_any_global_hook():
            return "a global module hook left behind"
        return "a trace left recording" if trace.recording() else ""


def _replaced(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first name that is another object now, or none; thousands of names after each job, so without a loop here."""
    same = map(operator.is_, before.values(), map(now.get, before))
    return next(itertools.compress(before, map(operator.not_, same)), None)


def _tasks() -> int:
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0


def _is_users(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and procs.is_users(file)
