"""A folder that is there whole or not at all: written next to its place under a hidden name, confirmed, and renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from minimegatron.checkpoint.disk import disk, sync_all, sync_folder
from minimegatron.errors import CheckpointError


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """In the block the folder to write into; after it, `folder`. An error in the block leaves nothing.

    Raises:
        CheckpointError: there is something already.
    """
    if folder.exists():
        raise CheckpointError("there is something here already", where=str(folder), fix="give a --save that is new")
    folder.parent.mkdir(parents=True, exist_ok=True)
    hidden = folder.parent / f".{folder.name}.{secrets.token_hex(4)}"
    hidden.mkdir()
    try:
        yield hidden
        with disk(folder):
            sync_all(hidden)
            os.rename(hidden, folder)
            sync_folder(folder.parent)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def files_in(folder: Path) -> list[str]:
    """Names of all files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
