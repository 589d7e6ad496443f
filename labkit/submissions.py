"""Takes submissions apart without running any of them.

    folder ── handed_in ──> files of each learner ── notebook_file ──> cells ── here ──> {exercise: text}, by lab

An exercise is the cell whose first line is `%%exercise NAME`, at any place; outputs and everything else are
ignored. The lab is that of the line `%lab NAME`; else the lab that has most of the exercises; else the one in the
notebook's metadata; else the lab that the instructor named. A module named in a notebook is never imported.

Names of exercises become names of files later, so only those of the lab are accepted. Whatever one learner submitted,
the others are graded: an unexpected exception is 0 for this one, with its class in the remarks, and counts
as a fault of this program.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from labkit.exercises import Lab
from labkit.handed_in import Work, learners
from labkit.notebook_file import read_cells
from minimegatron.errors import DataError, did_you_mean

MAX_CELL = 1 << 20  # characters of one exercise
_MAX_REMARKS = 20
_MAX_NAME = 80  # no exercise and no lab has a longer one
_MAGIC = re.compile(r"\s*%%exercise\b[ \t]*(\S*)[^\n]*(?:\n|\Z)")
_LATE_MAGIC = re.compile(r"^%%exercise\b", re.M)
_ODD_MODULES = (
    "labkit", "torch._C", "torch.utils._python_dispatch", "torch.distributed.distributed_c10d", "builtins", "ctypes",
    "fcntl", "gc", "importlib", "inspect", "os", "resource", "signal", "socket", "subprocess", "sys",
)  # fmt: skip
_FOR_LABS = ("labkit.hbm", "labkit.watched", "labkit.evidence.Witness")  # which learners do import
_ODD_NAMES = {"__builtins__", "__import__", "eval", "exec", "globals", "setattr", "vars"}
_ODD_ATTRIBUTES = {"__dict__", "__globals__", "__subclasses__", "_getframe"}
_LAB = re.compile(r"^[ \t]*%lab[ \t]+(\S+)", re.M)


@dataclasses.dataclass(frozen=True)
class Submission:
    """One learner's work on one lab.

    Attributes:
        learner: name of the file or folder.
        lab: name of the lab; "" if it is not known.
        file: the notebook that counts, relative to the submissions; "" without one.
        sources: {exercise: text of its cell}, as `check` would have saved them.
        remarks: remarks for the instructor, one line each.
        reason: why nothing of it can be graded; "" if it can.
        fault: the exception, if the reason is a fault of this program.
    """

    learner: str
    lab: str = ""
    file: str = ""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    reason: str = ""
    fault: str = ""

    @property
    def digest(self) -> str:
        """A digest of everything that a mark depends on."""
        known = dataclasses.asdict(self) | {"sources": sorted(self.sources.items())}
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()


def collect(root: Path, labs: Mapping[str, Lab], only: str = "") -> list[Submission]:
    """All submissions in a folder, sorted by learner and lab.

    Args:
        root: the folder.
        labs: the labs there are, by name.
        only: the one lab that is graded; by default each notebook says its own.
    Raises:
        ConfigError: there is no such folder.
        DataError: nothing in it can be a submission.
    """
    found = [one for work in learners(root) for one in _safely(root, work, labs, only)]
    if not found:
        raise DataError(f"no submission in {root}", fix="it should hold NAME.ipynb or NAME/any.ipynb for each learner")
    named = {one.lab for one in found if one.lab}
    default = only or (named.pop() if len(named) == 1 else "")
    found = [dataclasses.replace(one, lab=one.lab or default) for one in found]
    return sorted(found, key=lambda one: (one.learner, one.lab))


def _safely(root: Path, work: Work, labs: Mapping[str, Lab], only: str) -> list[Submission]:
    """The submissions of one learner, each with remarks about what was not read."""
    try:
        found = _of_learner(root, work.learner, work.files, labs, only) if work.files else []
        found = found or [Submission(work.learner, only, reason=work.reason)]
    except Exception as error:  # whatever a stranger's file has brought about ends here
        fault = f"{type(error).__name__}: {error}"[:200]
        found = [Submission(work.learner, only, reason=f"it could not be read ({fault})", fault=fault)]
    said = [remark for remark in work.remarks if remark != found[0].reason]
    found[0] = dataclasses.replace(found[0], remarks=(*found[0].remarks, *said))
    return [dataclasses.replace(one, remarks=_few(one.remarks)) for one in found]


def _few(remarks: tuple[str, ...]) -> tuple[str, ...]:
    more = len(remarks) - _MAX_REMARKS
    return (*remarks[:_MAX_REMARKS], f"and {more} more remarks") if more > 0 else remarks


def _of_learner(root: Path, learner: str, files: list[Path], labs: Mapping[str, Lab], only: str) -> list[Submission]:
    read = [_read(root, learner, path, labs, only) for path in files]
    by_lab: dict[str, list[Submission]] = {}
    for one in read:
        if not one.reason:
            by_lab.setdefault(one.lab, []).append(one)
    unread = tuple(f"{one.file}: {one.reason}" for one in read if one.reason)
    if not by_lab:
        first = read[0]
        return [dataclasses.replace(first, remarks=(*first.remarks, *unread[1:]))]
    chosen = []
    for lab, candidates in by_lab.items():
        best = max(candidates, key=lambda one: (Path(one.file).stem == lab, one.file))
        others = tuple(f"{one.file} is not graded, {best.file} is" for one in candidates if one is not best)
        chosen.append(dataclasses.replace(best, remarks=(*best.remarks, *others)))
    chosen[0] = dataclasses.replace(chosen[0], remarks=(*chosen[0].remarks, *unread))
    return chosen


def _read(root: Path, learner: str, path: Path, labs: Mapping[str, Lab], only: str) -> Submission:
    file = path.relative_to(root).as_posix()
    try:
        cells, metadata = read_cells(path)
    except DataError as error:
        return Submission(learner, only, file, reason=error.what)
    written, remarks = exercises(cells)
    name = _which_lab(cells, metadata, written, labs) or only
    if name not in labs:
        reason = f"it is of lab {name}, which is not known here" if name else "nothing in it says which lab it is"
        return Submission(learner, only, file, reason=reason)
    if only and name != only:
        return Submission(learner, only, file, reason=f"it is of lab {name}; this is the grading of {only}")
    lab = labs[name]
    unknown = [one for one in written if one not in lab.exercises]
    for one in unknown[:_MAX_REMARKS]:
        near = did_you_mean(one, lab.exercises)
        remarks.append(f"there is no exercise `{one}` in this lab{'; ' + near if near else ''}")
    kept = {one: text for one, text in written.items() if one in lab.exercises}
    if not kept:
        remarks.append("no cell starts with %%exercise NAME")
    remarks += [f"look at {one}: it names {', '.join(found)}" for one, text in kept.items() if (found := odd(text))]
    return Submission(learner, name, file, kept, tuple(remarks))


def exercises(cells: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """({name: text as `%%exercise` saves it}, remarks). If two cells have one name, the last counts."""
    written: dict[str, str] = {}
    remarks = []
    for number, cell in enumerate(cells, 1):
        match = _MAGIC.match(cell)
        if match is None:
            if _LATE_MAGIC.search(cell):
                remarks.append(f"code cell {number}: %%exercise is not its first line, so it is no exercise")
            continue
        name = match[1][:_MAX_NAME]
        if not name:
            remarks.append(f"code cell {number}: %%exercise without a name")
            continue
        if len(cell) > MAX_CELL:
            remarks.append(
                f"exercise {name}: its cell has {-(-len(cell) >> 20)} MiB; at most {MAX_CELL >> 20} are read"
            )
            continue
        if name in written:
            remarks.append(f"exercise {name} is there twice; the last one counts")
        written.pop(name, None)
        written[name] = f"# %%exercise {name}\n{cell[match.end() :]}"
    return written, list(dict.fromkeys(remarks))


def odd(source: str) -> list[str]:
    """What an answer names that no exercise needs: modules with which a program can change what is noted about it."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    named, used = set[str](), set[str]()
    for node in nodes:
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            named |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Name):
            used |= {node.id} & (_ODD_NAMES | _ODD_ATTRIBUTES)
        elif isinstance(node, ast.Attribute):
            used |= {node.attr} & _ODD_ATTRIBUTES
    modules = {one for one in named if _within(one, _ODD_MODULES) and not _within(one, _FOR_LABS)}
    return sorted(modules | used)


def _within(name: str, modules: tuple[str, ...]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _which_lab(cells: Iterable[str], metadata: dict[str, Any], written: Iterable[str], labs: Mapping[str, Lab]) -> str:
    for cell in cells:
        if match := _LAB.search(cell):
            return match[1][:_MAX_NAME]
    known = {name: len(set(written) & set(lab.exercises)) for name, lab in labs.items()}
    best = max(known, key=lambda name: known[name], default="")
    if best and known[best] and [*known.values()].count(known[best]) == 1:
        return best
    own = metadata.get("minimegatron")
    source = own.get("source") if isinstance(own, dict) else None
    if not isinstance(source, str):
        return ""
    path = Path(source)  # course/NN_name/lab.py; in older notebooks a file named like the lab
    return path.parent.name if path.name == "lab.py" else path.stem
