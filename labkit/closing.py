"""Blocks modules that already do what an exercise asks for, in the process that runs the exercise.

The problem in a sentence: an exercise asks for a list that the package can generate, and a learner who imports the
generator has solved nothing.

`Exercise(without=("minimegatron.parallel.pipeline.schedules",))` names them, and `Lab(without=...)` those of all its
exercises; the name of a package blocks everything in it. In the learner's process they cannot be imported, under
any name, and their files cannot be read: `files_of` gives those to the sandbox. A learner can still copy the text
into the cell beforehand, which looks to a judge like any other answer.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

_NAMES: list[tuple[int, str]] = []  # how many modules were loaded, and their names, at `remember`


class Closed(ImportError):
    """A blocked module was imported."""


class _Finder:
    """The first finder on `sys.meta_path`; refuses the blocked modules, and finds no other."""

    def __init__(self, modules: Iterable[str]) -> None:
        self.modules = frozenset(modules)

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not self.modules.isdisjoint(_with_parents(name)):
            raise Closed(f"`{name}` is closed in this exercise, which asks you to write what it does")
        return None


def _with_parents(name: str) -> list[str]:
    """The module and its parent packages."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def remember() -> None:
    """Before a fork: keep the names of loaded modules in one text, for `close` afterwards."""
    _NAMES[:] = [(len(sys.modules), "\n".join(sys.modules))]


def _loaded(modules: Sequence[str]) -> list[str]:
    """Those of the loaded modules that are among these, or inside one of them.

    A loop over 2,000 names after a fork would copy every page that has one: 8 ms.
    """
    names = _NAMES[0][1] if _NAMES and _NAMES[0][0] == len(sys.modules) else "\n".join(sys.modules)
    text, found = f"\n{names}\n", dict[int, str]()
    for module in modules:  # `find`, not a pattern: to compile one takes 3 ms of every process
        for end in ("\n", "."):
            at = -1
            while (at := text.find(f"\n{module}{end}", at + 1)) >= 0:
                found[at] = text[at + 1 : text.index("\n", at + 1)]
    return [found[at] for at in sorted(found)]


def close(modules: Sequence[str]) -> None:
    """Block these modules from now on: they cannot be imported, and those that were imported are removed."""
    for name in _loaded(modules):
        sys.modules.pop(name, None)
        parent, _, last = name.rpartition(".")
        if parent in sys.modules and hasattr(sys.modules[parent], last):
            delattr(sys.modules[parent], last)
    if modules:
        sys.meta_path.insert(0, _Finder(modules))  # type: ignore[arg-type]


def files_of(modules: Iterable[str]) -> list[Path]:
    """The folder of each package; the source of each other module, and its compiled form, existing or not."""
    found = []
    for name in modules:
        top, *rest = name.split(".")
        place = Path(str(importlib.import_module(top).__file__)).parent.joinpath(*rest)
        source = place.with_suffix(".py")
        found += [place] if place.is_dir() else [source, Path(importlib.util.cache_from_source(str(source)))]
    return found
