"""The source of a lab: read, checked against its rules, and turned into two notebooks that have not run yet.

| written in `course/NN_name/lab.py`             | becomes                                                       |
|------------------------------------------------|---------------------------------------------------------------|
| `# %lab NN_name` in the first code cell        | must be the folder's name                                     |
| `### BEGIN SOLUTION` ... `### END SOLUTION`    | in the lab: `raise NotImplementedError("your code here")`     |
| the same after `// `, in a kernel's text       | in the lab: `not_implemented("your code here");`              |
| tag `solution-only`                            | not in the lab                                                |
| tag `raises-exception`                         | the cell may end in an error                                  |
| tag `nbval-ignore-output`                      | nbval runs the cell without comparing                         |
| tag `hide-output`                              | the same, and its output is not stored: an answer to guess    |
| `# %% jupyter={"source_hidden": true}`         | folded: a title bar, until the learner opens it               |

A given cell of more than 35 lines must be folded, or shortened, or moved behind an import. A cell in which the learner
writes is never folded.

Cell ids come from what a cell is (`exercise-ring`, `check-ring`, a heading), so that inserting a cell changes no other.

Exercise and check cells have nbgrader's metadata (its schema 3), so that a course on nbgrader can import a lab:

| cell                          | grade | solution | locked | points                                     |
|-------------------------------|-------|----------|--------|--------------------------------------------|
| `%%exercise NAME`             | no    | yes      | no     |                                            |
| the first `check("NAME")`     | yes   | no       | yes    | those of the exercise                      |
| a later `check("NAME")`       | no    | no       | yes    |                                            |
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jupytext
import nbformat

from labkit.exercises import Lab, load_lab
from labkit.player import STUB
from minimegatron.commands.my_labs import digest
from minimegatron.errors import ConfigError

_SOLUTION = re.compile(
    r"^(?P<indent>[ \t]*)(?P<cuda>// )?### BEGIN SOLUTION\n(.*?)^[ \t]*(?:// )?### END SOLUTION[ \t]*$", re.S | re.M
)
_GUESS = re.compile(r"^guess(ed)?\(\s*[\"'](\w+)[\"']", re.M)
OPEN_LINES = 35  # of a given cell that is not folded
HIDDEN = "hide-output"
_MARKER = re.compile(r"^[ \t]*(?:// )?### (?:BEGIN|END) SOLUTION[ \t]*\n?", re.M)


def notebooks(source: Path) -> Iterator[tuple[Any, Path]]:
    """The solution and the lab of a source, not run, each with the path where it is stored.

    Raises:
        ConfigError: the source breaks a rule; the message names the cell and the rule.
    """
    cells = jupytext.read(source, fmt="py:percent").cells
    _obey_rules(cells, source)
    root, name = source.parents[2], name_of(source)
    yield _notebook(cells, source, lab=False), root / "solutions" / f"{name}.ipynb"
    yield _notebook(cells, source, lab=True), root / "labs" / f"{name}.ipynb"


def name_of(source: Path) -> str:
    """The lab's name: that of the folder in which its source `lab.py` and its checks lie."""
    return source.parent.name


def _shown(source: Path) -> str:
    """A source as messages and notebooks name it: course/NN_name/lab.py."""
    return "/".join(source.parts[-3:])


def checked(cell: Any) -> str | None:
    """The exercise that the last line of a cell checks."""
    match = re.search(r'^check\(["\'](\w+)["\']\)\s*\Z', cell.source, re.M) if cell.cell_type == "code" else None
    return match[1] if match else None


def edited(notebook: Any) -> bool:
    """Whether a stored notebook holds other cells than the build wrote."""
    return bool(notebook.metadata.get("minimegatron", {}).get("digest") != digest(notebook))


