"""What a learner has passed, kept in `.work/<lab>/progress.json` from one kernel to the next.

A verdict is stored with a digest of what it judged: the exercise's text, the exercises it imports, and the checks of
the lab. When one of them changes, the verdict is no longer shown. The file is a convenience for the learner; the
instructor's `minimegatron grade` never reads it.

It also has how often the exercise has failed since it last passed: `check` says more from the second failure on
(`verdict`). A failure counts if the text of the cell is not that of the last failure, and could be tried.

| event                                    | result                                                                 |
|------------------------------------------|------------------------------------------------------------------------|
| killed while it is written               | the file is replaced in one step (`os.replace`): the old or the new one |
| two kernels on one lab                   | read, merge and write under a lock; both keep their verdicts           |
| corrupt, or of no known format           | renamed to `progress.json.broken`, reported once, and begun anew       |
| of an older format                       | read, and written in the new one                                       |
| of a newer minimegatron                  | left alone; this session remembers in memory only, and says so         |
| the folder or the disk refuses           | the same                                                               |
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from labkit.verdict import SIGNS, Verdict

FORMAT = 3
_READ = (1, 2, FORMAT)  # 1 counts no failures, 2 has hints
NAME = "progress.json"
_MAX_BYTES = 4 << 20
_LOCK_SECONDS = 5.0


def course_digest(module: str) -> str:
    """Digest of the text of a module that declares a lab, and of the `checks` beside it; "" without one."""
    spec = importlib.util.find_spec(module)
    if not spec or not spec.origin:
        return ""
    path = Path(spec.origin)
    parts = sorted(path.parent.glob("checks/*.py")) if path.name == "__init__.py" else []
    return hashlib.sha256(b"\0".join(one.read_bytes() for one in (path, *parts))).hexdigest()


def digest(name: str, sources: Mapping[str, str], course: str) -> str:
    """Digest of everything that a verdict on exercise `name` depends on."""
    total = hashlib.sha256(f"{name}\0{course}".encode())
    for one in _used(name, sources):
        total.update(f"\0{one}\0{sources[one]}".encode())
    return total.hexdigest()


def _used(name: str, sources: Mapping[str, str]) -> list[str]:
    """The exercise, the exercises that it imports, those that these import, and so on, as far as there are any."""
    wanted, seen = [name], list[str]()
    while wanted:
        if (one := wanted.pop()) in seen or one not in sources:
            continue
        seen.append(one)
        wanted += sorted(re.findall(r"\bexercises\.(\w+)", sources[one]))
    return seen


def _text_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class Unusable(Exception):
    """The file cannot be understood."""


class Newer(Exception):
    """The file was written by a later version."""


class Record:
    """The verdicts of one lab.

    Args:
        folder: `.work/<lab>`.
        course: digest of the lab's checks, see `course_digest`.

    Attributes:
        trouble: one line about a file that could not be read or written, "" without any.
    """

    def __init__(self, folder: Path, course: str = "") -> None:
        self.path = folder / NAME
        self.course = course
        self.trouble = ""
        self._kept: dict[str, dict[str, Any]] = {}
        self._frozen = False
        try:
            with self._locked():
                self._load()
        except OSError as error:
            self._freeze(f"{NAME} cannot be written ({error.strerror or error})")
            with contextlib.suppress(OSError, Newer, Unusable):
                self._kept = read(self.path)

    def get(self, name: str, sources: Mapping[str, str]) -> Verdict | None:
        """The verdict on an exercise, if it was given on these sources and checks."""
        return valid(self._kept, name, sources, self.course)

    def changed_below(self, name: str, sources: Mapping[str, str]) -> list[str]:
        """The exercises that an exercise imports and that have changed, so that its own pass no longer counts."""
        entry = self._kept.get(name, {})
        texts = entry.get("texts")
        if not isinstance(texts, dict) or entry["verdict"]["state"] != "passed":
            return []
        changed = [one for one, text in texts.items() if _text_digest(sources.get(one, "")) != text]
        return [] if name in changed else changed

    def put(self, verdict: Verdict, sources: Mapping[str, str]) -> Verdict:
        """Keep a verdict, here and in the file.

        Returns:
            The verdict with its attempt.
        """
        before, counted = self._kept.get(verdict.exercise), None
        if not self._frozen:
            try:
                with self._locked():
                    self._load()  # another kernel may have written
                    counted = self._keep(verdict, sources, self._kept.get(verdict.exercise))
                    if not self._frozen:
                        self._write()
            except OSError as error:
                self._freeze(f"{NAME} cannot be written ({error.strerror or error})")
        return counted or self._keep(verdict, sources, before)

    def _keep(self, verdict: Verdict, sources: Mapping[str, str], before: Mapping[str, Any] | None) -> Verdict:
        failures, failed = (before["verdict"].get("attempt", 0), before.get("failed", "")) if before else (0, "")
        text = _text_digest(sources.get(verdict.exercise, ""))
        if verdict.state == "passed":
            failures, failed = 0, ""
        elif verdict.state == "wrong" and verdict.tried:
            failures, failed = failures + (text != failed), text
        counted = dataclasses.replace(verdict, attempt=failures)
        self._kept[verdict.exercise] = {
            "digest": digest(verdict.exercise, sources, self.course), "verdict": counted.to_plain(), "failed": failed,
            "texts": {one: _text_digest(sources[one]) for one in _used(verdict.exercise, sources)},
        }  # fmt: skip
        return counted

    def _load(self) -> None:
        """Read the file, under the lock: a file that is renamed is the one that was read."""
        try:
            self._kept = {**self._kept, **read(self.path)}
        except FileNotFoundError:
            pass
        except Newer:
            self._freeze(f"{NAME} is of a newer minimegatron")
        except OSError as error:
            self._freeze(f"{NAME} cannot be read ({error.strerror or error})")
        except Unusable as error:
            self.trouble = f"{NAME} {error}; it is kept as {NAME}.broken. Check your exercises again."
            with contextlib.suppress(OSError):
                os.replace(self.path, self.path.with_name(f"{NAME}.broken"))

    def _freeze(self, why: str) -> None:
        self._frozen = True
        self.trouble = f"{why}: what you pass now is forgotten when this kernel ends."

    def _write(self) -> None:
        """Write the file, under the lock, so the temporary file is ours."""
        kept = dict(sorted(self._kept.items()))
        text = json.dumps({"format": FORMAT, "sum": _sum(kept), "exercises": kept}, indent=1)
        temporary = self.path.with_name(f"{NAME}.new")
        with open(temporary, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, self.path)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock; the kernel releases that of a process that dies.

        Raises:
            OSError: the lock was not free within a few seconds, or cannot be made.
        """
        deadline = time.monotonic() + _LOCK_SECONDS
        with open(self.path.with_name(f"{NAME}.lock"), "w") as stream:
            while True:
                try:
                    fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.02)
            yield


