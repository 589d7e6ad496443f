"""A checkpoint appears whole or not at all: written in a staging folder, published by one rename.

The problem in a sentence: a process can die between any two operations, and what a later run finds must then be the
checkpoint before or the new one, never a mixture.

    1  stage      mkdir .iter_0000020.<run id>           new, or the save refuses
    2  shards     each rank writes its file in it, and has the disk confirm it (fsync)
    3  agree      all ranks learn length and hash of each file, or an error, which ends the save on all of them
    4  manifest   rank 0 writes it, fsync; fsync of the folder
    5  publish    rename to iter_0000020, fsync of the root
    6  retire     older ones that are not to be kept: rename to .iter_0000010.retired, fsync of the root, then remove; a
                  run that was reading one takes the newest that is there then (`training/loading`)

No file says which checkpoint is the newest: it would be a second truth. The newest is the folder with the largest step
in its name. Only step 5 gives a folder such a name, so one without a good manifest was damaged later, and loading
raises instead of taking an older one. Folders whose names begin with a dot are never read; the next save that holds
the lock of the root removes them.

**The lock.** Two runs with one `--save` folder would remove each other's staging folders. Rank 0 holds `flock` on
`.lock` in the folder. The kernel releases it when the process ends, so a lock is never stale. The text in the file,
which run and process and since when, is for people. A network file system without locks between hosts is not covered:
give each run a folder of its own there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from minimegatron.checkpoint.disk import UNREADABLE, disk, write_bytes
from minimegatron.checkpoint.manifest import NAME, Manifest
from minimegatron.checkpoint.shard_file import hash_of, kind_of, read_header
from minimegatron.data.publish import sync
from minimegatron.errors import CheckpointError

_LOCK = ".lock"


class RootLock:
    """The lock of a folder of checkpoints, held until `close`, or until the process ends.

    Args:
        root: the folder; created if it does not exist.
        run_id: id of the run that takes the lock.

    Raises:
        CheckpointError: another process holds it; names that process.
    """

    def __init__(self, root: Path, run_id: str) -> None:
        if root.is_symlink() and not root.exists():
            raise CheckpointError(
                f"it is a link to {os.readlink(root)}, which is not there",
                where=str(root),
                fix="make that folder, or give --save another one",
            )
        if root.exists() and not root.is_dir():
            raise CheckpointError("it is a file, not a folder", where=str(root), fix="give --save another folder")
        with disk(root):
            root.mkdir(parents=True, exist_ok=True)
            self._file = (root / _LOCK).open("a+b")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.seek(0)
            holder = self._file.read(200).decode(errors="replace").strip() or "another process"
            self._file.close()
            fix = "give each run a --save folder of its own, or end that process: the lock goes with it"
            if _me() in holder:
                fix = "`close()` the trainer of this process that saves there, or choose another folder"
            raise CheckpointError(f"{holder} is saving into this folder", where=str(root), fix=fix) from None
        with disk(root):
            self._file.truncate(0)
            since = time.strftime("%Y-%m-%d %H:%M:%S")
            self._file.write(f"run {run_id}, {_me()} since {since}".encode())
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def _me() -> str:
    return f"process {os.getpid()} on {os.uname().nodename}"


_FOLDER = re.compile(r"iter_(\d{7,})")
_STAGE = re.compile(r"\.iter_\d{7,}\.[A-Za-z0-9_-]+")
OLDER = "load an older checkpoint (--ckpt-step), or another copy of this one"


@dataclasses.dataclass(frozen=True)
class Keep:
    """Which checkpoints are kept when a newer one has been published; the newest one always is.

    Attributes:
        newest: how many; 0 keeps all unless `every` is given.
        every: those whose step it divides.
        best: the one with the lowest validation loss, among those that were evaluated right before they were saved.
    """

    newest: int = 0
    every: int | None = None
    best: bool = False


def folder_of(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return root / f"iter_{step:07d}"


def stage(root: Path, step: int, run_id: str) -> Path:
    """Make a new staging folder, and remove those of dead runs in this root. The caller holds the lock.

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
    with disk(root):
        for path in list(root.iterdir()):
            if _STAGE.fullmatch(path.name):
                shutil.rmtree(path)
        folder = root / f".iter_{step:07d}.{run_id}"
        folder.mkdir()
    return folder


def publish(staged: Path, root: Path, manifest: Manifest) -> Path:
    """Write the manifest and make the checkpoint visible."""
    text = manifest.dumps()
    write_bytes(staged / NAME, text)
    final = folder_of(root, manifest.step)
    with disk(final):
        sync(staged)
        os.rename(staged, final)  # onto a folder that is not empty it fails
        sync(root)
    return final


def discard(staged: Path) -> None:
    """Remove the staging folder of a save that has failed."""
    shutil.rmtree(staged, ignore_errors=True)


