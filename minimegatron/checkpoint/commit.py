"""A checkpoint appears whole or not at all: written in a staging folder, published by one rename.

The problem in a sentence: a process can die between any two operations, and what a later run finds must then be the
checkpoint before or the new one, never a mixture.

    1  stage      mkdir .iter_0000020.<run id>           new, or the save refuses
    2  shards     each rank writes its file in it, and has the disk confirm it (fsync)
    3  agree      all ranks tell name, length, hash, or their error; an error ends the save on all of them
    4  manifest   rank 0 writes it, fsync; fsync of the folder
    5  publish    rename to iter_0000020, fsync of the root
    6  retire     old ones, only now

There is no file that says which checkpoint is the newest: it would be a second truth. The newest is the one with the
largest step among folders that have our name and a manifest that parses, and nothing in a staging folder is ever read.

One run writes into a root at a time: it holds `flock` on `.lock`, which the kernel lets go of however the run ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO, TypeVar

from minimegatron.checkpoint.manifest import NAME, Manifest
from minimegatron.checkpoint.shard_file import read_header, sha256_of
from minimegatron.errors import CheckpointError

T = TypeVar("T")
_FOLDER = re.compile(r"iter_(\d{7,})")
_STAGE = re.compile(r"\.iter_\d{7,}\.[A-Za-z0-9_-]+")


def folder_of(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return root / f"iter_{step:07d}"


class RootLock:
    """One run at a time writes into a root; held until `close`, or until the process ends."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._file = (root / ".lock").open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            holder = self._file.read(200).decode(errors="replace").strip() or "another process"
            self._file.close()
            raise CheckpointError(
                f"{holder} is saving into this folder", where=str(root), fix="give each run a --save folder of its own"
            ) from None
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {os.uname().nodename}".encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def stage(root: Path, step: int, run_id: str) -> Path:
    """A new staging folder; those that a dead run has left in this root are removed. The caller holds the lock.

    Raises:
        CheckpointError: the checkpoint of this step exists already.
    """
    final = folder_of(root, step)
    if final.exists():
        raise CheckpointError(
            f"there is a checkpoint of step {step} already",
            where=str(final),
            fix="continue from it with --load, or save into another folder",
        )
    for left in root.iterdir():
        if _STAGE.fullmatch(left.name):
            shutil.rmtree(left)
    folder = root / f".iter_{step:07d}.{run_id}"
    folder.mkdir()
    return folder


def write_durable(path: Path, write: Callable[[BinaryIO], T]) -> T:
    """Write a new file and have the disk confirm it."""
    with path.open("xb") as file:
        result = write(file)
        file.flush()
        os.fsync(file.fileno())
    return result


def publish(staged: Path, root: Path, manifest: Manifest) -> Path:
    """Write the manifest and make the checkpoint visible."""
    text = manifest.dumps()
    write_durable(staged / NAME, lambda file: file.write(text))
    _sync_folder(staged)
    final = folder_of(root, manifest.step)
    os.rename(staged, final)  # onto a folder that is not empty it fails
    _sync_folder(root)
    return final


def discard(staged: Path) -> None:
    """A save has failed: remove what it has written."""
    shutil.rmtree(staged, ignore_errors=True)


def retire(root: Path, keep: int) -> list[Path]:
    """Remove all complete checkpoints but the `keep` newest; returns what was removed."""
    old = complete(root)[:-keep] if keep > 0 else []
    for step in old:
        # the manifest first: a folder without one is no checkpoint, whatever else is still in it
        with contextlib.suppress(FileNotFoundError):
            (folder_of(root, step) / NAME).unlink()
        shutil.rmtree(folder_of(root, step))
    return [folder_of(root, step) for step in old]


def complete(root: Path) -> list[int]:
    """Steps of the checkpoints in a folder that have a manifest which is whole, ascending."""
    steps = []
    for path in root.iterdir() if root.is_dir() else ():
        match = _FOLDER.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            with contextlib.suppress(CheckpointError):
                if Manifest.read(path).step == int(match[1]):
                    steps.append(int(match[1]))
    return sorted(steps)


def verify_names(folder: Path, manifest: Manifest) -> None:
    """There is no file that the manifest does not name.

    Raises:
        CheckpointError: names those that there are.
    """
    extra = {path.name for path in folder.iterdir()} - manifest.files.keys() - {NAME}
    if extra:
        raise CheckpointError(
            f"not part of the checkpoint: {', '.join(sorted(extra))}",
            where=str(folder),
            fix="move them away; nothing but a save writes here",
        )


def verify(folder: Path, manifest: Manifest, files: Iterable[str] | None = None) -> None:
    """Hold files against the manifest: lengths, hashes, and the step and run in their headers.

    Args:
        files: which; default all.

    Raises:
        CheckpointError: names the file that is missing or not what was written.
    """
    fix = "load an older checkpoint (--ckpt-step), or another copy of this one"
    for name in manifest.files if files is None else files:
        path = folder / name
        if path.is_symlink() or not path.is_file():
            raise CheckpointError("a file of the checkpoint is missing", where=str(path), fix=fix)
        size, digest = manifest.files[name]
        if path.stat().st_size != size:
            raise CheckpointError(f"has {path.stat().st_size} bytes, was written with {size}", where=str(path), fix=fix)
        if sha256_of(path) != (size, digest):
            raise CheckpointError("is not what was written: its SHA-256 differs", where=str(path), fix=fix)
        said = read_header(path)[1]
        if (said.get("step"), said.get("run_id")) != (str(manifest.step), manifest.run_id):
            raise CheckpointError(
                f"belongs to step {said.get('step')} of run {said.get('run_id')}, "
                f"the manifest to step {manifest.step} of run {manifest.run_id}",
                where=str(path),
                fix=fix,
            )


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
