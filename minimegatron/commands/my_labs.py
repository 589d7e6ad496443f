"""A learner's own copies of the labs, in `my-labs/`: git does not see them, and no update touches them.

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
after a learner has changed it, and whether they have; outputs are not part of the digest. A copy in another language
(`prose`) has the digest of its own cells as well (`shown`); to switch languages changes the prose of a copy, and
nothing that the learner wrote. `installed` says which folders these are where a wheel brought the labs: they may be
read-only then, and one folder for all users of a machine.
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

from minimegatron.commands import prose
from minimegatron.errors import ConfigError

FOLDER = "my-labs"
SAID_IN = "MINIMEGATRON_LANGUAGE"  # the variable that tells kernels in which language hints are wanted
_LANGUAGE = ".language"  # a file in that folder


def digest(notebook: Any) -> str:
    """A digest of the kinds and texts of a notebook's cells, without their outputs."""
    text = "\0".join(f"{cell['cell_type']}\0{''.join(cell['source'])}" for cell in notebook["cells"])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def bring(shipped: Path, language: str | None = None, home: Path | None = None) -> tuple[Path, list[str]]:
    """Make the learner's folder, or update it.

    Args:
        shipped: the labs; `course/` with their translations lies beside them or is the folder that they are in.
        language: of their prose; None: that of the last time, at first English.
        home: the folder that has or gets `my-labs/`; None: the one that has `shipped`.

    Returns:
        The folder, and a line about each thing that a learner should know.
    Raises:
        ConfigError: it cannot be written, or there are no labs in this language.
    """
    beside = shipped.resolve().parent
    folder, course = (home or beside).resolve() / FOLDER, beside if beside.name == "course" else beside / "course"
    there = prose.languages(course)
    if language is not None and language not in there:
        raise ConfigError(f"there are no labs in {language!r}", fix=f"--language {' or '.join(there)}")
    try:
        lines = [] if folder.is_dir() else [f"your labs are in {FOLDER}/: copies, yours to change"]
        folder.mkdir(exist_ok=True)
        before = language_of(folder)
        for notebook in sorted(shipped.glob("*.ipynb")):
            lines += _bring_one(notebook, folder)
            if (wanted := language or before) != prose.ENGLISH or before != prose.ENGLISH:
                _translate(folder / notebook.name, notebook, wanted, there[1:], course / notebook.stem)
        if language not in (None, before):
            (folder / _LANGUAGE).write_text(f"{language}\n", encoding="utf-8")
    except OSError as error:
        fix = "call it in a folder that you may write in, or open notebooks where they are: minimegatron lab FOLDER"
        raise ConfigError(f"{folder} cannot be written ({error.strerror or error})", fix=fix) from None
    return folder, lines


def language_of(folder: Path) -> str:
    """The language of a learner's copies in this folder."""
    file = folder / _LANGUAGE
    return file.read_text(encoding="utf-8").strip() if file.is_file() else prose.ENGLISH


def _translate(mine: Path, shipped: Path, language: str, others: list[str], texts: Path) -> None:
    """Switch a copy to a language; `texts` is the folder of the lab's translations."""
    english, copy = (json.loads(path.read_text(encoding="utf-8")) for path in (shipped, mine))
    tables = {other: prose.pairs(english, texts / f"{other}.md") for other in others}
    known = copy["metadata"].get("minimegatron", {})
    for notebook in (english, copy):
        prose.switch(notebook, tables.values(), tables.get(language, {}))
    if known.get("digest") == english["metadata"].get("minimegatron", {}).get("digest"):
        known["shown"] = digest(english)
    _write(mine, json.dumps(copy, ensure_ascii=False, indent=1) + "\n")


class _Version(NamedTuple):
    """The digest that the build wrote, "" if it is lost; and whether the cells were changed."""

    built: str
    changed: bool


def _version(path: Path) -> _Version:
    try:
        notebook = json.loads(path.read_text(encoding="utf-8"))
        known = notebook["metadata"]["minimegatron"]
        built = str(known["digest"])
        return _Version(built, digest(notebook) != known.get("shown", built))
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
    _write(target, source.read_text(encoding="utf-8"))


def _write(target: Path, text: str) -> None:
    """Write in one step: the file is whole, or as it was."""
    fresh = target.with_name(f".{target.name}.new")
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, target)
