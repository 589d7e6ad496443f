"""No variant of a solution that differs by one wrong step gets full marks, in any lab.

Those that survive are right in another way, and listed with the reason among the exercise's answers. All take half an
hour.
"""

from __future__ import annotations

import pytest

from labkit.fresh import Nursery
from tests.course.marked import LABS
from tests.course.mutants import Course

pytestmark = pytest.mark.thorough
COURSES = {name: Course(name) for name in LABS}
EXERCISES = [(name, exercise) for name, course in COURSES.items() for exercise in course.lab.exercises]


@pytest.mark.parametrize(("name", "exercise"), EXERCISES)
def test_all_mutants_are_killed(nursery: Nursery, name: str, exercise: str) -> None:
    course = COURSES[name]
    made = course.mutants(exercise)
    survivors = [f"{one.name}   {one.edited}" for one in made if course.survives(nursery, one)]
    assert survivors == [], f"{len(survivors)} of {len(made)} get full marks; a case misses a fixed trial"


@pytest.mark.parametrize("name", COURSES)
def test_what_is_listed_as_equivalent_is_still_a_mutant(name: str) -> None:
    assert COURSES[name].unknown() == []
    assert all(one.why for listed in COURSES[name].equivalent.values() for one in listed)


@pytest.mark.parametrize(("name", "exercise"), EXERCISES)
def test_every_exercise_has_mutants(name: str, exercise: str) -> None:
    """Of its own solution, and in no line that the learner is given."""
    course = COURSES[name]
    cell, made = course.cells[exercise], course.mutants(exercise)
    given = [line for number, line in enumerate(cell.text.splitlines(), 1) if number not in cell.solution]
    assert cell.text == LABS[name].solutions[exercise].rstrip() + "\n"
    assert len(made) >= 2 and len({one.name for one in made}) == len(made)
    for one in made:
        assert all(line in one.source.splitlines() for line in given), one.name
