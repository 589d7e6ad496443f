"""Files that appear whole or not at all, and work that is done once however many processes ask for it.

A process can die between any two instructions. A reader that opens a file by its final name must find all of it or
nothing, so everything here is written under a temporary name in the same folder, flushed to the disk, and renamed:
`rename` is the one file-system operation that is atomic. Locks are `flock`s: the kernel releases them when the holder
ends, however it ends, so a killed process never leaves a lock behind.

| tool         | promise                                                                                              |
|--------------|------------------------------------------------------------------------------------------------------|
| `Draft`      | a file under construction; `publish()` makes it visible, anything else makes it vanish               |
| `locked`     | one process at a time, and none waits longer than the deadline                                       |
| `build_once` | a folder built by one of the processes that ask for it at once; the others wait and use it           |
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from minimegatron.errors import DataError, DeadlineError

CHUNK = 1 << 20
MAX_JSON_BYTES = 16 << 20
LOCK_DEADLINE_S = 600.0


class Draft:
    """A binary file that becomes `path` when published; until then no reader sees it.

    Counts and hashes the bytes written. As a context manager it is removed at the end of the block unless published.

    Args:
        path: the final name. Its folder must exist.

    Raises:
        DataError: the folder does not exist.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self.nbytes = 0
        self._sha256 = hashlib.sha256()
        folder, name = os.path.split(self.path)
        if not os.path.isdir(folder):
            raise DataError(f"the folder {folder} does not exist", where=self.path, fix=f"mkdir -p {folder}")
        prefix = f".{name}."
        _remove_abandoned(os.path.join(glob.escape(folder), glob.escape(prefix) + "*.tmp"))
        descriptor, self._temporary = tempfile.mkstemp(prefix=prefix, suffix=".tmp", dir=folder)
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # tells `_remove_abandoned` of other processes that this one lives
        os.fchmod(descriptor, 0o644)
        self._file = os.fdopen(descriptor, "wb", buffering=CHUNK)

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._sha256.update(data)
        self.nbytes += len(data)

    @property
    def sha256(self) -> str:
        """Hex digest of what was written so far."""
        return self._sha256.hexdigest()

    def seal(self) -> None:
        """Write all bytes to the disk; a full disk raises here, before anything is published."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def publish(self) -> None:
        """Seal, then rename to the final name, replacing an existing file."""
        self.seal()
        os.replace(self._temporary, self.path)
        self._file.close()
        sync(os.path.dirname(self.path))

    def discard(self) -> None:
        """Remove the draft; does nothing after `publish`."""
        if not self._file.closed:
            with contextlib.suppress(OSError):  # a full disk may refuse the last buffer, which is not wanted any more
                self._file.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._temporary)

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *exc: object) -> None:
        self.discard()


def _remove_abandoned(pattern: str) -> None:
    """Remove drafts of dead processes: those whose lock is free."""
    for path in glob.glob(pattern):
        with contextlib.suppress(FileNotFoundError, PermissionError, BlockingIOError), open(path, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)


def sync(path: str | os.PathLike[str]) -> None:
    """Fsync a file or a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def to_json(value: Any) -> bytes:
    """`value` as a JSON file; equal values give equal bytes."""
    return (json.dumps(value, indent=1, sort_keys=True) + "\n").encode()


def publish(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a small file, whole or not at all."""
    with Draft(path) as draft:
        draft.write(data)
        draft.publish()


def read_json(path: str | os.PathLike[str]) -> Any:
    """A JSON file of at most 16 MiB.

    Raises:
        DataError: too large, not UTF-8, or not JSON.
    """
    with open(path, "rb") as file:
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:
        raise DataError(
            f"a JSON file of more than {MAX_JSON_BYTES} bytes", where=os.fspath(path), fix="is it the right file?"
        )
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:  # ValueError covers bad UTF-8 and bad JSON
        raise DataError(
            f"not a JSON file: {error}", where=os.fspath(path), fix="write it again, or is it another file?"
        ) from error


def sha256_of(path: str | os.PathLike[str]) -> str:
    """Hex digest of a file's bytes (0.5 to 1.7 GiB/s on one core)."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def locked(path: str, deadline_s: float = LOCK_DEADLINE_S) -> Iterator[None]:
    """Hold the lock file `path` (created when missing) for the block.

    Raises:
        DeadlineError: another process held it for `deadline_s` seconds; the message says which.
    """
    with open(path, "a+") as file:
        end = time.monotonic() + deadline_s
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
            if time.monotonic() > end:
                file.seek(0)
                raise DeadlineError(
                    f"waited {deadline_s:g} s for a lock held by process {file.read().strip() or 'unknown'}",
                    where=path,
                    fix="see what that process is doing, or end it; the lock goes with it",
                )
            time.sleep(0.02)
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def build_once(
    folder: str,
    build: Callable[[str], None],
    is_complete: Callable[[str], bool] = os.path.isdir,
    deadline_s: float = LOCK_DEADLINE_S,
) -> None:
    """Make sure `folder` exists and is complete, building it in exactly one of the processes that call this at once.

    Args:
        folder: final name; its parent is created when missing.
        build: called with an empty staging folder, which is then renamed to `folder`.
        is_complete: whether an existing folder can be used; one that cannot is replaced.
        deadline_s: longest wait for another process that is building it.

    Raises:
        DeadlineError: see `locked`.
        DataError: the parent cannot be written to.
    """
    if is_complete(folder):
        return
    parent, lock, stage = os.path.dirname(os.path.abspath(folder)), folder + ".lock", folder + ".tmp"
    try:
        os.makedirs(parent, exist_ok=True)
        open(lock, "a").close()
    except OSError as error:
        fix = "choose a folder that this user may write to"
        raise DataError(f"cannot write: {error}", where=folder, fix=fix) from error
    with locked(lock, deadline_s):
        if is_complete(folder):  # another process built it while this one waited
            return
        shutil.rmtree(stage, ignore_errors=True)  # of a builder that was killed
        os.mkdir(stage)
        try:
            build(stage)
            for path, _, names in os.walk(stage):
                for name in names:
                    sync(os.path.join(path, name))
            shutil.rmtree(folder, ignore_errors=True)
            os.rename(stage, folder)
        except BaseException:
            shutil.rmtree(stage, ignore_errors=True)
            raise
        sync(parent)
