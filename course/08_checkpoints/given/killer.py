"""A program that dies at its n-th change of the disk, or whose n-th change fails: real files, a real process.

The problem in a sentence: "what if it dies there?" has an answer for each place only if every place is tried.

`operations(at)` counts changes of the disk and ends the process at number `at`; if that number is too high it gives
their number. A run with each number tries them all. Buffers of the operating system survive the death of a process;
power cuts are tried on a simulated disk (`course.lab08.disk`). `RealDisk` and `RealStore` let a program that was
written for the simulated disk and store run on real ones.
"""

from __future__ import annotations

import contextlib
import datetime
import io
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def operations(at: int, error: OSError | None = None) -> Iterator[list[int]]:
    """Count changes of the disk; at operation `at` the process dies, or the operation fails with the error.

    A write has two places: before it, and when half of it is done.
    """
    count, lock = [0], threading.Lock()

    def before() -> None:
        with lock:
            count[0] += 1
            if count[0] == at:
                if error is None:
                    os._exit(9)
                raise error

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            before()
            return real(*args, **kwargs)

        return call

    class Half:
        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> Half:
            return self

        def __exit__(self, *exc: object) -> None:
            self.file.close()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, block: Any) -> None:
            before()
            view = memoryview(block).cast("B")
            self.file.write(view[: len(view) // 2])
            self.file.flush()
            before()
            self.file.write(view[len(view) // 2 :])

    real_open = io.open

    def open_(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if not set(mode) & set("wax+"):
            return real_open(file, mode, *args, **kwargs)
        before()
        return Half(real_open(file, mode, *args, **kwargs))

    names = ("mkdir", "rename", "unlink", "rmdir", "fsync")
    kept = {name: getattr(os, name) for name in names}
    try:
        io.open = open_  # type: ignore[assignment]
        for name in names:
            setattr(os, name, counted(kept[name]))
        yield count
    finally:
        io.open = real_open
        for name in names:
            setattr(os, name, kept[name])


class RealDisk:
    """The interface of `course.lab08.disk.Disk`, on real files below a folder."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def mkdir(self, path: str) -> None:
        os.mkdir(self.root / path)

    def write(self, path: str, data: bytes) -> None:
        with io.open(self.root / path, "wb") as file:  # noqa: UP020  the name that `operations` counts
            file.write(data)

    def fsync(self, path: str = "") -> None:
        descriptor = os.open(self.root / path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, old: str, new: str) -> None:
        os.rename(self.root / old, self.root / new)

    def remove(self, path: str) -> None:
        one = self.root / path
        os.rmdir(one) if one.is_dir() else os.unlink(one)

    def names(self, folder: str = "") -> list[str]:
        return sorted(os.listdir(self.root / folder))

    def read(self, path: str) -> bytes:
        return (self.root / path).read_bytes()


class RealStore:
    """The interface of `course.lab08.together.RankStore`, on a store of torch."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def set(self, key: str, text: str) -> None:
        self.store.set(key, text)

    def get(self, key: str) -> str:
        return str(self.store.get(key).decode())

    def check(self, keys: list[str]) -> bool:
        return bool(self.store.check(keys))

    def wait(self, keys: list[str], seconds: float) -> None:
        try:
            self.store.wait(keys, datetime.timedelta(seconds=seconds))
        except RuntimeError as error:  # torch's DistStoreError
            raise TimeoutError(f"after {seconds:g} s still not there: one of {', '.join(keys)}") from error
