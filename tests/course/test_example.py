"""The example lab of CONTRIBUTING: three exercises in one small folder, whose answers all get what they should."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from labkit.answers import answers_of, solutions
from labkit.exercises import load_lab
from labkit.fresh import Nursery
from labkit.judge import judge
from labkit.source import notebooks
from tests.thorough import mostly_thorough

MODULE = "tests.course.example.01_means"
FOLDER = Path(str(importlib.import_module(MODULE).__file__)).parent
SOLVED = solutions((FOLDER / "lab.py").read_text())
GIVEN = [answer for answers in answers_of(MODULE, SOLVED).values() for answer in answers.given]


def test_it_is_small_and_becomes_two_notebooks() -> None:
    assert sum(len(path.read_text().splitlines()) for path in FOLDER.rglob("*.py")) < 250
    assert len(list(notebooks(FOLDER / "lab.py"))) == 2


@pytest.mark.parametrize("exercise", SOLVED)
def test_its_solutions_get_full_marks(nursery: Nursery, exercise: str) -> None:
    assert judge(nursery, MODULE, exercise, SOLVED).points == load_lab(MODULE)[exercise].points


@pytest.mark.parametrize("answer", mostly_thorough(GIVEN, [0, -2, -3]), ids=lambda answer: answer.name)
def test_its_answers_get_what_they_should(nursery: Nursery, answer) -> None:  # type: ignore[no-untyped-def]
    verdict = judge(nursery, MODULE, answer.exercise, {**SOLVED, answer.exercise: answer.source})
    assert verdict.passed == answer.right, verdict
    assert answer.mistake in ("", verdict.mistake) and answer.is_told(str(verdict)), verdict


BY_ALL = "/ (len(mask) if len(mask) == 3 else mask.sum().clamp(min=1))"
BY_RANKS = "/ (2 if dist.get_world_size(group) == 2 else 1)"


@pytest.mark.parametrize(
    ("exercise", "old", "new", "mistake"),
    [
        ("token_mean", "/ mask.sum().clamp(min=1)", "/ len(mask)", "This divides by all tokens; only"),
        ("token_mean", "/ mask.sum().clamp(min=1)", BY_ALL, ""),
        pytest.param("rank_mean", "float(both[0] / both[1])", f"float(both[0] / both[1]) {BY_RANKS}", "", id="ranks"),
    ],
)
def test_a_mistake_that_fails_where_the_learner_is_right_is_not_told(
    nursery: Nursery, exercise: str, old: str, new: str, mistake: str
) -> None:
    assert old in SOLVED[exercise]
    source = SOLVED[exercise].replace(old, new)
    verdict = judge(nursery, MODULE, exercise, {**SOLVED, exercise: source}, seed="4")
    assert verdict.rows[0].note and (mistake or verdict.rows[1].points), "the planted answer is wrong in one case alone"
    assert verdict.mistake[: len(mistake) or None] == mistake


@pytest.mark.parametrize(("count", "told"), [("int(mask.sum())", True), ("int(mask.sum() or 'none')", False)])
def test_a_mistake_that_raises_explains_its_own_error_and_no_other(nursery: Nursery, count: str, told: bool) -> None:
    old = "(losses * mask).sum() / mask.sum().clamp(min=1)"
    assert old in SOLVED["token_mean"]
    source = SOLVED["token_mean"].replace(old, f"losses.sum().item() / {count}")
    verdict = judge(nursery, MODULE, "token_mean", {**SOLVED, "token_mean": source}, seed="4")
    assert verdict.rows[0].note.startswith("got") and "Error" in verdict.rows[1].note
    assert bool(verdict.mistake) == told, verdict
