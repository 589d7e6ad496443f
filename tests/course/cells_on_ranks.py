"""Run the `%%ranks` cells of a lab as its notebook does, with the solutions of its exercises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from labkit import warm
from labkit.ranks.pool import Results, shared_pool
from tests.labkit.cells import COURSE, exercise_cells


def saved(lab: str, folder: Path) -> None:
    """Write what the cells of a lab import: its solved exercises, and every `%%ranks` cell under its name."""
    (folder / "exercises").mkdir()
    for name, text in exercise_cells(lab, solved=True).items():
        (folder / "exercises" / f"{name}.py").write_text(text)
    text = (COURSE / lab / "lab.py").read_text()
    for options, body in re.findall(r"^# %%[^\n]*\n# %%ranks ([^\n]*)\n(.*?)(?=^# %%)", text, flags=re.S | re.M):
        name = re.search(r"--name (\w+)", options)
        assert name, options
        (folder / f"{name[1]}.py").write_text(body)


def run(folder: Path, name: str, ranks: int, timeout: float = 120) -> tuple[Results, str]:
    """What each rank reported, and what rank 0 printed."""
    reported: Any = shared_pool(ranks).run(warm.run_cell, str(folder / f"{name}.py"), timeout=timeout)
    return reported, reported.stdout[0]
