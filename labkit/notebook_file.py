"""Reads a stranger's file at a bounded cost: the code cells of a notebook or of a script with `# %%`.

A file is read as text in UTF-8 up to a size, and as JSON up to a number of values (`bounded_json`), without any hook.
No link is followed, no device or pipe is waited for. A file that is too large is reported, and not parsed.

| ending                                                           | read as                                    |
|------------------------------------------------------------------|--------------------------------------------|
| `.ipynb`, `.IPYNB`, and with the `.json` or `.txt` that browsers add | a notebook of nbformat 3 or 4              |
| `.py`                                                            | Jupytext's percent format, `# %%` or `#%%` |

Sources: https://nbformat.readthedocs.io/en/latest/format_description.html,
https://jupytext.readthedocs.io/en/latest/formats-scripts.html
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Any

from labkit.plain import bounded_json
from minimegatron.errors import DataError

MAX_BYTES = 32 << 20  # pictures in outputs are large
MAX_VALUES = 2_000_000  # so are tables and plots
MAX_CELLS = 20_000
_ENDING = re.compile(r"(?i)(\.ipynb(?:\.json|\.txt)?|\.py)$")
_PERCENT = re.compile(r"^#[ \t]*%%(?![%\w])[^\n]*\n?", re.M)
_EXERCISE = re.compile(r"^(?:# )?%%exercise\b", re.M)


def kind(name: str) -> str:
    """`notebook`, `script`, or "" for what is not read, from a file's name."""
    ending = _ENDING.search(name)
    return "" if ending is None else "script" if ending[1].lower() == ".py" else "notebook"


def without_ending(name: str) -> str:
    """The name without the ending that determines its format."""
    return _ENDING.sub("", name)


def read_cells(path: Path) -> tuple[list[str], dict[str, Any]]:
    """The texts of the code cells, and the notebook's metadata.

    Raises:
        DataError: it is no such file; the message says why.
    """
    text = _text(path)
    if not text.strip():
        raise DataError("it is empty")
    cells, metadata = (_percent_cells(text), {}) if kind(path.name) == "script" else _notebook_cells(text)
    if len(cells) > MAX_CELLS:
        raise DataError(f"it has {len(cells):,} code cells; at most {MAX_CELLS:,} are read")
    # Half a surrogate can stand in JSON, and in no file.
    return [cell.encode("utf-8", "replace").decode() for cell in cells], metadata


def _text(path: Path) -> str:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as stream:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise DataError("it is not a file")
            if status.st_size > MAX_BYTES:
                raise DataError(f"it has {-(-status.st_size >> 20)} MiB; at most {MAX_BYTES >> 20} are read")
            return stream.read(MAX_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise DataError("it is a link" if path.is_symlink() else f"it cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"it is not text in UTF-8, from byte {error.start} on") from None


def _percent_cells(text: str) -> list[str]:
    """Cells of `# %%`, or if there is none, of `%%exercise`; Jupytext has commented out their magics."""
    text = text.replace("\r\n", "\n")
    if markers := [*_PERCENT.finditer(text)]:
        starts = [marker.end() for marker in markers]
    else:
        markers = [*_EXERCISE.finditer(text)]
        starts = [marker.start() for marker in markers]
    if not markers:
        raise DataError(
            "it has no cells: in a .py file `# %%` stands before each, and %%exercise NAME is its first line"
        )
    ends = [*(marker.start() for marker in markers[1:]), len(text)]
    code = [text[start:end] for m, start, end in zip(markers, starts, ends, strict=True) if "[markdown]" not in m[0]]
    return [re.sub(r"^# (%%?\w)", r"\1", body, flags=re.M).rstrip("\n") + "\n" for body in code]


def _notebook_cells(text: str) -> tuple[list[str], dict[str, Any]]:
    try:
        notebook = bounded_json(text, MAX_VALUES)
    except ValueError as error:
        raise DataError(f"it is not a notebook: {error}"[:200]) from None
    try:
        cells = notebook.get("cells")
        if cells is None:  # nbformat 3
            cells = [cell for sheet in notebook["worksheets"] for cell in sheet["cells"]]
        code = [cell for cell in cells if cell.get("cell_type") == "code"]
        sources = [cell["source"] if "source" in cell else cell["input"] for cell in code]
        joined = [source if isinstance(source, str) else "".join(source) for source in sources]
    except (AttributeError, KeyError, TypeError):
        raise DataError("it is JSON, but not a notebook: it has no cells with sources") from None
    metadata = notebook.get("metadata")
    return joined, metadata if isinstance(metadata, dict) else {}
