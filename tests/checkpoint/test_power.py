"""The power fails during a save: the disk holds the checkpoint before or the new one, whatever it had not confirmed.

A real save on real ranks is recorded, and replayed on the disk of `course.lab08.disk`, which after each change says all
that a power cut may leave of it.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from course.lab08.disk import fates, replay

from minimegatron.checkpoint.disk import staged, write_durable
from tests.checkpoint.runs import save_steps

Change = tuple[int, tuple[str, ...]]  # when, and what `course.lab08.disk.Disk` calls it


@contextlib.contextmanager
def recorded(root: Path) -> Iterator[list[Change]]:
    """What this process changes below a folder. A file's bytes are noted when it is confirmed and when it is closed."""
    log: list[Change] = []
    lock, real_open = threading.Lock(), io.open

    def within(path: Any, of: int | None = None) -> str | None:
        whole = os.path.join(os.readlink(f"/proc/self/fd/{of}"), path) if of is not None else os.fspath(path)
        below = os.path.relpath(whole, root)
        return None if below.startswith("..") or below == ".lock" else "" if below == "." else below

    def note(what: str, *paths: str | None) -> None:
        with lock:
            if None not in paths:
                log.append((time.monotonic_ns(), (what, *paths)))  # type: ignore[arg-type]

    def note_bytes(path: str) -> None:
        data = (root / path).read_bytes().decode("latin-1")
        before = [args[1] for _, (what, *args) in log if what == "write" and args[0] == path]
        if before[-1:] != [data]:
            note("write", path, data)

    def noted(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **how: Any) -> Any:
            paths = [within(path, how.get("dir_fd")) for path in args[: 2 if name == "rename" else 1]]
            done = real(*args, **how)
            note("remove" if name in ("unlink", "rmdir") else name, *paths)
            return done

        return call

    def fsync(descriptor: int) -> None:
        path = within(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path and (root / path).is_file():
            note_bytes(path)
        real_fsync(descriptor)
        note("fsync", path)

    def open_(file: Any, mode: str = "r", *args: Any, **how: Any) -> Any:
        opened = real_open(file, mode, *args, **how)
        path = within(file) if set(mode) & set("wax+") and isinstance(file, (str, os.PathLike)) else None
        if path is not None:
            real_close = opened.close

            def close() -> None:
                real_close()
                note_bytes(path)

            return _Closing(opened, close)
        return opened

    real_fsync = os.fsync
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(io, "open", open_))
        patches.enter_context(mock.patch.object(os, "fsync", fsync))
        for name in ("mkdir", "rename", "unlink", "rmdir"):
            patches.enter_context(mock.patch.object(os, name, noted(name, getattr(os, name))))
        yield log


class _Closing:
    """A file whose end is noted."""

    def __init__(self, file: Any, close: Callable[[], None]) -> None:
        self._file, self.close = file, close

    def __enter__(self) -> _Closing:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def files_of(root: Path) -> dict[str, bytes]:
    """{path: bytes} of everything but the lock."""
    return {str(p.relative_to(root)): p.read_bytes() for p in root.rglob("*") if p.is_file() and p.name != ".lock"}


def save_recorded(rank: int, world: int, root: str, step: int, background: bool) -> list[Change]:
    with recorded(Path(root)) as log:
        save_steps(rank, world, root, [step], background)
    return log


@pytest.mark.parametrize(("background", "earlier"), [(False, [1, 2]), (True, [1])])
def test_at_no_moment_of_a_save_does_a_power_cut_leave_anything_else(ranks, tmp_path, background, earlier):
    """Two ranks save step 3, and two checkpoints are kept."""
    root = tmp_path / "root"
    ranks(2).run(save_steps, str(root), earlier, False)
    before = files_of(root)
    logs = ranks(2).run(save_recorded, str(root), 3, background)
    saves: dict[str, dict[str, bytes]] = {}
    for path, data in {**before, **files_of(root)}.items():
        folder, _, name = path.partition("/")
        saves.setdefault(folder, {})[name] = data
    assert set(saves) == {f"iter_000000{step}" for step in (*earlier, 3)} and len(saves["iter_0000003"]) == 3
    moments = []
    for change, disk in replay(before, [what for _, what in sorted(change for log in logs for change in log)]):
        found = fates(disk, saves, "iter_0000003") | fates(disk, saves, "iter_0000003", power=False)
        assert found <= {"old", "new"}, f"after {change[:1] + change[1:3][:1]}: {found}"
        moments.append((change[0], found))
    assert moments[-1][1] == {"new"}, "what a save has said is there, is there after a power cut"
    removed = [at for at, (what, _) in enumerate(moments) if what == "remove"]
    assert len(removed) == (4 if len(earlier) > 1 else 0), "of step 1"
    assert all(found == {"new"} for at in removed[:1] for _, found in moments[at:])


def test_nor_does_one_of_a_conversion(tmp_path):
    """Of files of any make: a library's, copied ones, those of ours that are confirmed already."""
    (tmp_path / "notes.txt").write_text("from before")
    with recorded(tmp_path) as log, staged(tmp_path / "made") as hidden:
        (hidden / "config.json").write_text("{}")
        shutil.copyfile(tmp_path / "notes.txt", hidden / "tokenizer.json")
        write_durable(hidden / "model.safetensors", 5, lambda file: file.write(b"12345"))
    made = {name.removeprefix("made/"): data for name, data in files_of(tmp_path).items() if name.startswith("made/")}
    assert len(made) == 3
    for _, disk in replay({}, [what for _, what in log]):
        found = fates(disk, {"made": made}, "made")
        assert found <= {"old", "new"}
    assert found == {"new"}
