"""Names that cells of a lab make: the message when cells are run in another order than that of the notebook.

A lab's own source (`course/NN_name/lab.py`) is read, never run:

| cell                                  | makes                                                                        |
|---------------------------------------|------------------------------------------------------------------------------|
| Python, also under `%%needs`          | what it assigns, imports or defines at its top level                         |
| `%%exercise NAME`                     | the same, and the module `exercises.NAME`                                    |
| `%%ranks ... --name N --out O`        | the module `N`, the variable `O`                                             |
| `%%torchrun ... --name N --out O`     | the same                                                                     |
"""

from __future__ import annotations

import ast
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from labkit.plainly import show_as

_CELL = re.compile(r"^# %%(?![%\w])(.*)\n", re.M)
_MAGIC = re.compile(r"^%%(\w+)(.*)")
_OPTION = re.compile(r"--(name|out)[ =](\w+)")


class Made:
    """The names that cells of the open lab make.

    Args:
        names: names of the kernel.

    Attributes:
        failed: names that do not exist because their cell has failed.
    """

    def __init__(self, names: dict[str, Any]) -> None:
        self._names = names
        self._makers: dict[str, str] = {}
        self.failed: set[str] = set()

    def open(self, source: Path) -> None:
        """Read the source of this lab."""
        self._makers, self.failed = makers(source), set()

    def missing(self, name: str) -> str:
        """What to do about a missing name that a cell of the lab makes; "" for any other."""
        if name not in self._makers:
            return ""
        first = self._makers[name]
        cell = f"it begins with {first[:60]}{'…' * (len(first) > 60)}"
        if name in self.failed:
            return f"`{name}` is made by a cell above that has failed: mend it first ({cell})"
        return f"`{name}` is made by a cell above that has not run: run it first ({cell})"

    def show(self, shell: Any, kind: type, error: Any, trace: Any, tb_offset: int | None = None) -> None:
        """IPython's handler of missing names and modules: one line if another cell makes them."""
        if isinstance(error, ModuleNotFoundError) or _missed_here(error, trace, self._names):
            if said := self.missing(error.name or ""):
                show_as(error, said.splitlines)
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)


def _missed_here(error: NameError, trace: types.TracebackType | None, names: dict[str, Any]) -> bool:
    """Whether a NameError is raised by code that uses these names as its globals."""
    last = trace
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    looked = last is not None and last.tb_frame.f_globals is names
    return looked and error.name not in names and not isinstance(error, UnboundLocalError)


def makers(source: Path) -> dict[str, str]:
    """{name: first line of the first cell that makes it}; {} if there is no such source."""
    try:
        text = source.read_text()
    except (OSError, UnicodeDecodeError):
        return {}
    found: dict[str, str] = {}
    for cell in _code_cells(text):
        first = next((line for line in cell.splitlines() if line.strip()), "").strip()
        for name in _made(cell):
            found.setdefault(name, first)
    return found


def _code_cells(text: str) -> Iterator[str]:
    _, *parts = _CELL.split(text)
    for title, body in zip(parts[::2], parts[1::2], strict=True):
        if "[markdown]" not in title:
            yield re.sub(r"^# (%%?\w)", r"\1", body, flags=re.M).strip()


def _made(cell: str) -> Iterator[str]:
    magic = _MAGIC.match(cell)
    body = cell.partition("\n")[2] if magic else cell
    if magic and magic[1] in ("ranks", "torchrun"):
        yield from (name for _, name in _OPTION.findall(magic[2]))
        return
    if magic and magic[1] == "exercise":
        yield f"exercises.{magic[2].strip()}"
    try:
        tree = ast.parse(re.sub(r"^%.*$", "pass", body, flags=re.M))
    except SyntaxError:
        return
    yield from _names(tree.body)


def _names(body: list[ast.stmt]) -> Iterator[str]:
    """Names that statements bind in their own scope."""
    for statement in body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield statement.name
            continue
        for node in _of_this_scope(statement):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield from ((one.asname or one.name).partition(".")[0] for one in node.names)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def _of_this_scope(node: ast.AST) -> Iterator[ast.AST]:
    """A statement's nodes without those of functions and comprehensions, whose names are their own."""
    yield node
    inner = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp)
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*inner, ast.GeneratorExp)):
            yield from _of_this_scope(child)
