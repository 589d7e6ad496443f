"""A process as it was before the last job: what a warm rank puts back, and what makes it unfit for another job.

The problem in a sentence: a test that passes only after another test is worse than one that fails, so a rank that
serves many jobs must look to each of them as if it had just been born.

* Put back: random generators, default dtype and device, grad mode, thread count, matmul precision, determinism,
  anomaly mode, signal handlers, streams, warning filters, umask; and by the next job: environment, working directory,
  `sys.path`, process group.
* Forgotten: user modules (neither Python's, nor installed, nor this package's), so that they are imported anew.
* Not curable, so the rank is replaced: a thread or a process left running, process groups that something still holds
  (each has a thread that wakes a hundred times a second), a library function replaced, a library module removed, a
  global module hook left behind, a trace still recording.
"""

from __future__ import annotations

import gc
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch

from minimegatron import trace
from minimegatron.launch import procs

THREADS = 24  # of the kernel's, more than at the start: a few groups may linger until the next collection


class CleanState:
    """What a rank was like before its first job, and the way back to it.

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
        self.threads, self.tasks = set(threading.enumerate()), _tasks()
        watched = ("builtins", "torch", "torch.distributed", "torch.nn.functional")
        self.functions: dict[str, dict[str, Callable[..., Any]]] = {
            name: {key: value for key, value in vars(module).items() if callable(value)}
            for name, module in sys.modules.items()
            if name in watched or name.startswith("minimegatron.")
        }

    def restore(self) -> str:
        """Undo what the job did to the process.

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
        dirty = self._left_over()
        for name in [n for n, m in sys.modules.items() if n not in self.modules and _is_users(m)]:
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
        for name, module in self.modules.items():
            if sys.modules.get(name) is not module:
                return f"module {name} removed or replaced"
        for name, functions in self.functions.items():
            for key, value in functions.items():
                if vars(self.modules[name]).get(key) is not value:
                    return f"{name}.{key} replaced"
        if threads := [t.name for t in threading.enumerate() if t not in self.threads]:
            return f"thread {threads[0]} left running"
        procs.reap()
        if procs.children(os.getpid()):
            return "a process left running"
        if torch.nn.modules.module._has_any_global_hook():
            return "a global module hook left behind"
        return "a trace left recording" if trace.recording() else ""


def _tasks() -> int:
    return len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 0


def _is_users(module: Any) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and procs.is_users(file)
