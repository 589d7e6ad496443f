"""Every lab's checks: the solution and other right answers get full marks, the stub none, each mistake its hint.

The answers lie in the labs' folders (`labkit/answers`). An ordinary run tries the first mistake of every fifth
exercise.
"""

from __future__ import annotations

from collections import Counter

import pytest

from labkit.answers import GivenAnswer
from labkit.fresh import Nursery
from tests.course.marked import LABS, MarkedLab, said
from tests.thorough import mostly_thorough

EXERCISES = [(lab, exercise) for lab in LABS for exercise in LABS[lab].lab.exercises]
RIGHT = [(lab, answer) for lab in LABS for answer in LABS[lab].answers if answer.right]
WRONG = [(lab, answer) for lab in LABS for answer in LABS[lab].answers if not answer.right]
FIRST = {(lab, answer.exercise): answer for lab, answer in reversed(WRONG)}
SOME = set(EXERCISES[::5])


def named(value: str | GivenAnswer) -> str:
    return value if isinstance(value, str) else value.name


def assert_full_marks(nursery: Nursery, lab: MarkedLab, exercise: str, source: str) -> None:
    verdict = lab.check(nursery, exercise, source)
    assert (verdict.state, verdict.points) == ("passed", lab.lab[exercise].points), verdict


@pytest.mark.thorough  # in an ordinary run the notebooks do it: their stored verdicts are compared
@pytest.mark.parametrize(("lab", "exercise"), EXERCISES)
def test_the_stub_scores_nothing_and_the_solution_everything(nursery: Nursery, lab: str, exercise: str) -> None:
    assert LABS[lab].check(nursery, exercise, LABS[lab].stubs[exercise]).state == "todo"
    assert_full_marks(nursery, LABS[lab], exercise, LABS[lab].solutions[exercise])


@pytest.mark.parametrize("lab", LABS)
def test_every_exercise_has_three_other_right_answers(lab: str) -> None:
    counted = Counter(answer.exercise for answer in LABS[lab].answers if answer.right)
    assert {name: counted[name] for name in LABS[lab].lab.exercises if counted[name] < 3} == {}


@pytest.mark.thorough
@pytest.mark.parametrize(("lab", "answer"), RIGHT, ids=named)
def test_other_right_answers_get_full_marks(nursery: Nursery, lab: str, answer: GivenAnswer) -> None:
    assert_full_marks(nursery, LABS[lab], answer.exercise, answer.source)


@pytest.mark.parametrize(
    ("lab", "answer"),
    mostly_thorough(
        WRONG,
        lambda case: (case[0], case[1].exercise) in SOME and FIRST[case[0], case[1].exercise] is case[1],
    ),
    ids=named,
)
def test_each_mistake_loses_points_and_is_told_why(nursery: Nursery, lab: str, answer: GivenAnswer) -> None:
    verdict = LABS[lab].check(nursery, answer.exercise, answer.source)
    assert verdict.state == "wrong" and verdict.points < LABS[lab].lab[answer.exercise].points, verdict
    assert answer.is_told(said(verdict)), (answer.told, verdict)


@pytest.mark.thorough
@pytest.mark.parametrize(("lab", "exercise"), EXERCISES)
def test_an_answer_that_returns_nothing_scores_nothing(nursery: Nursery, lab: str, exercise: str) -> None:
    verdict = LABS[lab].check(nursery, exercise, LABS[lab].empty(exercise))
    assert (verdict.state, verdict.points) == ("wrong", 0), verdict
