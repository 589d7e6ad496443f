"""The nursery: keeps a single thread, and forks a fresh process for every rank of every job.

This is the server of `fresh`, which explains its purpose. Each rank of a job is an order over a socket:

    fresh                                       nursery                         rank
      |-- order, job, ends of two pipes --------> fork -------------------------> limits, empty folder
      |<-- pid -----------------------------------|                               |
      |<-- "+" and then one line of JSON, over the rank's pipe -------------------|
      |-- kill ---------------------------------> kill its process group          x
      |<-- status --------------------------------|

What a generator yields is sent one by one, so that what came before a hang is known.

Forking is safe only from here: a notebook's kernel has threads, whose locks a fork would copy in any state.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import gc
import importlib
import os
import resource
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from labkit import closing, plain, sandbox, seccomp
from labkit.ranks.fork_server import obey


@dataclasses.dataclass(frozen=True)
class Limits:
    """The limits of one rank.

    Attributes:
        seconds: from the start of all ranks to the last answer.
        memory: bytes of address space above what the process starts with.
        file: bytes of the largest file it may write.
        disk: bytes of all files of all ranks together.
        answer: bytes of the answer.
    """

    seconds: float = 20.0
    memory: int = 4 << 30
    file: int = 64 << 20
    disk: int = 256 << 20
    answer: int = 64 << 20


class Failed(Exception):
    """Raised by a rank's function to answer `value` and leave at once.

    A rank that has returned stays until all have answered, so that no other loses a connection; one that failed goes,
    so that no other waits for it.
    """

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.value = value


def serve(sock: socket.socket, folder: str, refused: list[str]) -> None:
    """Leave the network, then fork ranks until the caller hangs up.

    Args:
        refused: calls to the kernel that fail, as on a machine that does not allow them; for tests.
    """
    closing.remember()
    if refused:
        seccomp.refuse(*refused)
    torch.zeros(1).half()  # at its first, torch reads about the CPU in files that a rank does not see
    scratch = tempfile.mkdtemp(dir=folder)
    sandbox.begin(scratch)
    os.rmdir(scratch)
    threads = os.listdir("/proc/self/task") if sys.platform == "linux" else [""]
    assert len(threads) == 1, f"the nursery must have one thread to be forked safely, it has {len(threads)}"
    gc.freeze()  # a rank's garbage collection copies no page of what all ranks share (0.2 s of 75,000 pages)
    gc.set_threshold(50_000)
    obey(sock, folder, live)


def live(order: dict[str, Any], answer: int, job: int, stack: int, *sockets: int) -> None:
    """The life of a process: limits, sign of life, work, answer, and waiting for the end.

    Args:
        order: what to do; `rank` is None for a process of the judge's own, which asks it a question.
        answer: pipe for the answer.
        job: a file with the job.
        stack: pipe for the Python stack at the end of the time.
        sockets: of the judge's own process one to the judge.
    """
    _keep_open({0, 1, 2, answer, stack, job, *sockets})
    limits = Limits(**order["limits"])
    os.chdir(order["folder"])
    os.environ["HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = order["folder"]
    sandbox.room(limits.disk // order["world"], order["shared"])
    faulthandler.enable(stack)
    _limit(limits, own=order["rank"] is None)
    with open(job, "rb") as text:
        given = plain.loads(text.read(), most=None)
    sys.path[:0] = order["path"]
    module, name = order["function"].split(":")
    function = getattr(importlib.import_module(module), name)
    os.write(answer, b"+")
    try:
        if order["rank"] is None:
            _send(answer, function(socket.socket(fileno=sockets[0]), given))
        else:
            value = function(order["rank"], order["world"], given)
            if isinstance(value, Iterator):
                for one in value:
                    _send(answer, one, plain.NEXT)
                os.write(answer, b"\n")
            else:
                _send(answer, value)
        signal.pause()
    except Failed as failure:
        _send(answer, failure.value)


def _keep_open(descriptors: set[int]) -> None:
    """Close all other descriptors."""
    first = 0
    for descriptor in [*sorted(descriptors), 1 << 16]:
        if first < descriptor:  # an empty range from 0 closes all, in CPython 3.11
            os.closerange(first, descriptor)
        first = descriptor + 1


def _limit(limits: Limits, own: bool) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file, limits.file))
    if own:  # it runs no learner's code
        return
    resource.setrlimit(resource.RLIMIT_CPU, (int(2 * limits.seconds) + 5,) * 2)
    if sys.platform == "linux":
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + limits.memory,) * 2)


def _send(pipe: int, value: Any, end: bytes = b"\n") -> None:
    line = memoryview(plain.dumps(value, most=None).encode() + end)
    while line:
        line = line[os.write(pipe, line) :]
