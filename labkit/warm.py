"""Runs a cell of `%%ranks` on a warm rank, as a script with `rank`, `world` and `report`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from minimegatron.errors import DeadlineError, MinimegatronError


def run_cell(rank: int, world: int, script: str) -> Any:
    """Execute a saved cell; returns the last value given to `report`, or None."""
    path = Path(script)
    reported: list[Any] = []
    namespace = {"__name__": "__main__", "__file__": script, "rank": rank, "world": world, "report": reported.append}
    sys.path.insert(0, str(path.parent))
    exec(compile(path.read_text(), script, "exec"), namespace)  # noqa: S102  in a process made for it
    return reported[-1] if reported else None


def explain(error: MinimegatronError, script: Path) -> str:
    """A failure of warm ranks in the words of `%%torchrun`."""
    what = re.sub(r"^(ranks? [\d, -]+) raised ", r"FAILED on \1: ", error.what).replace(run_cell.__name__, "the cell")
    where = re.sub(rf"{re.escape(script.name)}:(\d+) in [^:]+: ", r"line \1 of this cell: ", error.where)
    if error.where.startswith("in the middle of "):  # ranks that went without an exception
        return f"FAILED: {what}\n  {error.where.replace(run_cell.__name__, 'the cell')}"
    if isinstance(error, DeadlineError):
        return "\n  ".join([f"HANG: {what}", *re.split(r"; (?=rank)", where)])
    return f"{what}\n  at {where}" if where else what
