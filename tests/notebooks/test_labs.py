"""The labs as they are stored: fresh, run from top to bottom, free of errors, the stubs worth nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from minimegatron.lab.build import check

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "solutions").glob("[0-9][0-9]_*.py"))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_stored_notebooks_are_what_the_source_says(source: Path) -> None:
    assert check(source) == []


def test_every_notebook_has_a_source() -> None:
    stems = {path.stem for path in SOURCES}
    for folder in ("labs", "solutions"):
        assert {path.stem for path in (ROOT / folder).glob("*.ipynb")} <= stems