def _obey_rules(cells: list[Any], source: Path) -> None:
    lab = _lab_of(cells, source)
    seen: list[str] = []
    asked: set[str | None] = set()
    scripts: set[str] = set()
    guesses: set[str] = set()
    for number, cell in enumerate(cells, 1):
        where = f"{_shown(source)}, cell {number}: {cell.source.strip().split(chr(10))[0]}"
        name = _argument(cell, "%%exercise")
        begins, ends = (cell.source.count(f"### {word} SOLUTION") for word in ("BEGIN", "END"))
        if begins != ends or len(_SOLUTION.findall(cell.source)) != begins:
            raise ConfigError("BEGIN SOLUTION and END SOLUTION do not match", where=where)
        if begins and name is None:
            raise ConfigError("a solution outside of an exercise", where=where, fix="put %%exercise NAME above it")
        if name is not None:
            lab[name]
            if name in seen:
                raise ConfigError(f"exercise {name} is there twice", where=where)
            if not begins:
                raise ConfigError("an exercise with nothing to do", where=where, fix="mark ### BEGIN SOLUTION and END")
            seen.append(name)
        _obey_folding(cell, name, where)
        _obey_guessing(cell, guesses, where)
        for need in _needs(cell):
            if need not in seen:
                raise ConfigError(f"it needs exercise {need}, which is not above it", where=where)
        script = re.search(r"--name[ =](\S+)", cell.source.splitlines()[0]) if _magic(cell) else None
        if script and script[1] in scripts:
            raise ConfigError(
                f"two cells are called {script[1]}", where=where, fix="give each script a --name of its own"
            )
        scripts |= {script[1]} if script else set()
        asked |= {checked(cell)}
    if missing := [name for name in lab.exercises if name not in seen or name not in asked]:
        raise ConfigError(
            f"{', '.join(missing)}: not in the source, or never checked", where=_shown(source),
            fix='every exercise of the course module has a cell %%exercise NAME and one check("NAME")',
        )  # fmt: skip


def _obey_folding(cell: Any, exercise: str | None, where: str) -> None:
    """A given cell is short or folded; a cell in which the learner writes is open."""
    if cell.cell_type != "code":
        return
    folded, lines = _folded(cell), cell.source.count("\n") + 1
    if folded and (exercise or checked(cell)):
        raise ConfigError("an exercise and its check are never folded", where=where)
    if not (folded or exercise) and lines > OPEN_LINES:
        raise ConfigError(
            f"an open cell of {lines} lines, where {OPEN_LINES} are allowed", where=where,
            fix='fold it, # %% jupyter={"source_hidden": true}, or move it behind an import',
        )  # fmt: skip


def _folded(cell: Any) -> bool:
    return bool(cell.metadata.get("jupyter", {}).get("source_hidden"))


def _obey_guessing(cell: Any, guesses: set[str], where: str) -> None:
    """`guess` comes before `guessed`, and has no number in it."""
    for shown, name in _GUESS.findall(cell.source) if cell.cell_type == "code" else ():
        if shown and name not in guesses:
            raise ConfigError(f'guessed("{name}") without a guess("{name}") above it', where=where)
        if not shown and name in guesses:
            raise ConfigError(f'guess("{name}") is there twice', where=where)
        if not shown and not re.search(rf"""^guess\(\s*["']{name}["'],\s*None\b""", cell.source, re.M):
            raise ConfigError(
                f'guess("{name}") begins with a number', where=where, fix="the number is None in a source"
            )
        guesses |= {name}


def _lab_of(cells: list[Any], source: Path) -> Lab:
    found = [m for c in cells if c.cell_type == "code" and (m := re.search(r"^%lab (\S+)(?: (\S+))?$", c.source, re.M))]
    if len(found) != 1 or found[0][1] != name_of(source):
        raise ConfigError(
            "a source opens its lab once, under its own name", where=_shown(source),
            fix=f"first code cell: %load_ext course, then %lab {name_of(source)}",
        )  # fmt: skip
    return load_lab(found[0][2] or f"{source.parent.parent.name}.{name_of(source)}")


