"""The labs as they are stored: fresh, run from top to bottom, free of errors, the stubs worth nothing."""

from __future__ import annotations

import re
from pathlib import Path

import jupytext
import pytest

from labkit.build import check

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(ROOT.glob("course/[0-9][0-9]_*/lab.py"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name)
def test_stored_notebooks_are_what_the_source_says(source: Path) -> None:
    assert check(source) == []


def test_every_notebook_has_a_source() -> None:
    stems = {path.parent.name for path in SOURCES}
    for folder in ("labs", "solutions"):
        assert {path.stem for path in (ROOT / folder).glob("*.ipynb")} <= stems


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name)
def test_a_lab_stays_within_its_budget(source: Path) -> None:
    """What its time is made of, counted: processes that torchrun starts, and cells that train (CONTRIBUTING.md)."""
    code = [cell.source for cell in jupytext.read(source, fmt="py:percent").cells if cell.cell_type == "code"]
    started = [int(found) for cell in code for found in re.findall(r"^%%torchrun -n (\d+)", cell)]
    assert sum(started) <= 8, "to see what torchrun does takes a few processes; `%%ranks` are quicker"
    assert sum("optimizer.step()" in cell for cell in code) <= 3
