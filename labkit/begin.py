"""`minimegatron capstone NN FOLDER`: a folder to begin a capstone in; without words, which capstones there are.

The folder is a copy of the capstone's `start/`: the files that are handed in, with nothing decided in them, and a
README.md with the next commands. As it is it gets no point.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from labkit import acceptance
from minimegatron.errors import ConfigError
from minimegatron.flags import Parser


def main(argv: Sequence[str] | None = None) -> int:
    """Copy, and say what comes next.

    Raises:
        ConfigError: there is no such capstone; the folder is not empty.
    """
    parser = Parser("minimegatron capstone", description="Begin a capstone, or list them (docs/capstones.md).")
    parser.add_argument("capstone", nargs="?", metavar="NN", help="which")
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="that is made, for what you hand in")
    options = parser.parse_args(argv)
    if options.capstone is None:
        for name, module in acceptance.known().items():
            print(f"{name}: {(importlib.import_module(module).__doc__ or '').splitlines()[0].partition(': ')[2]}")
        return 0
    if options.folder is None:
        raise ConfigError("no folder is named", fix=f"minimegatron capstone {options.capstone} FOLDER")
    begin(acceptance.load(options.capstone).name, options.folder)
    return 0


def begin(name: str, folder: Path) -> None:
    """Copy the start of a capstone.

    Raises:
        ConfigError: the folder is not empty, or cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there, and not empty", fix="name a folder that is not there yet")
    try:
        shutil.copytree(
            acceptance.folder_of(name) / "start",
            folder,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("__pycache__"),
        )
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error}", fix="name another folder") from None
    print(f"{folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    print(f"begin with {folder}/README.md; grade with: minimegatron grade {folder} --capstone {name[:2]}")