def valid(kept: Mapping[str, Any], name: str, sources: Mapping[str, str], course: str) -> Verdict | None:
    """The verdict on `name` among those that `read` returned, if it is for these sources and checks."""
    if name not in kept or kept[name]["digest"] != digest(name, sources, course):
        return None
    return Verdict.from_plain(kept[name]["verdict"])


def _sum(kept: Mapping[str, Any]) -> str:
    """A checksum against flipped bits, not against forgery: only the learner reads this file."""
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def read(path: Path) -> dict[str, dict[str, Any]]:
    """{exercise: {"digest": ..., "verdict": ..., "failed": digest of the text that failed last, or "", "texts": ...}}.

    "texts" are the digests of all that the verdict depends on; a file of an earlier version may have none.

    Raises:
        Newer, Unusable: it is of another version, or not such a file.
        OSError: it cannot be read.
    """
    with open(path, "rb") as stream:
        raw = stream.read(_MAX_BYTES + 1)
    try:
        if len(raw) > _MAX_BYTES:
            raise ValueError("too long")
        data = json.loads(raw)
        version = data["format"]
        if type(version) is int and version > FORMAT:
            raise Newer
        if type(version) is not int or version not in _READ:
            raise Unusable("is of an older format")
        for name, entry in data["exercises"].items():
            verdict = Verdict.from_plain(entry["verdict"])
            numbers = [
                verdict.of,
                verdict.attempt,
                *(number for row in verdict.rows for number in (row.points, row.of)),
            ]
            if type(entry["digest"]) is not str or verdict.exercise != name or verdict.state not in SIGNS:
                raise ValueError(name)
            if any(type(number) is not int for number in numbers) or type(entry.get("failed", "")) is not str:
                raise ValueError(name)
        if data["sum"] != _sum(data["exercises"]):
            raise ValueError("changed")
        return dict(data["exercises"])
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise Unusable("could not be read") from None