def _magic(cell: Any) -> str | None:
    match = re.match(r"%%(\w+)", cell.source) if cell.cell_type == "code" else None
    return match[1] if match else None


def _argument(cell: Any, magic: str) -> str | None:
    match = re.match(rf"{magic}[ \t]+(\w+)[ \t]*$", cell.source, re.M) if cell.cell_type == "code" else None
    return match[1] if match else None


def _needs(cell: Any) -> list[str]:
    if _magic(cell) == "needs":
        return list(cell.source.splitlines()[0].split()[1:])
    words = shlex.split(cell.source.splitlines()[0]) if _magic(cell) in ("torchrun", "ranks") else []
    return [n for i, word in enumerate(words) if word == "--needs" for n in words[i + 1].split(",")]


def _notebook(cells: list[Any], source: Path, *, lab: bool) -> Any:
    metadata = {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    built = nbformat.v4.new_notebook(metadata=metadata)
    ids: set[str] = set()
    points = {name: exercise.points for name, exercise in _lab_of(cells, source).exercises.items()}
    for cell in cells:
        tags = list(cell.metadata.get("tags", []))
        if lab and "solution-only" in tags:
            continue
        text = _SOLUTION.sub(_stub, cell.source) if lab else _MARKER.sub("", cell.source)
        new = nbformat.v4.new_markdown_cell if cell.cell_type == "markdown" else nbformat.v4.new_code_cell
        made = new(text, id=_identity(cell, ids), metadata={"tags": _tags_of_nbval(tags)} if tags else {})
        if _folded(cell):
            made.metadata["jupyter"] = {"source_hidden": True}
        _let_nbgrader_know(cell, made, points)
        built.cells.append(made)
    built.metadata["minimegatron"] = {"source": _shown(source), "digest": digest(built)}
    nbformat.validate(built)
    return built


def _tags_of_nbval(tags: list[str]) -> list[str]:
    """With the tag that lets nbval run a cell whose output is not stored."""
    return [*tags, "nbval-ignore-output"] if HIDDEN in tags and "nbval-ignore-output" not in tags else tags


def _stub(solution: re.Match[str]) -> str:
    """The stub in a solution's place: Python, or in a kernel CUDA C++."""
    cuda = f'not_implemented("{STUB}");'
    return solution["indent"] + (cuda if solution["cuda"] else f'raise NotImplementedError("{STUB}")')


def _identity(cell: Any, taken: set[str]) -> str:
    """A cell's id from what it is; the same in the lab and in the solution."""
    heading = re.match(r"#+ (.+)", cell.source) if cell.cell_type == "markdown" else None
    script = re.search(r"--name[ =](\w+)", cell.source.split("\n", 1)[0])
    if name := _argument(cell, "%%exercise"):
        base = f"exercise-{name}"
    elif name := checked(cell):
        base = f"check-{name}"
    elif _magic(cell) and script:
        base = f"{_magic(cell)}-{script[1]}"
    elif heading:
        base = re.sub(r"[^a-z0-9]+", "-", heading[1].lower()).strip("-")
    else:
        base = f"{cell.cell_type}-{hashlib.sha256(cell.source.encode()).hexdigest()[:8]}"
    identity, again = base[:56], 1
    while identity in taken:
        again += 1
        identity = f"{base[:56]}-{again}"
    taken.add(identity)
    return identity


def _let_nbgrader_know(cell: Any, made: Any, points: dict[str, int]) -> None:
    """Write nbgrader's metadata; takes the points of an exercise out of `points` with its first check."""
    name, asked = _argument(cell, "%%exercise"), checked(cell)
    if not (name or asked):
        return
    said = {"schema_version": 3, "grade": asked in points, "task": False, "solution": bool(name), "locked": not name}
    made.metadata["nbgrader"] = {**said, "grade_id": made.id}
    if asked in points:
        made.metadata["nbgrader"]["points"] = points.pop(asked)
    made.metadata["deletable"] = False
    if asked:
        made.metadata["editable"] = False
