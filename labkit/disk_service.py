"""A check's disk in the judge's process, which logs every change of a program and kills the program at one.

The problem in a sentence: a program could hide a change from a killer in its own process.

    drive, in the learner's process            judge's process
      disk = JudgedDisk()
      disk.begin(kill_at=3)            --->    a fresh `Disk` with the trial's files
      exercise.save(disk, ...)         --->    mkdir, write, ... Killed at the third
      disk.restart()                   --->    its state stays
      exercise.save(disk, ...)         --->    mkdir, write, ...

`evidence.disk` has a run for each `begin`: `kill_at`, and `log`, every change with its arguments; `("restart",)`
separates two programs. From the log `labkit.disk.replay` computes the possible outcomes of a power cut after each
change.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from labkit import channel
from labkit.broker import Letter
from labkit.disk import CHANGES, Disk, Killed
from minimegatron.errors import ConfigError

_MOST_CHANGES, _MOST_BYTES = 20_000, 4 << 20  # of a trial
_RAISES = ("FileExistsError", "FileNotFoundError", "IsADirectoryError", "OSError", "ValueError")


class JudgedDisk:
    """In a check, a `Disk` in the judge's process; see there for its methods."""

    def __init__(self) -> None:
        self._line = channel.mine()

    def begin(self, kill_at: int = 0) -> None:
        """Begin with a fresh disk with the files of this trial, and a killer for the program that follows."""
        self._ask("begin", str(kill_at))

    def restart(self) -> None:
        self._ask("restart")

    def mkdir(self, path: str) -> None:
        self._ask("mkdir", path)

    def write(self, path: str, data: bytes) -> None:
        self._ask("write", path, data=bytes(data))

    def fsync(self, path: str = "") -> None:
        self._ask("fsync", path)

    def rename(self, old: str, new: str) -> None:
        self._ask("rename", old, new)

    def remove(self, path: str) -> None:
        self._ask("remove", path)

    def names(self, folder: str = "") -> list[str]:
        return list(self._ask("names", folder)[0]["names"])

    def read(self, path: str) -> bytes:
        return bytes(self._ask("read", path)[1][0].tolist())

    def _ask(self, do: str, *args: str, data: bytes | None = None) -> channel.Message:
        with torch._C._DisableTorchDispatch():  # what packs a message is no operation of the learner's
            tensors = [] if data is None else [torch.tensor(list(data), dtype=torch.uint8)]
            head, found = self._line.ask({"to": "disk", "do": do, "args": [str(arg) for arg in args]}, tensors)
        if head.get("killed"):
            raise Killed
        if head.get("raises") in _RAISES:
            raise getattr(builtins, head["raises"])(head["says"])
        return head, found


class DiskService:
    """The judge's end of `JudgedDisk`: a `broker.Service`.

    Args:
        trials: {path: text} of each trial's disk.
    """

    def __init__(self, trials: Sequence[Mapping[str, str]]) -> None:
        self._files = [{path: text.encode() for path, text in files.items()} for files in trials]
        self._runs: list[list[dict[str, Any]]] = [[] for _ in trials]
        self._trial, self._disk = -1, Disk()
        self._changes = self._bytes = 0

    def handle(self, rank: int, header: dict[str, Any], tensors: list[torch.Tensor]) -> Iterable[Letter]:
        """`{"do": "trial"}` goes on to the next trial; everything else belongs to the current one.

        Raises:
            ConfigError: an operation that a disk does not have, or too many of them.
        """
        do, answer = header["do"], {"id": header["id"]}
        if do == "trial":
            self._trial += 1
            self._changes = self._bytes = 0
            return [(rank, answer, ())]
        if not 0 <= self._trial < len(self._runs):
            raise ConfigError("there is no disk now")
        args = [str(arg)[:200] for arg in header["args"]]
        if do == "begin":
            self._disk = Disk(self._files[self._trial], int(args[0]))
            self._runs[self._trial].append({"kill_at": int(args[0]), "log": []})
            return [(rank, answer, ())]
        if not self._runs[self._trial]:
            raise ConfigError("the disk has not begun")
        log = self._runs[self._trial][-1]["log"]
        if do == "restart":
            self._disk.restart()
            log.append(["restart"])
            return [(rank, answer, ())]
        data = [bytes(tensor.to(torch.uint8).flatten().tolist()) for tensor in tensors]
        self._changes, self._bytes = self._changes + 1, self._bytes + sum(map(len, data))
        if self._changes > _MOST_CHANGES or self._bytes > _MOST_BYTES:
            raise ConfigError(f"a check's disk takes {_MOST_CHANGES} operations and {_MOST_BYTES >> 20} MiB")
        return [self._done(rank, answer, do, args, data, log)]

    def _done(
        self, rank: int, answer: dict[str, Any], do: str, args: list[str], data: list[bytes], log: list[Any]
    ) -> Letter:
        """The disk's answer; a change that was done, or in which the program died, is logged."""
        disk = self._disk
        made = len(disk.log)
        try:
            if do == "names":
                return rank, {**answer, "names": disk.names(*args)}, ()
            if do == "read":
                return rank, answer, [torch.tensor(list(disk.read(*args)), dtype=torch.uint8)]
            if do not in CHANGES:
                raise ConfigError(f"a disk knows {', '.join((*CHANGES, 'names', 'read'))}")
            getattr(disk, do)(*args, *data)
        except Killed:
            answer = {**answer, "killed": True}
        except (OSError, ValueError) as error:
            name = type(error).__name__
            answer = {**answer, "raises": name if name in _RAISES else "OSError", "says": str(error)}
        log += [list(change) for change in disk.log[made:]]
        return rank, answer, ()

    def gone(self, rank: int) -> Iterable[Letter]:
        return []

    def idle(self) -> Iterable[Letter]:
        return []

    def evidence(self) -> list[list[dict[str, Any]]]:
        """The runs of each trial."""
        return self._runs
