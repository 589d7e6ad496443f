"""One run at a time writes into a folder of checkpoints.

The problem in a sentence: two runs with one `--save` folder would clean up each other's staging folders, and the newest
checkpoint would be that of whichever was faster.

Rank 0 of a run holds `flock` on `.lock` in the folder. The kernel lets go of it when the process ends, in whatever way,
so a lock is never stale, and there is nothing to remove by hand. The text in the file is for people: which run, which
process, since when. It stays after the run has ended and means nothing then.

Not covered: a network file system without locks between hosts. Give each run a folder of its own there.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

from minimegatron.checkpoint.disk import disk
from minimegatron.errors import CheckpointError

NAME = ".lock"


class RootLock:
    """Held until `close`, or until the process ends.

    Args:
        root: the folder; made where there is none.
        run_id: of the run that takes it.

    Raises:
        CheckpointError: another process holds it; says which.
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
            self._file = (root / NAME).open("a+b")
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
