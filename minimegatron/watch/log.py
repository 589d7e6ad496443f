"""Reads the log of a run as it grows: the file of `train --log-file`.

A run is a file, or a folder that has one. `RunLog.read` reads on from where it stopped, for at most a moment at a time,
so a page appears before a log of 100 MB has been read.

| what a log can hold                   | what becomes of it                                                         |
|---------------------------------------|----------------------------------------------------------------------------|
| a step that is there already          | the later one counts, and what followed the earlier one is forgotten       |
| a second configuration, or a step back | a mark: `resumed`, `rolled back`                                          |
| a line without its end                | waits for the rest                                                         |
| a line that is no JSON object         | is counted, and the page says so                                           |
| a file that became shorter or another | is read from the beginning                                                 |
| numbers that are not finite           | gaps in a curve; they are counted                                          |

Memory is bounded: `NUMBERS` numbers of all curves together, `TAIL` lines of text, the last object of each other kind.
"""

from __future__ import annotations

import collections
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from minimegatron.errors import DataError
from minimegatron.watch.columns import Column, width_for

CHUNK, LONGEST = 1 << 18, 1 << 26  # bytes that are read at once, and of the longest line
NUMBERS, COLUMNS, TAIL = 1 << 22, 2048, 300
NO_CURVES = {"iteration", "train_iters", "expert_ranks", "global_batch_size"}
LAYERS = ("gradient", "weights", "update")
OF_LAYERS = tuple(f"{kind} of " for kind in LAYERS)
LINES = {"memory": "memory counted", "timeline": "timeline recorded", "experts": "loads of experts"}


def find_log(run: str) -> Path:
    """The log file of a run, given by itself or by its folder.

    Raises:
        DataError: there is none, or the folder has several.
    """
    path = Path(run)
    fix = "the file of train's --log-file, or its folder; a run without that flag has none"
    if path.is_file():
        return path
    if not path.is_dir():
        raise DataError(f"there is no run {run}", fix=fix)
    found = sorted(path.glob("*.jsonl"))
    named = [p for p in found if p.name == "run.jsonl"] or [p for p in found if _begins(p)] or found
    if not named:
        raise DataError(f"{run} has no log: no file *.jsonl", fix=fix)
    if len(named) > 1:
        raise DataError(f"{run} has several logs: {', '.join(p.name for p in named)}", fix=f"for example {named[0]}")
    return named[0]


def _begins(path: Path) -> bool:
    """Whether a file begins as a log does; folders have other lines of JSON, too."""
    with open(path, "rb") as file:
        return file.read(64).startswith(b'{"event": "config"')


