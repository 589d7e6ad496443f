"""Every lab's checks: the solution and other right answers get full marks, the stub none, each mistake its hint.

The answers lie in the labs' folders (`labkit/answers`). An ordinary run tries the first mistake of every tenth
exercise, where that takes a second or less: of formulas and of ranks.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from labkit.answers import GivenAnswer, Same, read_answers
from labkit.fresh import Nursery
from tests.course.marked import LABS, MarkedLab, said
from tests.thorough import mostly_thorough

FILE = """from labkit.answers import Edit, Same

_ONE = "+ 1"
WRONG = [Edit(_ONE, "- 1", ("x", "x "), told="adds | one more")]
EQUIVALENT = [Same("line 1: 2 for 1", "why")]


# %% right: by a sum: of two
def f(x): return sum((x, 1))


# %% wrong: forgets
# told: one is missing
def f(x): return x


# %% empty
f = print
"""
EXERCISES = [(lab, exercise) for lab in LABS for exercise in LABS[lab].lab.exercises]
RIGHT = [(lab, answer) for lab in LABS for answer in LABS[lab].answers if answer.right]
WRONG = [(lab, answer) for lab in LABS for answer in LABS[lab].answers if not answer.right]
FIRST = {(lab, answer.exercise): answer for lab, answer in reversed(WRONG)}
DEAR = {  # beside those of their kind:
    *("add", "attention", "delayed_scaling", "resume", "run_1024", "sharded_adamw"),
}
QUICK = {"gpipe", "limit", "rate"}
SOME = {(lab, exercise) for lab, exercise in EXERCISES[5::10] if exercise not in DEAR}


def test_a_file_of_answers_is_read(tmp_path: Path) -> None:
    (path := tmp_path / "f.py").write_text(FILE)
    answers = read_answers(path, "f = lambda x: x + 1\n")
    assert answers.given == [
        GivenAnswer("f", "f edit 1", False, "f = lambda x : x  - 1\n", "adds | one more"),
        GivenAnswer("f", "f: by a sum: of two", True, "def f(x): return sum((x, 1))\n"),
        GivenAnswer("f", "f: forgets", False, "# told: one is missing\ndef f(x): return x\n", "one is missing"),
    ]
    assert (answers.equivalent, answers.empty) == ([Same("line 1: 2 for 1", "why")], "f = print\n")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [("%% wrong: ", "%% wong: ", "neither right"), ("WRONG", "WRONGS", "in the table"), ("+ 1", "+ 2", "no text")],
)
def test_what_nobody_would_read_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    (path := tmp_path / "f.py").write_text(FILE.replace(old, new))
    with pytest.raises(AssertionError, match=words):
        read_answers(path, "f = lambda x: x + 1\n")


def named(value: str | GivenAnswer) -> str:
    return value if isinstance(value, str) else value.name


def is_tried(case: tuple[str, GivenAnswer]) -> bool:
    """Whether an ordinary run tries this mistake."""
    lab, answer = case
    return (lab, answer.exercise) in SOME and FIRST[lab, answer.exercise] is answer


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
    mostly_thorough(WRONG, is_tried, lambda case: is_tried(case) and case[1].exercise in QUICK),
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
