"""Where this package lies: in a checkout, or in an environment that a wheel was installed into.

| what                 | in a checkout           | from a wheel (`setup.py`)                             |
|----------------------|-------------------------|-------------------------------------------------------|
| the labs             | `labs/`                 | `site-packages/course/labs/`, which may be read-only  |
| a learner's copies   | `my-labs/` beside it    | `my-labs/` in the folder in which a command is called |
| to add packages      | `make`                  | `pip install` with the packages of an extra           |
"""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import NamedTuple

import minimegatron
from minimegatron.commands.my_labs import FOLDER

_ROOT = Path(minimegatron.__file__).resolve().parents[1]


class Places(NamedTuple):
    """The folder of the shipped labs, and the folder in which copies of them belong."""

    labs: Path
    home: Path


def from_wheel(root: Path = _ROOT) -> bool:
    """Whether the package came in a wheel."""
    return (root / "course" / "labs").is_dir()


def places(root: Path = _ROOT) -> Places:
    """Those of the checkout that is the working directory, else those that came with the package.

    Args:
        root: the folder that has the package in it.
    """
    here = Path.cwd()
    if (here / "labs").is_dir() and (here / "course").is_dir():
        return Places(here / "labs", here)
    if from_wheel(root):
        return Places(root / "course" / "labs", here.parent if here.name == FOLDER else here)
    return Places(root / "labs", root)


def to_add(extra: str, target: str) -> str:
    """What to type for the packages of an extra; `target` is the Makefile's."""
    if not from_wheel():
        return f"make {target}, or pip install -e '.[{extra}]' -c constraints.txt"
    wanted = [re.match(rf"""([^;]*?)\s*;.*extra == ['"]{extra}['"]""", one) for one in _requires()]
    return f"pip install {' '.join(found[1] for found in wanted if found)}"


def _requires() -> list[str]:
    try:
        return importlib.metadata.requires("minimegatron") or []
    except importlib.metadata.PackageNotFoundError:
        return []
