"""What the tests of every lab's checks do: judge an answer, change a solution, say what a right and a wrong one get.

A lab's file of tests is a table of right answers, one of wrong answers, and what is special about that lab. Four tests
are the same for every lab; each is made here, over the lab's own table, and gets its name there::

    test_each_mistake_loses_points_and_is_told_why = MARKED.wrong_answers(WRONG)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from labkit.exercises import load_lab
from labkit.fresh import Nursery
from labkit.judge import judge
from labkit.verdict import Verdict
from tests.labkit.cells import exercise_cells
from tests.thorough import mostly_thorough


class Marked:
    """One lab under test.

    Args:
        name: of the notebook, e.g. `01_process_groups`.
        imports: whether its exercises import each other; then the others are there, solved.
    """

    def __init__(self, name: str, *, imports: bool = False) -> None:
        self.course, self.imports = f"course.{name}", imports
        self.lab = load_lab(self.course)
        self.solutions, self.stubs = exercise_cells(name, solved=True), exercise_cells(name, solved=False)

    def check(self, nursery: Nursery, exercise: str, source: str) -> Verdict:
        """The judge's verdict on one answer."""
        others = self.solutions if self.imports else {}
        return judge(nursery, self.course, exercise, {**others, exercise: source})

    def changed(self, exercise: str, *pairs: tuple[str, str]) -> str:
        """The solution with some of its text replaced; every text must be there."""
        source = self.solutions[exercise]
        for old, new in pairs:
            assert old in source, old
            source = source.replace(old, new)
        return source

    def assert_full_marks(self, nursery: Nursery, exercise: str, source: str) -> None:
        verdict = self.check(nursery, exercise, source)
        assert (verdict.state, verdict.points) == ("passed", self.lab[exercise].points), verdict

    def assert_loses(self, nursery: Nursery, exercise: str, source: str) -> Verdict:
        """A wrong answer; returns the verdict, for what it tells the learner."""
        verdict = self.check(nursery, exercise, source)
        assert verdict.state == "wrong" and verdict.points < self.lab[exercise].points, verdict
        return verdict

    def assert_three_each(self, right: Mapping[str, Sequence[str]]) -> None:
        assert {name: len(answers) for name, answers in right.items()} == dict.fromkeys(self.lab.exercises, 3)

    def stubs_and_solutions(self) -> Callable[..., None]:
        """A test: the stub scores nothing, the solution everything."""

        @pytest.mark.thorough  # in an ordinary run the notebooks do it: their stored verdicts are compared
        @pytest.mark.parametrize("exercise", self.lab.exercises)
        def test(nursery: Nursery, exercise: str) -> None:
            assert self.check(nursery, exercise, self.stubs[exercise]).state == "todo"
            self.assert_full_marks(nursery, exercise, self.solutions[exercise])

        return test

    def right_answers(self, table: Mapping[str, Sequence[str]]) -> Callable[..., None]:
        """A test: answers that differ from the solution get full marks, too."""

        @pytest.mark.thorough
        @pytest.mark.parametrize(("exercise", "index"), numbered(table))
        def test(nursery: Nursery, exercise: str, index: int) -> None:
            self.assert_full_marks(nursery, exercise, table[exercise][index])

        return test

    def wrong_answers(
        self, table: Mapping[str, Sequence[tuple[str, str]]], told: Callable[[Verdict, str], bool] | None = None
    ) -> Callable[..., None]:
        """A test: each (wrong answer, words) loses points, and `told(verdict, words)`: they are `said`."""
        told = told or (lambda verdict, words: words in said(verdict))

        @pytest.mark.parametrize(("exercise", "index"), numbered(table))
        def test(nursery: Nursery, exercise: str, index: int) -> None:
            source, words = table[exercise][index]
            verdict = self.assert_loses(nursery, exercise, source)
            assert told(verdict, words), (words, verdict)

        return test

    def empty_answers(self, **sources: str) -> Callable[..., None]:
        """A test: what returns None, every function of the stub or the given source, scores nothing."""

        @pytest.mark.thorough
        @pytest.mark.parametrize("exercise", self.lab.exercises)
        def test(nursery: Nursery, exercise: str) -> None:
            names = re.findall(r"^(?:def|class) (\w+)", self.stubs[exercise], flags=re.M)
            nothing = "".join(f"def {name}(*args, **kwargs):\n    return None\n" for name in names)
            verdict = self.check(nursery, exercise, sources.get(exercise, nothing))
            assert (verdict.state, verdict.points) == ("wrong", 0), verdict

        return test


def said(verdict: Verdict) -> str:
    """Everything that the learner reads."""
    return " ".join([verdict.hint, verdict.note, *(row.note for row in verdict.rows)])


def numbered(table: Mapping[str, Sequence[Any]]) -> list[Any]:
    """(exercise, index) of every answer of a table, for `parametrize`; an ordinary run takes the first of each."""
    places = [(name, i) for name, answers in table.items() for i in range(len(answers))]
    return mostly_thorough(places, lambda place: place[1] == 0)
