"""A learner's own copies of the labs, in `my-labs/` beside `labs/`: git does not see them, and no update touches them.

    labs/01_process_groups.ipynb        the shipped lab; an update replaces it
    my-labs/01_process_groups.ipynb     the learner's copy
    my-labs/.work/                      files that its cells write

| the learner's copy        | the shipped lab    | result                                                            |
|---------------------------|--------------------|-------------------------------------------------------------------|
| does not exist            |                    | it is made; work done in `labs/` itself is copied                 |
| has the shipped cells     | is newer           | it is replaced                                                    |
| has other cells           | is the same        | it stays                                                          |
| has other cells           | is newer           | it stays, and the new lab is put beside it: `NAME-new.ipynb`      |

A notebook has the digest of the cells that the build wrote (`metadata.minimegatron.digest`). So its version is known
after a learner has changed it, and whether they have; outputs are not part of the digest.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from minimegatron.errors import ConfigError

FOLDER = "my-labs"


def digest(notebook: Any) -> str:
    """A digest of the kinds and texts of a notebook's cells, without their outputs."""
    text = "\0".join(f"{cell['cell_type']}\0{''.join(cell['source'])}" for cell in notebook["cells"])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def bring(shipped: Path) -> tuple[Path, list[str]]:
    """Make the learner's folder beside `shipped`, or update it.

    Returns:
        The folder, and a line about each thing that a learner should know.
    Raises:
        ConfigError: it cannot be written.
    """
    folder = shipped.resolve().parent / FOLDER
    try:
        lines = [] if folder.is_dir() else [f"your labs are in {FOLDER}/: copies, yours to change"]
        folder.mkdir(exist_ok=True)
        for notebook in sorted(shipped.glob("*.ipynb")):
            lines += _bring_one(notebook, folder)
    except OSError as error:
        fix = "make it writable, or copy the notebooks elsewhere: minimegatron lab FOLDER"
        raise ConfigError(f"{FOLDER}/ cannot be written ({error.strerror or error})", fix=fix) from None
    return folder, lines


class _Version(NamedTuple):
    """The digest that the build wrote, "" if it is lost; and whether the cells were changed."""

    built: str
    changed: bool


def _version(path: Path) -> _Version:
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        built = str(notebook["metadata"]["minimegatron"]["digest"])
        return _Version(built, digest(notebook) != built)
    except (ValueError, KeyError, TypeError):  # not as the build wrote it
        return _Version("", True)


def _bring_one(notebook: Path, mine: Path) -> Iterator[str]:
    target, new = mine / notebook.name, _version(notebook)
    if not target.exists():
        _copy(notebook, target)
        old, own = (folder / ".work" / notebook.stem for folder in (notebook.parent, mine))
        if new.changed and old.is_dir() and not own.exists():
            shutil.copytree(old, own, ignore=shutil.ignore_patterns("runs", "__pycache__", "*.lock"))
            yield f"{notebook.name}: what you did in {notebook.parent.name}/ is here too"
        return
    if new.changed:  # somebody works in it: no version to hand on
        return
    names = (f"{notebook.stem}-new{number if number > 1 else ''}.ipynb" for number in itertools.count(1))
    for place in itertools.chain([target], (mine / name for name in names)):
        present = _version(place) if place.exists() else None
        if present and present.built == new.built:
            return
        if present and present.changed:
            continue
        _copy(notebook, place)
        if place == target:
            yield f"{notebook.name}: replaced by a newer version; you had not changed it"
        else:
            yield f"{notebook.name}: there is a newer version; yours stays, the new one is {place.name}"
        return


def _copy(source: Path, target: Path) -> None:
    """Copy in one step: the copy is whole or does not exist."""
    fresh = target.with_name(f".{target.name}.new")
    shutil.copyfile(source, fresh)
    os.replace(fresh, target)
