"""Faults of a lab's author are found when the lab is declared, not when a learner meets them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from labkit.exercises import Case, Draw, Exercise, Lab, load_lab
from minimegatron.errors import ConfigError
from tests.labkit import mini_course

ONE = [Case("one", {})]


def needs_math(exercise: Any, x: float) -> float:
    return exercise.f(x) * math.pi


def stands_alone(exercise: Any, x: float) -> float:
    import math

    return exercise.math(x).pi * math.pi


def test_the_same_seed_draws_the_same() -> None:
    one, two, other = Draw("7"), Draw("7"), Draw("8")
    draws = [
        (d.integer(0, 10**9), d.choice("abc"), d.tensor(2, 3), d.tensor(4, dtype=torch.bfloat16))
        for d in (one, two, other)
    ]
    assert draws[0][:2] == draws[1][:2] != draws[2][:2]
    assert torch.equal(draws[0][2], draws[1][2]) and not torch.equal(draws[0][2], draws[2][2])
    assert draws[0][3].dtype == torch.bfloat16


def test_visible_cases_do_not_depend_on_the_seed() -> None:
    visible, hidden = Case("a", mini_course.some_pipeline), Case("a", mini_course.some_pipeline, hidden=True)
    assert visible.draw("1") == visible.draw("2")
    assert len({str(hidden.draw(str(seed))) for seed in range(20)}) > 1


def test_points_add_up() -> None:
    assert mini_course.LAB.points == 12 and mini_course.LAB["bubble"].points == 5


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Exercise("no name", ONE, reference=int), "cannot name an exercise"),
        (lambda: Exercise("empty", [], reference=int), "needs at least one case"),
        (lambda: Exercise("open", ONE), "nothing says when `one` is right"),
        (lambda: Exercise("drive", ONE, reference=int, drive=needs_math), "drive uses math from outside"),
        (lambda: Lab("00", [Exercise("a", ONE, reference=int)] * 2), "two exercises have the same name"),
        (lambda: load_lab("tests.labkit.conftest"), "must define LAB"),
        (lambda: load_lab("tests.labkit.nowhere"), "there is no lab"),
    ],
)
def test_what_cannot_work_is_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


def test_a_drive_may_import_inside() -> None:
    exercise = Exercise("drive", ONE, reference=int, drive=stands_alone)
    assert exercise.drive_source is not None and exercise.drive_source.startswith("def stands_alone")
