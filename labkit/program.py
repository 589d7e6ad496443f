"""A program of a hand-in: a command that is started, watched from outside, and ended with all that it has started.

    [start] command = "bash run.sh {port}"  --> Program: words filled in, no shell, its own process group, a log

A capstone is graded by what programs do (`labkit/acceptance`). Commands run in the hand-in's folder, with this
interpreter's `python` and `minimegatron` first on PATH; `{python}` is this interpreter.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from minimegatron.errors import ConfigError

END_SECONDS = 20.0


def environment() -> dict[str, str]:
    """For a hand-in's commands: ours, in which `minimegatron` and `python` are those of this interpreter."""
    return {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])}


def filled(command: str, words: Mapping[str, object]) -> list[str]:
    """The words of a command line, each `{name}` replaced.

    Raises:
        ConfigError: a quote is left open, or there is no word.
    """
    try:
        line = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"`{command}` is no command line: {error}", fix="close the quote") from None
    if not line:
        raise ConfigError("a command without a word", fix="a program and its arguments")
    for name, value in {**words, "python": sys.executable}.items():
        line = [word.replace(f"{{{name}}}", str(value)) for word in line]
    return line


class Program:
    """A command that is running.

    Args:
        command: with `{name}` where a word is to be filled in.
        folder: where it runs.
        words: {name: what is filled in}.
        log: where its output goes, behind what is there.

    Raises:
        ConfigError: there is no such command.
    """

    def __init__(self, command: str, folder: Path, words: Mapping[str, object], log: Path) -> None:
        line, self.log = filled(command, words), log
        with open(log, "ab") as output:
            try:
                self.process = subprocess.Popen(
                    line,
                    cwd=folder,
                    env=environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise ConfigError(f"`{line[0]}` cannot be started: {error.strerror}", fix="a command on PATH") from None

    @property
    def alive(self) -> bool:
        """Whether the command has not ended."""
        return self.process.poll() is None

    @property
    def status(self) -> int | None:
        """Its exit status, minus a signal; None while it runs."""
        return self.process.poll()

    def last_words(self) -> str:
        """The end of its output."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:])[-400:]

    def processes(self) -> list[psutil.Process]:
        """The command and all that is below it."""
        with contextlib.suppress(psutil.Error):
            root = psutil.Process(self.process.pid)
            return [root, *root.children(recursive=True)]
        return []

    def having(self, variable: str) -> list[psutil.Process]:
        """Those of its processes that have a variable of the environment, as ranks have RANK."""
        return [process for process in self.processes() if _has(process, variable)]

    def ends(self, seconds: float) -> bool:
        """Whether the command ends in time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return not self.alive

    def end(self, seconds: float = END_SECONDS) -> None:
        """SIGTERM to the command, and SIGKILL to what is left of it."""
        left = self.processes()
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        psutil.wait_procs(left, seconds)
        kill(left)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(seconds)


def kill(processes: list[psutil.Process]) -> None:
    """SIGKILL; those that are gone are left alone."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def left_of(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Those that are still there after so many seconds; returns earlier when none is."""
    until = time.monotonic() + seconds
    while (left := [p for p in processes if _runs(p)]) and time.monotonic() < until:
        time.sleep(0.05)
    return left


def _has(process: psutil.Process, variable: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return variable in process.environ()
    return False


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
