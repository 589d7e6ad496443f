"""Wrong variants of a solution, made by rules, to test the checks.

The problem in a sentence: a check accepts every wrong answer that its author did not think of; a machine can try all
that are one small step from the solution.

    solution ──> syntax tree ──> one edit at each place ──> a cell that differs in one expression ──> judge
                                                                                     killed: fewer points
                                                                                     survives: full marks

The edits are those that learners make: a reduction or its group left out, another dim, a bound off by one, a factor too
many, `>` for `>=`, a missing copy, a wait too early, a world of two taken for granted. Each is applied to every
place of the solution where it fits, and to no line that the learner is given; a lab may have further ones
(`course/NN_name/given/edits.py`). A survivor either shows what a case must fix (`Case.fixed`), or is right in another
way: then the file of the exercise's answers lists it with the reason::

    EQUIVALENT = [Same("line 3: `<` for `<=`", "p is never equal to m here")]

    python -m tests.course.mutants 01                     # survivors of lab 01
    python -m tests.course.mutants 01 bytes_sent          # of one exercise

Kinds of edits after DeMillo, Lipton and Sayward, "Hints on test data selection" (1978), and Offutt et al., "An
experimental determination of sufficient mutant operators" (1996).
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from pathlib import Path

from tqdm import tqdm

from labkit.answers import Same, answers_of
from labkit.edits import edits
from labkit.exercises import Lab, load_lab
from labkit.fresh import Nursery
from labkit.judge import judge
from minimegatron.errors import ConfigError

Edits = Callable[[str, Set[int]], Iterator[tuple[int, str, str]]]
SECONDS = 6.0  # for one case of a mutant: most that are later than that hang


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One wrong variant of a cell.

    Attributes:
        exercise: its exercise.
        name: the line of the cell and the edit: "line 7: `group` dropped".
        edited: the edited line, or the first of them.
        source: the whole cell.
    """

    exercise: str
    name: str
    edited: str
    source: str


@dataclasses.dataclass(frozen=True)
class Cell:
    """A solved cell, and which of its lines are the solution's."""

    text: str
    solution: frozenset[int]


def cells(lab_source: str) -> dict[str, Cell]:
    """{exercise: its solved cell} of a lab's `lab.py`."""
    found = {}
    for name, body in re.findall(r"^# %%\n# %%exercise (\w+)\n(.*?)(?=^# %%)", lab_source, flags=re.S | re.M):
        lines, solution, inside = [], set(), False
        for line in body.splitlines():
            if mark := re.match(r"\s*(?:// )?### (BEGIN|END) SOLUTION", line):
                inside = mark[1] == "BEGIN"
                continue
            lines.append(line)
            if inside:
                solution.add(len(lines))
        found[name] = Cell("\n".join(lines).rstrip() + "\n", frozenset(solution))
    return found


def mutants(exercise: str, cell: Cell, own: Edits | None = None) -> list[Mutant]:
    """All variants of a cell that are different and can be compiled; each has a name of its own.

    Args:
        own: further edits, of the lab: (text, lines) -> (line, what was done, the whole cell) of each.
    """
    tree = ast.parse(cell.text)
    seen, named = {ast.dump(tree)}, dict[str, int]()
    found = []
    more = own(cell.text, cell.solution) if own else ()
    for line, what, source in sorted([*edits(cell.text, cell.solution), *more]):
        try:
            dumped = ast.dump(ast.parse(source))
        except SyntaxError:
            continue
        if dumped in seen:
            continue
        seen.add(dumped)
        name = f"line {line}: {what}"
        named[name] = named.get(name, 0) + 1
        name += f" ({named[name]})" if named[name] > 1 else ""
        found.append(Mutant(exercise, name, source.splitlines()[line - 1].strip(), source))
    return found


class Course:
    """A lab whose mutants are judged; `name` is the notebook's, e.g. `01_process_groups`."""

    def __init__(self, name: str) -> None:
        self.name, self.module = name, f"course.{name}"
        self.lab: Lab = load_lab(self.module)
        has_own = (Path(str(sys.modules[self.module].__file__)).parent / "given" / "edits.py").is_file()
        self._own = importlib.import_module(f"course.lab{name[:2]}.edits").edits if has_own else None
        folder = Path(str(importlib.import_module(self.module).__file__)).parent
        self.cells = cells((folder / "lab.py").read_text())
        given = answers_of(self.module, {name: cell.text for name, cell in self.cells.items()})
        self.equivalent: Mapping[str, Sequence[Same]] = {name: answers.equivalent for name, answers in given.items()}

    def mutants(self, exercise: str) -> list[Mutant]:
        """The mutants that must be killed."""
        same = {one.mutant for one in self.equivalent.get(exercise, ())}
        return [one for one in mutants(exercise, self.cells[exercise], self._own) if not {one.name, one.edited} & same]

    def unknown(self) -> list[str]:
        """Entries of EQUIVALENT that no longer name a mutant."""
        return [
            f"{exercise}: {one.mutant}"
            for exercise, listed in self.equivalent.items()
            for one in listed
            if not any(one.mutant in (m.name, m.edited) for m in mutants(exercise, self.cells[exercise], self._own))
        ]

    def survives(self, nursery: Nursery, mutant: Mutant, seeds: Sequence[str] = ("1",)) -> bool:
        """Whether it gets full marks with one of the seeds."""
        sources = {name: cell.text for name, cell in self.cells.items()} | {mutant.exercise: mutant.source}
        asked = self.lab.exercises[mutant.exercise]
        self.lab.exercises[mutant.exercise] = dataclasses.replace(asked, seconds=min(asked.seconds, SECONDS))
        try:
            return any(
                judge(nursery, self.module, mutant.exercise, sources, seed, brief=True).state == "passed"
                for seed in seeds
            )
        finally:
            self.lab.exercises[mutant.exercise] = asked


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "python -m tests.course.mutants", description="Wrong variants that get full marks."
    )
    parser.add_argument("lab", help="its number or name")
    parser.add_argument("exercises", nargs="*", help="by default all")
    parser.add_argument("--seeds", type=int, default=1, help="gradings of each; one with full marks is enough (1)")
    parser.add_argument("--list", action="store_true", help="name the mutants, judge none")
    options = parser.parse_args(argv)
    names = [path.parent.name for path in Path("course").glob("[0-9][0-9]_*/lab.py")]
    name = next((name for name in names if options.lab in (name, name.split("_")[0])), None)
    if name is None:
        raise ConfigError(f"there is no lab `{options.lab}` here", fix=f"one of {', '.join(sorted(names))}")
    course = Course(name)
    wanted = [one for exercise in options.exercises or course.lab.exercises for one in course.mutants(exercise)]
    if options.list:
        print("\n".join(f"{one.exercise}  {one.name}  {one.edited}" for one in wanted))
        return 0
    survivors = []
    for one in _survivors(course, wanted, [str(seed) for seed in range(options.seeds)]):
        survivors.append(one)
        tqdm.write(f"{one.exercise}  {one.name}\n    {one.edited}")
        sys.stdout.flush()
    print(f"{course.name}: {len(survivors)} of {len(wanted)} mutants survive")
    return 1 if survivors else 0


def _survivors(course: Course, wanted: Sequence[Mutant], seeds: Sequence[str]) -> Iterator[Mutant]:
    with Nursery() as nursery, tqdm(wanted, unit="mutant") as bar:
        for one in bar:
            bar.set_postfix_str(one.exercise)
            if course.survives(nursery, one, seeds):
                yield one


if __name__ == "__main__":
    sys.exit(main())
