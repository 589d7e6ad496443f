"""What learners handed in, taken apart without running any of it.

    SUBMISSIONS/ada.ipynb                                   one notebook a learner
    SUBMISSIONS/ben/homework (2).ipynb                      one folder a learner
    SUBMISSIONS/eva/01_process_groups/01_process_groups.ipynb    as nbgrader collects them
    SUBMISSIONS/kim.py                                      Jupytext's percent format

An exercise is the cell whose first line is `%%exercise NAME`, wherever it stands; outputs and everything else are
ignored. Which lab it is: the line `%lab NAME`; else the lab that has most of the exercises; else what the build wrote
into the notebook's metadata; else the lab that the instructor named. A module named in a notebook is never imported.

Files of strangers: read up to a size, as UTF-8, as JSON without any hook; no link is followed; names of exercises
become names of files later, so only those of the lab are taken.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from labkit.exercises import Lab
from minimegatron.errors import ConfigError, DataError, did_you_mean

MAX_BYTES = 32 << 20
_MAX_FILES = 50  # of one learner
_DEPTH = 4
_NOTEBOOKS = (".ipynb", ".py")
_MAGIC = re.compile(r"\s*%%exercise\b[ \t]*(\S*)[^\n]*(?:\n|\Z)")
_LATE_MAGIC = re.compile(r"^%%exercise\b", re.M)
_LAB = re.compile(r"^[ \t]*%lab[ \t]+(\S+)", re.M)
_PERCENT = re.compile(r"^# %%(?![%\w])[^\n]*\n?", re.M)


@dataclasses.dataclass(frozen=True)
class Submission:
    """One learner's work on one lab.

    Attributes:
        learner: name of the file or folder.
        lab: name of the lab; "" where nothing says so.
        file: the notebook that counts, relative to the submissions; "" without one.
        sources: {exercise: text of its cell}, as `check` would have saved them.
        remarks: what the instructor should know, one line each.
        reason: why nothing of it can be graded; "" if it can.
    """

    learner: str
    lab: str = ""
    file: str = ""
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    reason: str = ""


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
    if not root.is_dir():
        raise ConfigError(f"{root} is not a folder", fix="name a folder with one notebook or one folder a learner")
    found = [one for learner, files in learners(root) for one in _of_learner(root, learner, files, labs, only)]
    if not found:
        raise DataError(f"no submission in {root}", fix="it should hold NAME.ipynb or NAME/any.ipynb for each learner")
    named = {one.lab for one in found if one.lab}
    default = only or (named.pop() if len(named) == 1 else "")
    found = [dataclasses.replace(one, lab=one.lab or default) for one in found]
    return sorted(found, key=lambda one: (one.learner, one.lab))


def learners(root: Path) -> Iterator[tuple[str, list[Path]]]:
    """Learners by name, each with the files that may be a notebook."""
    found: dict[str, list[Path]] = {}
    for entry in sorted(root.iterdir()):
        if entry.name.startswith((".", "__")):
            continue
        if entry.is_dir() and not entry.is_symlink():
            found.setdefault(entry.name, []).extend(sorted(_files(entry)))
        elif entry.suffix in _NOTEBOOKS:
            found.setdefault(entry.stem, []).append(entry)
    for name in sorted(found):
        notebooks = [path for path in found[name] if path.suffix == ".ipynb"]
        yield name, (notebooks or found[name])[:_MAX_FILES]


def _files(folder: Path) -> Iterator[Path]:
    for at, folders, names in os.walk(folder):
        depth = len(Path(at).relative_to(folder).parts)
        folders[:] = sorted(f for f in folders if not f.startswith((".", "__")) and depth < _DEPTH)
        yield from (Path(at, n) for n in names if Path(n).suffix in _NOTEBOOKS and not n.startswith("."))


def _of_learner(root: Path, learner: str, files: list[Path], labs: Mapping[str, Lab], only: str) -> list[Submission]:
    if not files:
        return [Submission(learner, only, reason="there is no notebook in the folder")]
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
    remarks += [
        f"there is no exercise `{one}` in this lab{'; ' + near if (near := did_you_mean(one, lab.exercises)) else ''}"
        for one in written
        if one not in lab.exercises
    ]
    kept = {one: text for one, text in written.items() if one in lab.exercises}
    if not kept:
        remarks.append("no cell starts with %%exercise NAME")
    return Submission(learner, name, file, kept, tuple(remarks))


def read_cells(path: Path) -> tuple[list[str], dict[str, Any]]:
    """The code cells of a notebook or a percent script, and the notebook's metadata.

    Raises:
        DataError: it is not one; the message says why.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as stream:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DataError("it is not a file")
            if status.st_size > MAX_BYTES:
                raise DataError(f"it has {status.st_size >> 20} MiB; at most {MAX_BYTES >> 20} are read")
            text = stream.read(MAX_BYTES + 1).decode("utf-8-sig")
    except OSError as error:
        raise DataError("it is a link" if path.is_symlink() else f"it cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"it is not text in UTF-8, from byte {error.start} on") from None
    return (_percent_cells(text), {}) if path.suffix == ".py" else _notebook_cells(text)


def _percent_cells(text: str) -> list[str]:
    """Cells of `# %%`; Jupytext has commented out their magics."""
    markers = [*_PERCENT.finditer(text)]
    ends = [*(marker.start() for marker in markers[1:]), len(text)]
    bodies = [text[m.end() : end] for m, end in zip(markers, ends, strict=True) if "[markdown]" not in m[0]]
    return [re.sub(r"^# (%%?\w)", r"\1", body, flags=re.M).rstrip("\n") + "\n" for body in bodies]


def _notebook_cells(text: str) -> tuple[list[str], dict[str, Any]]:
    try:
        notebook = json.loads(text)
    except RecursionError:
        raise DataError("it is not a notebook: lists inside lists without end") from None
    except ValueError as error:
        raise DataError(f"it is not a notebook: {error}"[:200] if text.strip() else "it is empty") from None
    try:
        cells = notebook.get("cells")
        if cells is None:  # nbformat 3
            cells = [cell for sheet in notebook["worksheets"] for cell in sheet["cells"]]
        code = [cell for cell in cells if cell.get("cell_type") == "code"]
        sources = [cell["source"] if "source" in cell else cell["input"] for cell in code]
        joined = [source if isinstance(source, str) else "".join(source) for source in sources]
    except (AttributeError, KeyError, TypeError):
        raise DataError("it is JSON, but not a notebook: it has no cells with sources") from None
    metadata = notebook.get("metadata")
    # Half a surrogate can stand in JSON, and in no file.
    clean = [one.encode("utf-8", "replace").decode() for one in joined]
    return clean, metadata if isinstance(metadata, dict) else {}


def exercises(cells: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """({name: text as `%%exercise` saves it}, remarks). Of two cells with one name the last counts."""
    written: dict[str, str] = {}
    remarks = []
    for number, cell in enumerate(cells, 1):
        match = _MAGIC.match(cell)
        if match is None:
            if _LATE_MAGIC.search(cell):
                remarks.append(f"code cell {number}: %%exercise is not its first line, so it is no exercise")
            continue
        name = match[1]
        if not name:
            remarks.append(f"code cell {number}: %%exercise without a name")
            continue
        if name in written:
            remarks.append(f"exercise {name} is there twice; the last one counts")
        written.pop(name, None)
        written[name] = f"# %%exercise {name}\n{cell[match.end() :]}"
    return written, list(dict.fromkeys(remarks))


def _which_lab(cells: Iterable[str], metadata: dict[str, Any], written: Iterable[str], labs: Mapping[str, Lab]) -> str:
    for cell in cells:
        if match := _LAB.search(cell):
            return match[1]
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
