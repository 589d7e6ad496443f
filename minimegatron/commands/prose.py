"""The prose of labs in another language than English: found by cell, and put in its place.

    course/01_process_groups/zh.md      <!-- cell the-ring 1f3a9c2e -->
                                        ## 2 · the same cell in Chinese ...

A mark says which English text is translated, by what it is and by a digest of its words. A translation of words that
have changed since is not shown; `labkit/languages` finds it, and a test fails. Code is there once: a translated
notebook has the cells, the ids and the outputs of the English one, and a learner's work.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from minimegatron.errors import ConfigError

ENGLISH = "en"
_MARK = re.compile(r"^<!-- ([a-z]+) (\S+) ([0-9a-f]{8}) -->\n", re.M)


class Which(NamedTuple):
    """A piece of prose: a `cell` of a notebook by its id, an exercise's `idea` or `hint`, a `section` of a page, ..."""

    kind: str
    name: str


class Translation(NamedTuple):
    """A text in another language, and the digest of the English one that it says."""

    of: str
    text: str


def stamp(english: str) -> str:
    """The digest of an English text that a translation carries."""
    return hashlib.sha256(english.strip().encode()).hexdigest()[:8]


def mark(which: Which, english: str) -> str:
    """The line above a translation of this text."""
    return f"<!-- {which.kind} {which.name} {stamp(english)} -->"


def read(path: Path) -> dict[Which, Translation]:
    """The translations of a file, in its order; {} where there is none.

    Raises:
        ConfigError: a piece is there twice.
    """
    if not path.is_file():
        return {}
    _, *rest = _MARK.split(path.read_text(encoding="utf-8"))
    found: dict[Which, Translation] = {}
    for kind, name, of, text in zip(*(rest[i::4] for i in range(4)), strict=True):
        if (which := Which(kind, name)) in found:
            raise ConfigError(f"{kind} {name} is translated twice", where=path.name, fix="keep one of them")
        found[which] = Translation(of, text.strip())
    return found


def in_language(there: Mapping[Which, Translation], which: Which, english: str) -> str:
    """The translation of a piece, where there is one that says what the English says; else the English."""
    found = there.get(which)
    return found.text if found and found.of == stamp(english) else english


def bulleted(lines: Iterable[str]) -> str:
    """Sentences as one piece, a line each."""
    return "\n".join(f"- {line}" for line in lines)


def lines_in_language(there: Mapping[Which, Translation], which: Which, english: Sequence[str]) -> list[str]:
    """As `in_language`, of a piece that is a list: the English, too, if a translation has more or fewer lines."""
    said = [line.removeprefix("- ") for line in in_language(there, which, bulleted(english)).splitlines()]
    return said if len(said) == len(english) else list(english)


def languages(course: Path) -> list[str]:
    """English, and the languages in which there are labs: `course/*/LANGUAGE.md`."""
    return [ENGLISH, *sorted({path.stem for path in course.glob("[0-9][0-9]_*/*.md")})]


def pairs(shipped: Any, file: Path) -> dict[str, tuple[str, str]]:
    """{id of a cell: (English, translated)}, of the cells whose translation says what the shipped notebook says."""
    said = read(file)
    english = {cell["id"]: "".join(cell["source"]) for cell in shipped["cells"] if cell["cell_type"] == "markdown"}
    found = ((name, text, said.get(Which("cell", name))) for name, text in english.items())
    return {name: (text, there.text) for name, text, there in found if there and there.of == stamp(text)}


def switch(notebook: Any, texts: Iterable[Mapping[str, tuple[str, str]]], to: Mapping[str, tuple[str, str]]) -> None:
    """Put the prose of one language in the place of another's, in a notebook as JSON has it.

    Args:
        notebook: what is changed; cells that a learner has changed stay.
        texts: the pairs of all languages.
        to: those of the one that is wanted; {} is English.
    """
    tables = list(texts)
    for cell in notebook["cells"]:
        of_cell = [table[cell["id"]] for table in tables if cell.get("id") in table]
        if cell["cell_type"] != "markdown" or not of_cell:
            continue
        known = {text for pair in of_cell for text in pair}
        if "".join(cell["source"]) in known:
            cell["source"] = to[cell["id"]][1] if cell["id"] in to else of_cell[0][0]
