"""What every exercise has for a learner who fails: a case to check by hand, an idea, words that are short.

| what is asked of an exercise                    | because                                                |
|-------------------------------------------------|--------------------------------------------------------|
| a visible case of at most 64 numbers a rank     | a reader can check it by hand                          |
| an idea                                         | the first failure points the way, the hint comes later |
| an idea and mistakes of at most 200 characters  | they are one thought each                              |
| neither holds a piece of the solution's code    | the recipe is for the third failure (`Exercise.hint`)  |
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from labkit.exercises import Case, Exercise
from tests.course.marked import LABS

TINY = 64  # numbers in all tensors of a rank
LONGEST = 200  # characters of an idea, or of what a mistake is
CODE = 10  # characters, without spaces, that a text may have in common with the solution's code

# Their texts name the formula, or the argument, itself.
SAY_CODE = {"merge", "overlap", "ring_forward", "piece_backward", "fsdp2"}


def numbers(inputs: Any) -> int:
    """In all tensors, whatever they stand in. Of a file, whose tensor is of bytes, a case's name says what is in it."""
    if isinstance(inputs, torch.Tensor):
        return 0 if inputs.dtype == torch.uint8 else inputs.numel()
    if isinstance(inputs, dict | list | tuple):
        return sum(map(numbers, inputs.values() if isinstance(inputs, dict) else inputs))
    return 0


def has_a_tiny_case(exercise: Exercise) -> bool:
    shown = [case.draw("") for case in exercise.cases if not case.hidden]
    return any(max(map(numbers, given)) <= TINY if isinstance(given, list) else numbers(given) <= TINY
               for given in shown)  # fmt: skip


def texts(lab: str, name: str) -> list[str]:
    """What is said at the first two failures."""
    exercise = LABS[lab].lab[name]
    known = [answer.mistake for answer in LABS[lab].given[name].given if answer.mistake]
    return [exercise.idea, *known, *(said for one in (exercise, *exercise.cases) for said in one.errors.values())]


def says_code(text: str, solution: str) -> bool:
    """Whether it holds a piece of the solution that is no plain English."""
    said = re.sub(r"\s+", "", text)
    code = re.sub(r"\s+", "", re.sub(r'""".*?"""|#[^\n]*', "", solution, flags=re.S))
    pieces = {said[at : at + CODE] for at in range(len(said) - CODE + 1)}
    return any(piece in code and re.search(r"[][(=*/%@]", piece) for piece in pieces)


@pytest.mark.parametrize("lab", LABS)
def test_every_exercise_has_a_visible_case_to_check_by_hand(lab: str) -> None:
    assert [name for name, exercise in LABS[lab].lab.exercises.items() if not has_a_tiny_case(exercise)] == []


@pytest.mark.parametrize("lab", LABS)
def test_every_exercise_has_an_idea_and_a_hint(lab: str) -> None:
    assert [name for name, one in LABS[lab].lab.exercises.items() if not (one.hint and one.idea)] == []


@pytest.mark.parametrize("lab", LABS)
def test_ideas_and_mistakes_are_short_and_no_recipe(lab: str) -> None:
    exercises = LABS[lab].lab.exercises
    long = [text for name in exercises for text in texts(lab, name) if len(text) > LONGEST]
    assert long == []
    solutions = LABS[lab].solutions
    telling = {
        name for name, one in exercises.items() if any(says_code(text, solutions[name]) for text in texts(lab, name))
    }
    assert telling <= SAY_CODE


def test_a_piece_of_code_is_seen() -> None:
    solution = 'def f(x):\n    """Scale it: x / amax."""\n    y = torch.maximum(x, low)\n    return y / low.sum()'
    assert says_code("Write y = torch.maximum( x,low ) here.", solution)
    assert says_code("Return y/low.sum().", solution)
    assert not says_code("Scale it: x / amax.", solution), "the docstring stands in the lab"
    assert not says_code("The maximum of x and low, divided by the sum of low.", solution)


def test_a_case_is_tiny_by_its_tensors_on_each_rank() -> None:
    def one(inputs: Any, **more: Any) -> Exercise:
        return Exercise("f", [Case("a", inputs, **more)], lambda **_: 0)

    assert has_a_tiny_case(one({"p": 10**6}))
    assert has_a_tiny_case(one([{"x": torch.ones(8, 8)}, {"x": [torch.ones(32), torch.ones(32)]}]))
    assert not has_a_tiny_case(one([{"x": torch.ones(2)}, {"x": torch.ones(65)}]))
    assert not has_a_tiny_case(one({"x": {"y": (torch.ones(64), torch.ones(1))}}))
    assert not has_a_tiny_case(one({"p": 1}, hidden=True))
