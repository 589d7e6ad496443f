"""Files and folders that are fsynced, and errors of the disk that say where and what to do.

`write_durable` writes a file and waits for `fsync`. `staged` makes a folder that appears whole or not at all: it is
written under a hidden name beside its place, fsynced, and renamed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from minimegatron.data.publish import sync
from minimegatron.errors import CheckpointError

T = TypeVar("T")
UNREADABLE = "cannot be read"


@contextlib.contextmanager
def disk(path: Path, what: str = "cannot be written") -> Iterator[None]:
    """Turn an OSError in the block into a `CheckpointError` that names the path and the cause."""
    try:
        yield
    except OSError as error:
        fix = f"see to {_state(path)}"
        if what == UNREADABLE and isinstance(error, FileNotFoundError):
            fix = "it was there a moment ago: start again, if another run has removed it (--save-keep-last)"
        raise CheckpointError(
            f"{what}: {error.strerror or error}", where=str(error.filename or path), fix=fix
        ) from error


def _state(path: Path) -> str:
    """The free space of the disk of a path, in words."""
    existing = next((p for p in (path, *path.parents) if p.exists()), Path("/"))
    try:
        return f"this disk ({shutil.disk_usage(existing).free} bytes are free), or choose another folder"
    except OSError:
        return "this disk, or choose another folder"


def write_durable(path: Path, size: int, write: Callable[[BinaryIO], T]) -> T:
    """Write a new file and fsync it.

    Args:
        path: must not exist.
        size: bytes that `write` is about to write, for the message.

    Raises:
        CheckpointError: the file exists, or the disk is full, gone, or not writable.
    """
    with disk(path, f"{size} bytes cannot be written"), path.open("xb") as file:
        result = write(file)
        file.flush()
        os.fsync(file.fileno())
    return result


def write_bytes(path: Path, content: bytes) -> None:
    """`write_durable` for a small file."""
    write_durable(path, len(content), lambda file: file.write(content))


def sync_all(folder: Path) -> None:
    """Fsync every file and folder below a folder."""
    for path in reversed([folder, *folder.rglob("*")]):
        sync(path)


@contextlib.contextmanager
def staged(folder: Path) -> Iterator[Path]:
    """In the block a hidden folder to write into; after it, it is `folder`. An error in the block leaves nothing.

    Raises:
        CheckpointError: `folder` exists.
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
            sync(folder.parent)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise


def files_in(folder: Path) -> list[str]:
    """Names of all files below a folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
