"""The files of submissions: assigns each file of a folder to a learner, and says which files are read.

    SUBMISSIONS/ada.ipynb                                   one notebook a learner
    SUBMISSIONS/ben/homework (2).ipynb                      one folder a learner
    SUBMISSIONS/eva/01_process_groups/01_process_groups.ipynb    as nbgrader collects them
    SUBMISSIONS/kim.py                                      Jupytext's percent format
    SUBMISSIONS/lea.zip                                     not read: lea gets 0 and this reason

Every other file is some learner's too, an archive, a page, a link, a folder that cannot be opened: it is named in that
learner's remarks. Ignored are names that begin with `.` or `__`, and in the upper folder what an instructor keeps there
(`OWN`). No link is followed. The walk ends at a depth, a number of files, and a number of entries, and says so.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path

from labkit.notebook_file import kind, without_ending
from minimegatron.errors import ConfigError

OWN = re.compile(r"(?i)(readme|license|makefile)(\..*)?$|.*\.(csv|json|xlsx|ods|db|toml|log)$")
MAX_FILES = 50  # of one learner, read
MAX_ENTRIES = 10_000  # of one learner, looked at
DEPTH = 4
_NAMED = 5  # in a remark
_ARCHIVE = re.compile(r"(?i)(\.tar)?\.(zip|tar|gz|tgz|bz2|xz|7z|rar)$")


@dataclasses.dataclass
class Work:
    """The files of one learner.

    Attributes:
        notebooks, scripts: files that can be read.
        others: names of files that are not, relative to the folder of submissions.
        trouble: other things that are not read, one line each.
        folder: whether the learner has a folder.
    """

    learner: str
    notebooks: list[Path] = dataclasses.field(default_factory=list)
    scripts: list[Path] = dataclasses.field(default_factory=list)
    others: list[str] = dataclasses.field(default_factory=list)
    trouble: list[str] = dataclasses.field(default_factory=list)
    folder: bool = False

    @property
    def files(self) -> list[Path]:
        """The files that are read: scripts only if there is no notebook."""
        return (self.notebooks or self.scripts)[:MAX_FILES]

    @property
    def remarks(self) -> list[str]:
        """Which of its files are not read."""
        said = list(self.trouble)
        if len(most := self.notebooks or self.scripts) > MAX_FILES:
            said.append(f"{len(most)} notebooks were handed in; the first {MAX_FILES} are read")
        if self.notebooks and self.scripts:
            said.append(f"not read beside a notebook: {_some([path.name for path in self.scripts])}")
        if self.files and self.others:
            said.append(f"not read: {_some(self.others)}")
        return said

    @property
    def reason(self) -> str:
        """Why there is nothing to read; "" if there is."""
        if self.files:
            return ""
        why = ["there is no notebook in the folder"] if self.folder else []
        if self.others:
            unpack = " (unpack it)" if any(map(_ARCHIVE.search, self.others)) else ""
            why.append(f"handed in as {_some(self.others)}, which is not read{unpack}")
        return "; ".join(why) or "; ".join(self.trouble)


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def learners(root: Path) -> list[Work]:
    """The files of each learner, by name.

    Raises:
        ConfigError: the folder cannot be read.
    """
    found: dict[str, Work] = {}
    for entry in _entries(root):
        if entry.name.startswith((".", "__")) or (OWN.match(entry.name) and not kind(entry.name)):
            continue
        folder = entry.is_dir(follow_symlinks=False)
        name = entry.name if folder else without_ending(entry.name)
        if name == entry.name and not folder:  # no notebook: `ada.tar.gz` is of ada
            name = _ARCHIVE.sub("", name) if _ARCHIVE.search(name) else Path(name).stem
        work = found.setdefault(name, Work(name))
        if folder:
            work.folder = True
            _walk(root, Path(entry.path), work)
        else:
            _sort(root, entry, work)
    return [found[name] for name in sorted(found)]


def passed_over(root: Path) -> list[str]:
    """Names in the upper folder that are assumed to be the instructor's own."""
    return [entry.name for entry in _entries(root) if OWN.match(entry.name) and not kind(entry.name)]


def _entries(root: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(root) as entries:
            return sorted(entries, key=lambda entry: entry.name)
    except OSError as error:
        raise ConfigError(
            f"{root} is not a folder that can be read: {error.strerror}",
            fix="name a folder with one notebook or one folder a learner",
        ) from None


def _sort(root: Path, entry: os.DirEntry[str], work: Work) -> None:
    path = Path(entry.path)
    file = path.relative_to(root).as_posix()
    what = kind(entry.name)
    if what:  # a link or a pipe of such a name is refused when it is opened, with the reason
        (work.notebooks if what == "notebook" else work.scripts).append(path)
    elif entry.is_symlink():
        work.trouble.append(f"{file} is a link, which is not followed")
    else:
        work.others.append(file)


def _walk(root: Path, folder: Path, work: Work) -> None:
    seen = 0
    wanted = [(folder, 1)]
    while wanted:
        at, depth = wanted.pop(0)
        file = at.relative_to(root).as_posix()
        try:
            with os.scandir(at) as entries:
                some = sorted(_first(entries, MAX_ENTRIES - seen), key=lambda entry: entry.name)
        except OSError as error:
            work.trouble.append(f"the folder {file} cannot be read: {error.strerror}")
            continue
        seen += len(some)
        deeper = False
        for entry in some:
            if entry.name.startswith((".", "__")):
                continue
            if not entry.is_dir(follow_symlinks=False):
                _sort(root, entry, work)
            elif depth <= DEPTH:
                wanted.append((Path(entry.path), depth + 1))
            else:
                deeper = True
        if deeper:
            work.trouble.append(f"the folders in {file} are not read: they lie deeper than {DEPTH}")
        if seen >= MAX_ENTRIES:
            work.trouble.append(f"more than {MAX_ENTRIES} files; the others are not read")
            break
    for files in (work.notebooks, work.scripts):
        files.sort()


def _first(entries: Iterator[os.DirEntry[str]], most: int) -> Iterator[os.DirEntry[str]]:
    for _, entry in zip(range(most), entries, strict=False):
        yield entry
