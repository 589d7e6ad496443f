"""Which known mistake is this: compares a wrong answer with what programs give that make one mistake each.

The wrong answers of a lab (`course/NN_name/answers`, `labkit/answers`) are small changes of the solution. One with a
sentence, `Edit("2 * once", "once", mistake="This is a reduce-scatter alone.")`, is a known mistake: when a learner's
answer is wrong, the judge runs the changed solution on the trials that were wrong, and where it gives the same values
in all of them, the sentence is told. So a mistake is written once, as the text that makes it.

| a wrong trial gives                      | mistakes that explain it                                              |
|------------------------------------------|-----------------------------------------------------------------------|
| other values                             | changed solutions that give the same (`Known`); `Exercise.mistakes`   |
| an error                                 | `Exercise.errors`, `Case.errors`: words of the error                  |
| right values, refused by a judge         | none, where there is a reference: the judge's sentence says it        |

Told is a mistake that explains every wrong trial: on small inputs two mistakes give the same number by chance, and a
sentence that is false is worse than none.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from labkit.answers import read_answers, solutions
from labkit.exercises import Exercise, Mistake


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


class Suspects:
    """The mistakes of an exercise that explain every wrong trial.

    Args:
        asked: the exercise.
        hints: of its known mistakes, in order.
    """

    def __init__(self, asked: Exercise, hints: Sequence[str] = ()) -> None:
        self._known, self._ways = set(hints), dict[str, list[Mistake]]()
        for mistake in asked.mistakes:
            self._ways.setdefault(mistake.hint, []).append(mistake)
        of_errors = [
            hint for errors in (asked.errors, *(case.errors for case in asked.cases)) for hint in errors.values()
        ]
        self._hints = list(dict.fromkeys([*hints, *self._ways, *of_errors]))
        self._trials: list[tuple[set[str], set[str]]] = []  # of each wrong one: what explains it, what says nothing

    def seen(self, gives_it: Callable[[Mistake], bool | None], known: Collection[str] | None = None) -> None:
        """Note a wrong trial.

        Args:
            gives_it: whether a mistake leads to the learner's answer; None: it says nothing about these inputs.
            known: hints of the known mistakes that do; None: they were not tried on this trial.
        """
        said = {hint: {gives_it(way) for way in ways} for hint, ways in self._ways.items()}
        explain = {hint for hint, found in said.items() if True in found} | set(known or ())
        silent = {hint for hint, found in said.items() if found == {None}} | (self._known if known is None else set())
        self._trials.append((explain, silent - explain))

    def named(self, hint: str) -> None:
        """Note a trial that ended in an error, whose words name this mistake or none, ""."""
        self._trials.append(({hint} - {""}, set()))

    def told(self) -> str:
        """The first mistake that explains all of them; "" if there is none."""
        for hint in self._hints:
            found = [(hint in explain, hint in silent) for explain, silent in self._trials]
            if any(one for one, _ in found) and all(one or other for one, other in found):
                return hint
        return ""
