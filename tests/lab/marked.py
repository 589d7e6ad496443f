"""What the tests of every lab's checks do: judge an answer, change a solution, say what a right and a wrong one get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minimegatron.lab.exercises import course_module, load_lab
from minimegatron.lab.fresh import Nursery
from minimegatron.lab.judge import judge
from minimegatron.lab.verdict import Verdict
from tests.lab.cells import exercise_cells
from tests.thorough import mostly_thorough


class Marked:
    """One lab under test.

    Args:
        name: of the notebook, e.g. `01_process_groups`.
        imports: whether its exercises import each other; then the others are there, solved.
    """

    def __init__(self, name: str, *, imports: bool = False) -> None:
        self.course, self.imports = course_module(name), imports
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

    def assert_stub_and_solution(self, nursery: Nursery, exercise: str) -> None:
        """The stub scores nothing, the solution everything."""
        assert self.check(nursery, exercise, self.stubs[exercise]).state == "todo"
        self.assert_full_marks(nursery, exercise, self.solutions[exercise])

    def assert_loses(self, nursery: Nursery, exercise: str, source: str) -> Verdict:
        """A wrong answer; returns the verdict, for what it tells the learner."""
        verdict = self.check(nursery, exercise, source)
        assert verdict.state == "wrong" and verdict.points < self.lab[exercise].points, verdict
        return verdict

    def assert_three_each(self, right: Mapping[str, Sequence[str]]) -> None:
        assert {name: len(answers) for name, answers in right.items()} == dict.fromkeys(self.lab.exercises, 3)


def said(verdict: Verdict) -> str:
    """Everything that the learner reads."""
    return " ".join([verdict.hint, verdict.note, *(row.note for row in verdict.rows)])


def numbered(table: Mapping[str, Sequence[Any]]) -> list[Any]:
    """(exercise, index) of every answer of a table, for `parametrize`; an ordinary run takes the first of each."""
    places = [(name, i) for name, answers in table.items() for i in range(len(answers))]
    return mostly_thorough(places, lambda place: place[1] == 0)