class RunLog:
    """A run, as far as its log has been read.

    Args:
        path: the file.

    Attributes:
        config: the last configuration of the file, with `world_size` and `device`.
        columns: numbers by name.
        generation: changes whenever points that were there are so no longer.
        marks: iterations at which the run went on after an interruption.
        latest: the last object of each event.
        tail: the last lines of text, {seq, iteration, time, kind, text}.
        broken: lines that were no JSON objects.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self._restart(None)

    def _restart(self, file: tuple[int, int] | None) -> None:
        self._file, self._offset, self._rest = file, 0, b""
        self.size, self.changed = 0, 0.0
        self.config: dict[str, Any] = {}
        self.columns: dict[str, Column] = {}
        self._added: dict[str, tuple[Callable[[int], None], Callable[[float], None]]] = {}
        self.marks: list[dict[str, Any]] = []
        self.latest: dict[str, dict[str, Any]] = {}
        self.tail: collections.deque[dict[str, Any]] = collections.deque(maxlen=TAIL)
        self.steps: collections.deque[tuple[int, dict[str, Any]]] = collections.deque(maxlen=TAIL // 12)
        self.iteration = self.seq = self.broken = self.not_finite = self._numbers = 0
        self._begins = False
        self.generation += 1

    @property
    def unread(self) -> int:
        """Bytes that are still to be read."""
        return self.size - self._offset

    @property
    def behind(self) -> bool:
        """Whether there are such."""
        return self.unread > 0

    @property
    def ended(self) -> bool:
        """Whether the run has said that it ended."""
        return "end" in self.latest

    def read(self, seconds: float = 0.15) -> None:
        """Read on, for about so many seconds.

        Raises:
            DataError: the file cannot be read.
        """
        deadline = time.monotonic() + seconds
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                this = status.st_dev, status.st_ino
                if self._file is not None and (this != self._file or status.st_size < self._offset):
                    self._restart(this)
                self._file, self.size, self.changed = this, status.st_size, status.st_mtime
                file.seek(self._offset)
                while time.monotonic() < deadline and (chunk := file.read(CHUNK)):
                    self._offset += len(chunk)
                    *lines, self._rest = (self._rest + chunk).split(b"\n")
                    for line in lines:
                        self._line(line)
                    if len(self._rest) > LONGEST:
                        self._rest, self.broken = b"", self.broken + 1
        except OSError as error:
            raise DataError(f"cannot read {self.path}: {error}", fix="a file of train's --log-file") from error

    def _line(self, line: bytes) -> None:
        if not line.strip():
            return
        try:
            record = json.loads(line.decode("utf-8", "replace"))
            event = record["event"] if isinstance(record["event"], str) else "?"
            at = record.get("iteration", self.iteration)
            if not isinstance(at, int) or abs(at) >= 1 << 31:
                raise ValueError("no iteration")
        except (ValueError, KeyError, TypeError, RecursionError):
            self.broken += 1
            return
        if event == "config":
            self._begins, self.config = bool(self.config), record
            self.latest.pop("end", None)
        elif event == "train":
            self._train(record, at)
        elif event in ("validation", "test"):
            losses = record.get("losses")
            for name, value in losses.items() if isinstance(losses, dict) else ():
                if event == "validation":
                    self._add(f"{name} validation", at, value)
            self._say(at, event, f"{event}: " + ", ".join(f"{n} {_short(v)}" for n, v in _pairs(losses)), record)
        elif event == "message":
            self._say(self.iteration, event, str(record.get("text", "")), record)
        elif event == "end":
            reason = record.get("reason")
            self._say(at, event, f"the run ended{f': {reason}' if reason else ''}", record)
        elif event == "stragglers":
            self._add("skew_ms", at, record.get("skew_ms"))
        else:
            self._say(at, event, LINES.get(event, event), record)
        if event not in ("config", "message"):
            self.latest[event] = record

    def _train(self, record: dict[str, Any], at: int) -> None:
        if at <= self.iteration and self.iteration:
            for column in self.columns.values():
                column.cut(at)
            self.marks = [mark for mark in self.marks if mark["at"] < at]
            self.generation += 1
        if self._begins or at <= self.iteration:
            what = "resumed" if self._begins else "rolled back"
            self.marks = [*self.marks[-63:], {"at": at, "from": self.iteration, "what": what}]
            self._say(at, "mark", f"{what}: step {at} follows step {self.iteration}", record)
        self._begins, self.iteration = False, at
        self.latest.pop("end", None)
        added, fast = self._added, 0
        for name, value in record.items():
            kind = type(value)
            if kind is float or kind is int:
                if name in added and -1e300 < value < 1e300:  # where the time of a long log is spent
                    add_at, add_value = added[name]
                    add_at(at)
                    add_value(value)
                    fast += 1
                elif name not in NO_CURVES:
                    self._add(name, at, value)
            elif name == "losses":
                for loss, number in _pairs(value):
                    self._add(loss, at, number)
            elif name == "norms":
                for layer, numbers in _pairs(value):
                    for what, number in zip(LAYERS, numbers, strict=False):
                        self._add(f"{what} of {layer}", at, number)
            elif name == "epochs":
                for number in list(value.values())[:1] if isinstance(value, dict) else ():
                    self._add("epoch", at, number)
            elif name == "experts":
                loads = [layer["tokens"] for layer in value or () if isinstance(layer, dict) and layer.get("tokens")]
                if loads:
                    self._add("busiest expert", at, max(max(t) * len(t) / max(1, sum(t)) for t in loads))
        self._numbers += fast
        self.seq += 1
        self.steps.append((self.seq, record))
        if self._numbers >= NUMBERS:
            self._thin()

    def _add(self, name: str, at: int, value: Any) -> None:
        column = self.columns.get(name)
        if column is None:
            if len(self.columns) >= COLUMNS:
                return
            column = self.columns[name] = Column()
            self._added[name] = column.appends
        if type(value) not in (int, float):
            if value is not None:
                return
        elif not -1e300 < value < 1e300:
            self.not_finite, value = self.not_finite + 1, None
        column.append(at, value)
        self._numbers += 1

    def _thin(self) -> None:
        """Shrink the longest columns; `_numbers` has counted what was cut, too."""
        self._numbers = sum(map(len, self.columns.values()))
        while self._numbers > NUMBERS // 4 * 3:
            longest = max(self.columns.values(), key=len)
            self._numbers -= len(longest)
            longest.thin()
            self._numbers += len(longest)
            self.generation += 1

    def _say(self, at: int, kind: str, text: str, record: dict[str, Any]) -> None:
        self.seq += 1
        self.tail.append({"seq": self.seq, "at": at, "time": record.get("time"), "kind": kind, "text": text[:4000]})

    def curves(
        self, since: int = 0, width: int = 0, points: int = 500, first: int = 0, end: int = 0, smooth: int = 0
    ) -> dict[str, Any]:
        """The curves of iterations [first, end) in at most about `points` buckets; `end` 0: all there is.

        Args:
            since, width: the caller has the buckets of this width up to this iteration, and needs those that begin at
                it; ignored if the width has become another.

        Returns:
            `width` and `since` of the answer; `next`, the `since` of the next question; `curves`, {name: buckets}.
        """
        stop = end or self.iteration + 1
        wanted = width_for(first, stop, points)
        since = since // wanted * wanted if width == wanted else 0
        begin = max(first, since)
        of_run = {n: c for n, c in self.columns.items() if not n.startswith(OF_LAYERS)}
        curves = {n: c.buckets(begin, stop, wanted, smooth) for n, c in of_run.items()}
        following = (self.iteration // wanted) * wanted
        found = {n: c for n, c in curves.items() if c["at"]}
        return {"width": wanted, "since": since, "next": following, "curves": found, "layers": self._layers_at()}

    def _layers_at(self) -> int:
        """The last step with norms by layer; 0 without any."""
        return max((c.last_at for n, c in self.columns.items() if n.startswith(OF_LAYERS[:1])), default=0)

    def layers(self, kind: str, points: int = 120, first: int = 0, end: int = 0) -> dict[str, Any]:
        """{layer: buckets, their means alone} of a kind of norm: `gradient`, `weights` or `update`."""
        stop, head = end or self.iteration + 1, f"{kind} of "
        of_kind = {n.removeprefix(head): c for n, c in self.columns.items() if n.startswith(head)}
        width = width_for(first, stop, points)
        found = {name: column.buckets(first, stop, width) for name, column in of_kind.items()}
        return {name: {"at": b["at"], "mean": b["mean"]} for name, b in found.items()}

    def lines(self, since: int) -> list[dict[str, Any]]:
        """Lines of text after number `since`, in their order."""
        told = [line for line in self.tail if line["seq"] > since]
        for seq, record in self.steps:
            if seq > since:
                text = ", ".join(f"{name} {_short(value)}" for name, value in _pairs(record.get("losses")))
                told.append(
                    {"seq": seq, "at": record["iteration"], "time": record.get("time"), "kind": "step", "text": text}
                )
        return sorted(told, key=lambda line: line["seq"])


def _pairs(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)
