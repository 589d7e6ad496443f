"""The same grading again, from the JSON of an earlier run: to answer a complaint, to show that marks can be repeated.

    minimegatron grade submitted/ --out marks.csv --json marks.json          in May
    minimegatron grade submitted/ --regrade marks.json --out again.csv       in June: byte for byte the same, or refused

Marks depend on the seed, the options, the checks, what was handed in, and the programs that compute. The JSON has the
first two, and digests of the others; `Earlier.differences` names what has changed since. Seconds are not repeatable and
stand apart, at the end of the file.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

import minimegatron
from labkit.grading import Course
from labkit.record import course_digest
from labkit.shown import clean, named
from labkit.submissions import Submission
from minimegatron.errors import ConfigError

FORMAT = 2
_NAMED = 5


def versions() -> dict[str, str]:
    """Versions of everything that computes the marks; for `labkit` a digest of its text, which changes between
    releases."""
    texts = sorted(Path(__file__).parent.glob("*.py"))
    judge = hashlib.sha256(b"\0".join(path.read_bytes() for path in texts)).hexdigest()
    return {
        "minimegatron": minimegatron.__version__, "labkit": judge, "python": platform.python_version(),
        "torch": torch.__version__, "numpy": numpy.__version__,
    }  # fmt: skip


def checks(submissions: Sequence[Submission], courses: Mapping[str, Course]) -> dict[str, str]:
    """{lab: digest of its checks} of the labs that were handed in."""
    labs = sorted({one.lab for one in submissions if one.lab in courses})
    return {lab: course_digest(courses[lab].module) for lab in labs}


class Earlier:
    """An earlier run.

    Args:
        path: its JSON.

    Attributes:
        seed: seed of its hidden cases.
        options: `lab`, `only`, `course` as they were given.
    Raises:
        ConfigError: it is not such a file, or of a run that was interrupted.
    """

    def __init__(self, path: Path) -> None:
        fix = "name what `grade --json` has written"
        try:
            data = json.loads(path.read_text())
            if data["format"] != FORMAT:
                raise ConfigError(
                    f"{path} is of format {data['format']}, this is format {FORMAT}", fix="grade with --seed"
                )
            self.seed, self.options = str(data["seed"]), {name: str(data["options"][name]) for name in _OPTIONS}
            self._versions, self._checks = dict(data["versions"]), dict(data["checks"])
            self._marks = {(row["learner"], row["lab"]): row for row in data["marks"]}
            complete = data["complete"]
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}", fix=fix) from None
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is no JSON of a grading ({type(error).__name__}: {error})", fix=fix) from None
        if not complete:
            raise ConfigError(f"the run of {path} was interrupted", fix=f"grade anew with --seed {self.seed}")

    def differences(self, submissions: Sequence[Submission], courses: Mapping[str, Course]) -> list[str]:
        """What has changed since, one line each."""
        said = [f"{name} is {now[:12]}, it was {self._versions.get(name, 'not there')[:12]}"
                for name, now in versions().items() if now != self._versions.get(name)]  # fmt: skip
        now = checks(submissions, courses)
        said += [f"the checks of {lab} have changed" for lab in sorted(now.keys() & self._checks) if
                 now[lab] != self._checks[lab]]  # fmt: skip
        here = {(named(one.learner), clean(one.lab)): one.digest for one in submissions}
        for key in sorted(here.keys() | self._marks):
            what = " ".join(filter(None, key))
            if key not in self._marks:
                said.append(f"{what} was not there")
            elif key not in here:
                said.append(f"{what} is missing")
            elif here[key] != self._marks[key]["submission"]:
                said.append(f"{what} has changed what was handed in")
        return said

    def refuse_changes(self, submissions: Sequence[Submission], courses: Mapping[str, Course]) -> None:
        """Refuse to regrade if something has changed that could change marks.

        Raises:
            ConfigError: with the changes.
        """
        if said := self.differences(submissions, courses):
            more = f"; and {len(said) - _NAMED} more" if len(said) > _NAMED else ""
            raise ConfigError(
                f"this cannot be the same grading: {'; '.join(said[:_NAMED])}{more}",
                fix=f"restore what has changed, or grade anew with --seed {self.seed}",
            )

    def changed_marks(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Learners with other results than before, though nothing has changed."""
        return [
            f"{row['learner']} {row['lab']}".strip() for row in rows if row != self._marks[row["learner"], row["lab"]]
        ]


_OPTIONS = ("lab", "only", "course")
