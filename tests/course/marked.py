"""A lab of the course with its solutions, its stubs and other answers, and the judge's verdict on one of them."""

from __future__ import annotations

import re

from labkit.answers import answers_of
from labkit.exercises import load_lab
from labkit.fresh import Nursery
from labkit.judge import judge
from labkit.verdict import Verdict
from tests.labkit.cells import SOURCES, exercise_cells


class MarkedLab:
    """One lab under test; `name` is the notebook's, e.g. `01_process_groups`."""

    def __init__(self, name: str) -> None:
        self.name, self.course = name, f"course.{name}"
        self.lab = load_lab(self.course)
        self.solutions, self.stubs = exercise_cells(name, solved=True), exercise_cells(name, solved=False)
        self.given = answers_of(self.course, self.solutions)
        self.answers = [answer for given in self.given.values() for answer in given.given]

    def check(self, nursery: Nursery, exercise: str, source: str, seed: str | None = None) -> Verdict:
        """The judge's verdict on one answer; the lab's other exercises, which it may import, are solved."""
        return judge(nursery, self.course, exercise, {**self.solutions, exercise: source}, seed)

    def source(self, name: str) -> str:
        """The source of an answer of that name, e.g. `bubble: exact fractions`."""
        return next(answer.source for answer in self.answers if answer.name == name)

    def empty(self, exercise: str) -> str:
        """A program that runs and does nothing: of the lab's folder, or every function of the stub returns None."""
        names = re.findall(r"^(?:def|class) (\w+)", self.stubs[exercise], flags=re.M)
        nothing = "".join(f"def {name}(*args, **kwargs):\n    return None\n" for name in names)
        return self.given[exercise].empty or nothing


LABS = {path.parent.name: MarkedLab(path.parent.name) for path in SOURCES}


def said(verdict: Verdict) -> str:
    """Everything that the learner can read up to the third failure."""
    return " ".join([verdict.mistake, verdict.idea, verdict.note, *(row.note for row in verdict.rows)])