def retire(root: Path, keep: Keep) -> list[int]:
    """Remove the complete checkpoints that are not kept; returns their steps."""
    if keep.newest == 0 and keep.every is None:
        return []
    manifests = complete(root)
    kept = {*list(manifests)[-max(keep.newest, 1) :], *(s for s in manifests if keep.every and s % keep.every == 0)}
    if keep.best and (losses := {s: m.state["validation_loss"] for s, m in manifests.items() if _evaluated(m)}):
        kept.add(min(losses, key=lambda step: losses[step]))
    removed = [step for step in manifests if step not in kept]
    with disk(root, "an old checkpoint cannot be removed"):
        hidden_of = {step: root / f".{folder_of(root, step).name}.retired" for step in removed}
        for step, hidden in hidden_of.items():
            os.rename(folder_of(root, step), hidden)  # from here on it is no checkpoint
        if removed:
            sync(root)  # nor after a power cut, which might bring a name back and not the files
        for hidden in hidden_of.values():
            shutil.rmtree(hidden)
    return removed


def _evaluated(manifest: Manifest) -> bool:
    return isinstance(manifest.state.get("validation_loss"), float)


def published(root: Path) -> list[int]:
    """Steps of the folders that have the name of a checkpoint, ascending.

    While another run publishes a checkpoint and removes the one before, a listing may have neither, so folders are
    listed until two listings are equal.
    """
    steps = _listed(root)
    while (again := _listed(root)) != steps:
        steps = again
    return steps


def _listed(root: Path) -> list[int]:
    with disk(root, UNREADABLE):
        matches = [(path, match) for path in (root.iterdir() if root.is_dir() else ()) if (match := _match(path))]
    return sorted(int(match[1]) for path, match in matches if path == folder_of(root, int(match[1])))


def _match(path: Path) -> re.Match[str] | None:
    return _FOLDER.fullmatch(path.name) if path.is_dir() and not path.is_symlink() else None


def complete(root: Path) -> dict[int, Manifest]:
    """{step: manifest} of the checkpoints whose manifest is whole, ascending by step."""
    steps, manifests = None, dict[int, Manifest]()
    while steps != (steps := published(root)):
        manifests = {}
        for step in steps:
            with contextlib.suppress(CheckpointError):
                manifests[step] = read_manifest(root, step)
    return manifests


def choose(root: Path, steps: Sequence[int], step: int | None, what: str = "checkpoint") -> int:
    """The step of the checkpoint that is asked for.

    Args:
        root: the folder.
        steps: steps to choose from, ascending.
        step: the step asked for; default the newest.
        what: for the error.

    Raises:
        CheckpointError: there is no such checkpoint.
    """
    if steps and (step is None or step in steps):
        return steps[-1] if step is None else step
    raise CheckpointError(
        f"no {what}" + (f" of step {step}" if step is not None else ""),
        where=str(root),
        fix=f"there are {', '.join(map(str, steps))}" if steps else "give the folder that --save named",
    )


def read_manifest(root: Path, step: int) -> Manifest:
    """The manifest of a checkpoint.

    Raises:
        CheckpointError: it is damaged, or that of another step.
    """
    manifest = Manifest.read(folder_of(root, step))
    if manifest.step != step:
        raise CheckpointError(
            f"is the manifest of step {manifest.step}", where=str(folder_of(root, step) / NAME), fix=OLDER
        )
    return manifest


def verify_names(folder: Path, manifest: Manifest) -> None:
    """Refuse files that the manifest does not name.

    Raises:
        CheckpointError: with their names.
    """
    with disk(folder, UNREADABLE):
        extra = {path.name for path in folder.iterdir()} - manifest.files.keys() - {NAME}
    if extra:
        raise CheckpointError(
            f"not part of the checkpoint: {', '.join(sorted(extra))}",
            where=str(folder),
            fix="move them away; nothing but a save writes here",
        )


def verify(folder: Path, manifest: Manifest, files: Iterable[str] | None = None) -> None:
    """Compare files with the manifest: length, header and hash.

    Args:
        files: names; default all.

    Raises:
        CheckpointError: names the file that is missing or not what was written.
    """
    for name in manifest.files if files is None else files:
        verify_header(folder, manifest, name)
        with disk(folder / name, UNREADABLE):
            verify_hash(folder, manifest, name, hash_of(folder / name, kind_of(manifest.files[name][1])))


def verify_header(folder: Path, manifest: Manifest, name: str) -> None:
    """Compare a file's length, and the step and run in its header, with the manifest.

    Raises:
        CheckpointError: it is missing, or of another save.
    """
    path = folder / name
    if path.is_symlink() or not path.is_file():
        raise CheckpointError("a file of the checkpoint is missing", where=str(path), fix=OLDER)
    with disk(path, UNREADABLE):
        length = path.stat().st_size
    if length != (size := manifest.files[name][0]):
        raise CheckpointError(f"has {length} bytes, was written with {size}", where=str(path), fix=OLDER)
    header = read_header(path)[1]
    if (header.get("step"), header.get("run_id")) != (str(manifest.step), manifest.run_id):
        raise CheckpointError(
            f"belongs to step {header.get('step')} of run {header.get('run_id')}, "
            f"the manifest to step {manifest.step} of run {manifest.run_id}",
            where=str(path),
            fix=OLDER,
        )


def verify_hash(folder: Path, manifest: Manifest, name: str, length_and_hash: tuple[int, str]) -> None:
    """Compare the length and hash of a file that was read with the manifest.

    Raises:
        CheckpointError: the file is not what was written.
    """
    if length_and_hash != manifest.files[name]:
        raise CheckpointError("is not what was written: its hash differs", where=str(folder / name), fix=OLDER)
