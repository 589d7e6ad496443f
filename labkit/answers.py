"""Answers to a lab's exercises beside its solution, right and wrong; `tests/course` judges them to test the checks.

All of an exercise stand in `course/NN_name/answers/EXERCISE.py`: a table of small changes of the solution, then
programs of another shape, a cell each::

    from labkit.answers import Edit, Same

    WRONG = [
        Edit("(p - 1)", "p", mistake="The last stage begins p-1 steps after the first, not p."),
        Edit("m + p", "m", told="expected 7"),
    ]
    RIGHT = [
        Edit("(p - 1) / (v * m)", "(p - 1) / v / m"),
    ]
    EQUIVALENT = [Same("line 3: `<` for `<=`", "p is never equal to m here")]


    # %% right: exact fractions
    from fractions import Fraction
    def bubble(p, m, v): ...


    # %% wrong: stages in place of ranks
    # told: the last *rank* | each rank
    def bubble(p, m, v): ...

A wrong answer must lose points. One with a `mistake` (in a cell `# mistake: ...`) is a known mistake: learners who make
it are told this sentence (`labkit/suspects`). For others the feedback must contain the words of `told`; ` | ` separates
alternatives. Without words it suffices that points are lost. A mutant of the solution (`tests/course/mutants`) that is
right, too, is listed in EQUIVALENT. A cell `# %% empty` has the program that does nothing, where functions that return
None are none.

The table is run when it is read; a program is text, which only the judge runs.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_TABLE = {"Edit", "Same", "WRONG", "RIGHT", "EQUIVALENT"}  # other names in it begin with an underscore
_CELL = re.compile(r"^# %%(.*)\n", re.M)


class Edit:
    """The solution with some text replaced: `Edit("old text", "new text", ("more old", "more new"), told="words")`."""

    def __init__(self, old: str, new: str, *more: tuple[str, str], told: str = "", mistake: str = "") -> None:
        self.replaced, self.told, self.mistake = ((old, new), *more), told or mistake, mistake

    def applied(self, solution: str) -> str:
        """The edited solution; each old text must be there."""
        for old, new in self.replaced:
            assert old in solution, f"the solution has no text {old!r}"
            solution = solution.replace(old, new)
        return solution


@dataclass(frozen=True)
class Same:
    """A mutant of the solution that is right, too: its name or its edited line, and why."""

    mutant: str
    why: str


@dataclass(frozen=True)
class GivenAnswer:
    """One answer to one exercise.

    Attributes:
        exercise: its exercise.
        name: `EXERCISE: TITLE` of a program, `EXERCISE edit N` of an edit, counted from 1 in its table.
        right: whether full marks are due.
        source: the cell's text.
        told: words that the feedback for a wrong one must contain, alternatives between ` | `.
        mistake: the sentence that is told to learners who make this mistake; "" if it is no known one.
    """

    exercise: str
    name: str
    right: bool
    source: str
    told: str = ""
    mistake: str = ""

    def is_told(self, text: str) -> bool:
        """Whether the feedback `text` contains the words."""
        return any(words in text for words in self.told.split(" | "))


@dataclass(frozen=True)
class Answers:
    """What the file of an exercise contains: right and wrong answers, mutants that are right, and the empty program."""

    given: list[GivenAnswer]
    equivalent: list[Same]
    empty: str = ""


def answers_of(lab: str, solutions: Mapping[str, str]) -> dict[str, Answers]:
    """{exercise: its answers} of a course module, in the lab's order.

    Args:
        lab: the module, e.g. `course.01_process_groups`.
        solutions: {exercise: text of its cell, solved}, in the lab's order.
    """
    folder = Path(str(importlib.import_module(lab).__file__)).parent / "answers"
    files = {path.stem for path in folder.glob("*.py")}
    assert files == set(solutions), f"{folder}: a file for each exercise; not so {sorted(files ^ set(solutions))}"
    return {exercise: read_answers(folder / f"{exercise}.py", solution) for exercise, solution in solutions.items()}


def read_answers(path: Path, solution: str) -> Answers:
    """The answers in a file `EXERCISE.py`."""
    text, *cells = _CELL.split(path.read_text())
    table: dict[str, Any] = {}
    exec(compile(text, path, "exec"), table)  # noqa: S102  a file of the course, as far as its programs
    unknown = {name for name in table if not name.startswith("_")} - _TABLE
    assert not unknown, f"{path}: {sorted(unknown)} in the table; a constant begins with an underscore"
    exercise, empty = path.stem, ""
    given = [
        GivenAnswer(
            exercise, f"{exercise} edit {number}", name == "RIGHT", edit.applied(solution), edit.told, edit.mistake
        )
        for name in ("RIGHT", "WRONG")
        for number, edit in enumerate(table.get(name, ()), 1)
    ]
    for mark, program in zip(cells[::2], cells[1::2], strict=True):
        kind, _, title = mark.strip().partition(": ")
        source = program.strip("\n") + "\n"
        if kind == "empty":
            empty = source
            continue
        assert kind in ("right", "wrong") and title, f"{path}: `# %%{mark}` is neither right, wrong nor empty"
        said = re.match(r"# (told|mistake): (.+)", source)
        told, mistake = said[2] if said else "", said[2] if said and said[1] == "mistake" else ""
        given.append(GivenAnswer(exercise, f"{exercise}: {title}", kind == "right", source, told, mistake))
    return Answers(given, table.get("EQUIVALENT", []), empty)


def solutions(source: str) -> dict[str, str]:
    """{exercise: text of its solved cell} of a lab's `lab.py`, in its order."""
    cells = re.findall(r"^# %%\n# %%exercise (\w+)\n(.*?)(?=^# %%)", source, flags=re.S | re.M)
    marks = re.compile(r"^[ \t]*(?:// )?### (?:BEGIN|END) SOLUTION[ \t]*\n", re.M)
    return {name: marks.sub("", body) for name, body in cells}
