"""Answers to a lab's exercises beside its solution, right and wrong; `tests/course` judges them to test the checks.

| in the lab's folder                       | contents                                                           |
|-------------------------------------------|--------------------------------------------------------------------|
| `answers/right/EXERCISE_1.py`             | a whole program that is right in another way than the solution     |
| `answers/wrong/EXERCISE_what_is_wrong.py` | a whole program that is wrong; first line: `# told: words`         |
| `answers/empty/EXERCISE.py`               | a program that does nothing, for functions that return None        |
| `mistakes.py`                             | RIGHT and WRONG, {exercise: [`Edit`, ...]}: edits of the solution  |
|                                           | EQUIVALENT, {exercise: [`Same`, ...]}: mutants that are right      |

A wrong answer must lose points, and the feedback must contain the words of `told`. ` | ` separates alternatives.
Without words it suffices that points are lost.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path


class Edit:
    """The solution with some text replaced: `Edit("old text", "new text", ("more old", "more new"), told="words")`."""

    def __init__(self, old: str, new: str, *more: tuple[str, str], told: str = "") -> None:
        self.replaced, self.told = ((old, new), *more), told

    def applied(self, solution: str) -> str:
        """The edited solution; each old text must be there."""
        for old, new in self.replaced:
            assert old in solution, f"the solution has no text {old!r}"
            solution = solution.replace(old, new)
        return solution


@dataclass(frozen=True)
class Same:
    """A mutant of the solution (`labkit/mutants`) that is right, too: its name or its edited line, and why."""

    mutant: str
    why: str


@dataclass(frozen=True)
class GivenAnswer:
    """One answer to one exercise.

    Attributes:
        exercise: its exercise.
        name: name of its file, or `EXERCISE edit N`, counted from 1 in the table.
        right: whether full marks are due.
        source: the cell's text.
        told: words that the feedback for a wrong one must contain, alternatives between ` | `.
    """

    exercise: str
    name: str
    right: bool
    source: str
    told: str = ""

    def is_told(self, text: str) -> bool:
        """Whether the feedback `text` contains the words."""
        return any(words in text for words in self.told.split(" | "))


def answers_of(lab: str, solutions: Mapping[str, str]) -> list[GivenAnswer]:
    """The right and the wrong answers of a course module, exercise by exercise, edits before whole programs.

    Args:
        lab: the module, e.g. `course.01_process_groups`.
        solutions: {exercise: text of its cell, solved}, in the lab's order.
    """
    found = [*_edited(lab, solutions), *_programs(folder_of(lab), solutions)]
    order = list(solutions)
    return sorted(found, key=lambda answer: order.index(answer.exercise))


def folder_of(lab: str) -> Path:
    """The folder of the answers of a course module."""
    return Path(str(importlib.import_module(lab).__file__)).parent / "answers"


def _edited(lab: str, solutions: Mapping[str, str]) -> Iterator[GivenAnswer]:
    mistakes = importlib.import_module(f"{lab}.mistakes")
    for right, table in ((True, mistakes.RIGHT), (False, mistakes.WRONG)):
        for exercise, edits in table.items():
            for number, edit in enumerate(edits, 1):
                source = edit.applied(solutions[exercise])
                yield GivenAnswer(exercise, f"{exercise} edit {number}", right, source, edit.told)


def _programs(folder: Path, solutions: Mapping[str, str]) -> Iterator[GivenAnswer]:
    for right in (True, False):
        for path in sorted((folder / ("right" if right else "wrong")).glob("*.py")):
            source = path.read_text()
            told = re.match(r"# told: ?(.*)", source)
            assert right or told, f"{path}: the first line of a wrong answer is `# told: words`"
            words = told[1] if told and not right else ""
            yield GivenAnswer(_exercise_of(path, solutions), path.stem, right, source, words)


def _exercise_of(path: Path, solutions: Mapping[str, str]) -> str:
    """The exercise with which a file's name begins; the longest such name."""
    names = [name for name in solutions if path.stem.startswith(f"{name}_")]
    assert names, f"{path}: a file of answers is named EXERCISE_something.py"
    return max(names, key=len)
