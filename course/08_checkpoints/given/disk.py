"""A simulated disk that may lose what is not fsynced: folders and files, a killer, and all outcomes of a power cut.

The problem in a sentence: after a program is killed the operating system still writes its buffers, after a power cut
only fsynced data is left, and no test on a healthy machine shows the difference.

| operation          | running programs see    | survives a power cut for sure                           |
|--------------------|-------------------------|--------------------------------------------------------------|
| `write(path, ..)`  | a file with these bytes | nothing yet: old bytes, none, half or all of the new ones    |
| `mkdir`, `rename`, | other names, at once    | nothing yet: the names as fsynced, or as they were after     |
| `remove`           |                         | any one of the changes since                                 |
| `fsync(file)`      |                         | the bytes of the file, not its name                          |
| `fsync(folder)`    |                         | the names in the folder, not the bytes of its files          |

The root folder is "". `kill_at=n` ends a program at its n-th change: half of a write is done, no other change is.
Whatever it calls afterwards ends it again, until `restart`.

POSIX promises no more than this; ext4 and XFS often do more. Pillai et al. 2014, "All file systems are not created
equal": half of the programs that they tried relied on more.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

CHANGES = ("mkdir", "write", "fsync", "rename", "remove")


class Killed(BaseException):
    """The program is dead; a BaseException, so that no `except Exception` continues it."""


class _File:
    def __init__(self, data: bytes = b"", safe: bool = False) -> None:
        self.data = data
        self.possible = {data} if safe else {b"", data[: len(data) // 2], data}

    def write(self, data: bytes) -> None:
        self.data = data
        self.possible |= {b"", data[: len(data) // 2], data}


class _Folder:
    def __init__(self) -> None:
        self.names: dict[str, _File | _Folder] = {}
        self.possible: list[dict[str, _File | _Folder]] = [{}]  # as confirmed, and after each change since

    def changed(self) -> None:
        self.possible.append(dict(self.names))


@dataclasses.dataclass(frozen=True)
class Left:
    """A possible state of a folder: its names, and for each file the bytes that it may have."""

    files: Mapping[str, frozenset[bytes]]


class Disk:
    """Folders in a root, files in both.

    Args:
        files: {path: bytes} of the fsynced files at the beginning.
        kill_at: the number of the change at which the program dies; 0 for never.

    Attributes:
        log: every change so far: its name and its arguments.
    """

    def __init__(self, files: Mapping[str, bytes] | None = None, kill_at: int = 0) -> None:
        self._root, self.log, self._dead = _Folder(), list[tuple[str, ...]](), False
        for path, data in (files or {}).items():
            folder, _, name = path.rpartition("/")
            if folder and folder not in self._root.names:
                self._root.names[folder] = _Folder()
            self._folder(folder).names[name] = _File(data, safe=True)
        for one in (self._root, *self._root.names.values()):
            if isinstance(one, _Folder):
                one.possible = [dict(one.names)]
        self.kill_at = kill_at

    def restart(self) -> None:
        """Begin a new program on the state that the dead one has left; nothing kills it."""
        self._dead, self.kill_at = False, 0

    # ------------------------------------------------------------------------------------- what a program may ask for

    def mkdir(self, path: str) -> None:
        """Make a folder.

        Raises:
            FileExistsError: the name is taken.
        """
        if path in self._root.names or not path:
            raise FileExistsError(f"{path} exists")
        self._change("mkdir", path)
        self._root.names[path] = _Folder()
        self._root.changed()

    def write(self, path: str, data: bytes) -> None:
        """Create or overwrite a file.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        folder, name = self._place(path)
        there = folder.names.get(name)
        if isinstance(there, _Folder) or not name:
            raise IsADirectoryError(f"{path} is a folder")
        half = self._change("write", path, bytes(data).decode("latin-1"))
        data = data[: len(data) // 2] if half else data
        if there is None:
            folder.names[name] = _File(bytes(data))
            folder.changed()
        else:
            there.write(bytes(data))
        if half:
            raise Killed

    def fsync(self, path: str = "") -> None:
        """Fsync the bytes of a file, or the names in a folder.

        Raises:
            FileNotFoundError: there is no such file or folder.
        """
        folder, name = self._place(path)
        one = folder.names.get(name) if name else folder
        if one is None:
            raise FileNotFoundError(f"there is no {path}")
        self._change("fsync", path)
        if isinstance(one, _File):
            one.possible = {one.data}
        else:
            one.possible = [dict(one.names)]

    def rename(self, old: str, new: str) -> None:
        """Give a file or folder another name in the same folder, at once; a file of the new name is replaced.

        Raises:
            FileNotFoundError: there is no such file or folder.
            FileExistsError: the new name is that of a folder that is not empty.
            ValueError: the new name lies in another folder.
        """
        (folder, was), (other, name) = self._place(old), self._place(new)
        if folder is not other or not name:
            raise ValueError(f"{old} and {new} are not in one folder: rename within one")
        if was not in folder.names:
            raise FileNotFoundError(f"there is no {old}")
        there = folder.names.get(name)
        if isinstance(there, _Folder) and (there.names or isinstance(folder.names[was], _File)):
            raise FileExistsError(f"{new} exists")
        self._change("rename", old, new)
        folder.names[name] = folder.names.pop(was)
        folder.changed()

    def remove(self, path: str) -> None:
        """Remove a file or an empty folder.

        Raises:
            FileNotFoundError: there is no such file or folder.
            OSError: a folder that is not empty.
        """
        folder, name = self._place(path)
        if name not in folder.names:
            raise FileNotFoundError(f"there is no {path}")
        one = folder.names[name]
        if isinstance(one, _Folder) and one.names:
            raise OSError(f"{path} is not empty")
        self._change("remove", path)
        del folder.names[name]
        folder.changed()

    def names(self, folder: str = "") -> list[str]:
        """The names in a folder.

        Raises:
            FileNotFoundError: there is no such folder.
        """
        self._alive()
        return sorted(self._folder(folder).names)

    def read(self, path: str) -> bytes:
        """The bytes of a file.

        Raises:
            FileNotFoundError: there is no such file.
        """
        self._alive()
        folder, name = self._place(path)
        one = folder.names.get(name)
        if not isinstance(one, _File):
            raise FileNotFoundError(f"there is no file {path}")
        return one.data

    # ------------------------------------------------------------------------------------------- what can be left of it

    def now(self) -> dict[str, Left]:
        """Folders of the root as a program sees them that starts now."""
        return {
            name: Left({n: frozenset([f.data]) for n, f in one.names.items() if isinstance(f, _File)})
            for name, one in self._root.names.items()
            if isinstance(one, _Folder)
        }

    def after_a_power_cut(self) -> Iterator[dict[str, list[Left]]]:
        """Each possible set of folders in the root, and for each of them each possible set of files."""
        for names in self._root.possible:
            yield {
                name: [
                    Left({n: frozenset(f.possible) for n, f in files.items() if isinstance(f, _File)})
                    for files in one.possible
                ]
                for name, one in names.items()
                if isinstance(one, _Folder)
            }

    # ------------------------------------------------------------------------------------------------------------ parts

    def _alive(self) -> None:
        if self._dead:
            raise Killed

    def _change(self, *what: str) -> bool:
        """Log a change; returns whether it is a write of which half is done. At `kill_at` no other change is done."""
        self._alive()
        self.log.append(what)
        self._dead = len(self.log) == self.kill_at
        if self._dead and what[0] != "write":
            raise Killed
        return self._dead

    def _folder(self, path: str) -> _Folder:
        one = self._root if not path else self._root.names.get(path)
        if not isinstance(one, _Folder):
            raise FileNotFoundError(f"there is no folder {path}")
        return one

    def _place(self, path: str) -> tuple[_Folder, str]:
        """The folder of a path, and its name there; for the root itself the name is ""."""
        folder, _, name = path.rpartition("/")
        return self._folder(folder), name


def replay(files: Mapping[str, bytes], log: list[tuple[str, ...]]) -> Iterator[tuple[tuple[str, ...], Disk]]:
    """(change, the disk after it) for each change of a log, on a disk with these files; always the same object."""
    disk = Disk(files)
    for what, *args in log:
        if what == "write":
            disk.write(args[0], args[1].encode("latin-1"))
        else:
            getattr(disk, what)(*args)
        yield (what, *args), disk


def fates(disk: Disk, saves: Mapping[str, Mapping[str, bytes]], new: str, power: bool = True) -> set[str]:
    """What a reader of folders without a leading dot may find now: "old", "new" or "broken".

    Args:
        disk: the disk at this moment.
        saves: {folder: its files} of every possible checkpoint; any other visible folder is broken.
        new: the folder of the newest.
        power: whether the machine loses its power; else only the program dies.
    """
    found = set()
    now = {name: [left] for name, left in disk.now().items()}
    for folders in disk.after_a_power_cut() if power else [now]:
        whole = True
        for name, lefts in folders.items():
            if name.startswith("."):
                continue
            want = Left({n: frozenset([data]) for n, data in saves.get(name, {}).items()})
            may_be_whole = any(
                left.files.keys() == want.files.keys() and all(want.files[n] <= left.files[n] for n in want.files)
                for left in lefts
            )
            if not saves.get(name) or any(left != want for left in lefts):
                found.add("broken")
            whole = whole and bool(saves.get(name)) and may_be_whole
        if whole:
            found.add("new" if new in folders else "old")
    return found
