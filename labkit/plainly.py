"""Errors as a learner reads them: one message, and of a traceback only the frames of the cell.

| error                                        | shown                                                             |
|----------------------------------------------|-------------------------------------------------------------------|
| an error of ours, `MinimegatronError`        | what, where and the fix                                           |
| a cell that is no Python                     | its message, the line of the cell, a caret                        |
| an exception in a cell under a magic         | the frames from the cell on: not IPython's, not ours              |
"""

from __future__ import annotations

import contextlib
import functools
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from minimegatron.errors import MinimegatronError


class NotebookError(MinimegatronError):
    """Shown in a notebook as its text alone."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


@contextlib.contextmanager
def plainly() -> Iterator[None]:
    """In the block our errors are shown without a traceback, which has none of the learner's code."""
    try:
        yield
    except NotebookError:
        raise
    except MinimegatronError as error:
        raise NotebookError(error.what, where=error.where, fix=error.fix) from None
    except KeyboardInterrupt:
        raise NotebookError("interrupted; no rank is left running") from None


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    """`plainly`, around every call of a function."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with plainly():
            return function(*args, **kwargs)

    return wrapped


def compiled(source: Any, text: str, filename: str, mode: str = "exec", flags: int = 0) -> Any:
    """The code object of a cell.

    Args:
        source: a text or a tree to compile.
        text: the cell, whose line n is line n of `source`.
    Raises:
        NotebookError: it is no Python; with the line of the cell.
    """
    try:
        return compile(source, filename, mode, flags)
    except SyntaxError as error:
        raise NotebookError(_where_it_ends(error, text.splitlines())) from None


def _where_it_ends(error: SyntaxError, lines: list[str]) -> str:
    """The message of a SyntaxError, its line and a caret."""
    number = error.lineno or 0
    said = f"{type(error).__name__} in line {number} of this cell: {error.msg}"
    if not 1 <= number <= len(lines):
        return said
    line = lines[number - 1].strip()
    before = len(lines[number - 1]) - len(lines[number - 1].lstrip())
    caret = max((error.offset or 1) - 1 - before, 0)
    return f"{said}\n    {line}\n    {' ' * min(caret, len(line))}^"


@contextlib.contextmanager
def frames_of_the_cell(shell: Any, filename: str) -> Iterator[None]:
    """In the block an exception is shown from the first frame of this file on; without one in it, as always."""
    try:
        yield
    except MinimegatronError:
        raise
    except Exception as error:
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != filename:
            trace = trace.tb_next
        if trace is not None:
            show_as(error, functools.partial(_lines, shell, error, trace))
        raise


def _lines(shell: Any, error: Exception, trace: types.TracebackType) -> list[str]:
    return list(shell.InteractiveTB.structured_traceback(type(error), error, trace, tb_offset=0))


def in_short(error: BaseException, path: Path) -> str:
    """An exception in one line, with the line of this file at which it was raised."""
    numbers = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first[:200]}" + (f" (line {numbers[-1]})" if numbers else "")


def show_as(error: BaseException, lines: Callable[[], list[str]]) -> None:
    """Make IPython show an exception by these lines."""
    with contextlib.suppress(AttributeError):  # of a class with slots
        error._render_traceback_ = lines  # type: ignore[attr-defined]
