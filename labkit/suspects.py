"""Which known mistake is this: compares a wrong answer with what programs give that make one mistake each.

The wrong answers of a lab (`course/NN_name/answers`, `labkit/answers`) are small changes of the solution. One with a
sentence, `Edit("2 * once", "once", mistake="This is a reduce-scatter alone.")`, is a known mistake: when a learner's
answer is wrong, the judge runs the changed solution on the trials that were wrong, and where it gives the same values
in all of them, the sentence is told. So a mistake is written once, as the text that makes it.

| a wrong trial gives                      | mistakes that explain it                                              |
|------------------------------------------|-----------------------------------------------------------------------|
| other values                             | changed solutions that give the same (`Known`)                        |
| an error                                 | `Exercise.errors`, `Case.errors`: words of the error; else changed    |
|                                          | solutions that raise the same one                                     |
| right values, refused by a judge         | where there is a reference `Case.errors`: words of the judge's        |
|                                          | sentence; else none                                                   |

Told is a mistake that explains every wrong trial and is right where the learner is: on small inputs two mistakes give
the same number by chance, and a sentence that is false is worse than none. All known mistakes run on the first wrong
trial of each case; the few that explain those run on more trials, right and wrong ones (`labkit.deciding`), and one
that does not fit there is ruled out.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Collection, Sequence
from pathlib import Path

from labkit.answers import read_answers, solutions
from labkit.exercises import Exercise

_Way = int | str  # what explains a trial: a known mistake by its number, or the hint that an error's words name


@dataclasses.dataclass(frozen=True)
class Known:
    """A known mistake: what is told, and the text of the cell that makes it."""

    hint: str
    source: str


def known(course: str, exercise: str) -> tuple[dict[str, str], list[Known]]:
    """The solved cells of a course module, and the known mistakes of one exercise, in the author's order.

    Both are empty for a lab whose author has written no answers to the exercise.
    """
    folder = Path(str(importlib.import_module(course).__file__)).parent
    lab, answers = folder / "lab.py", folder / "answers" / f"{exercise}.py"
    if not (lab.is_file() and answers.is_file()):
        return {}, []
    solved = solutions(lab.read_text())
    given = read_answers(answers, solved[exercise]).given
    return solved, [Known(one.mistake, one.source) for one in given if one.mistake]


def sentences(asked: Exercise, hints: Sequence[str]) -> list[str]:
    """What can be told about an exercise, in the order in which it is asked for: of its known mistakes, of errors."""
    errors = (asked.errors, *(case.errors for case in asked.cases))
    return list(dict.fromkeys([*hints, *(hint for words in errors for hint in words.values())]))


def mistakes_of(course: str, asked: Exercise) -> list[str]:
    """The same, of an exercise of this course module."""
    return sentences(asked, [one.hint for one in known(course, asked.name)[1]])


class Suspects:
    """The mistakes of an exercise that explain every wrong trial.

    Args:
        asked: the exercise.
        hints: of its known mistakes, in order; several may share one.
    """

    def __init__(self, asked: Exercise, hints: Sequence[str] = ()) -> None:
        self._ways = dict[str, list[int]]()
        for number, hint in enumerate(hints):
            self._ways.setdefault(hint, []).append(number)
        self._hints = sentences(asked, hints)
        self._trials: list[tuple[set[_Way], bool]] = []  # of each wrong one: what explains it, who was asked
        self._out = set[int]()

    def seen(self, known: Collection[int] | None) -> None:
        """Note a wrong trial, and the known mistakes that lead to its values; None: they were not tried on it."""
        self._trials.append((set[_Way](known or ()), known is not None))

    def named(self, hint: str, tried: bool = True) -> None:
        """Note a trial that ended in an error, whose words name this mistake or none, "".

        Args:
            tried: whether no known mistake leads to this error; else they are tried on it later.
        """
        self._trials.append((set[_Way]({hint} - {""}), tried))

    def rule_out(self, way: int) -> None:
        """Note that this known mistake does not fit what the learner gives on some trial."""
        self._out.add(way)

    def suspected(self) -> list[int]:
        """The known mistakes that make `told` possible, in order."""
        return [
            way for hint in self._hints if self._explains(hint) for way in self._ways.get(hint, [])
            if way not in self._out and any(way in explain for explain, _ in self._trials)
        ]  # fmt: skip

    def told(self) -> str:
        """The first mistake that explains all of them; "" if there is none."""
        return next((hint for hint in self._hints if self._explains(hint)), "")

    def _explains(self, hint: str) -> bool:
        """Whether it explains a trial, and every other on which it was tried."""
        ways = {hint, *self._ways.get(hint, [])} - self._out
        found = [(bool(ways & explain), tried or hint not in self._ways) for explain, tried in self._trials]
        return any(one for one, _ in found) and all(one or not tried for one, tried in found)
