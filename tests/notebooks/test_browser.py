"""Notebooks in a real JupyterLab: no error in a cell, none of the page, nothing asked from another machine.

The pictures stay in `build/browser/`, a screen each, for whoever wants to look.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from labkit.source import notebooks
from tests.notebooks import browser

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted(ROOT.glob("labs/[0-9][0-9]_*.ipynb")) + sorted(ROOT.glob("solutions/[0-9][0-9]_*.ipynb"))
MINI = Path(__file__).resolve().parents[1] / "labkit" / "mini" / "course"
pytestmark = pytest.mark.skipif(bool(browser.missing()), reason=browser.missing() or "not skipped")


def test_the_miniature_lab_runs_in_a_browser(tmp_path: Path) -> None:
    import nbformat

    (tmp_path / "solutions").mkdir()
    (tmp_path / "labs").mkdir()
    shutil.copytree(MINI, tmp_path / "course")
    for notebook, path in notebooks(tmp_path / "course" / "00_mini" / "lab.py"):
        nbformat.write(notebook, path)
    seen = browser.visit(tmp_path / "solutions" / "00_mini.ipynb", tmp_path / "pictures" / "mini")
    kinds = [kind for cell in seen.outputs for kind in cell]
    assert kinds.count("execute_result") == 5 and not [kind for kind in kinds if kind.startswith("error")]
    assert seen.page_errors == [] and seen.outside == []
    assert seen.panel.splitlines()[0] == "lab 00_mini: 12 of 12 points", "the checks below have moved it"
    assert seen.pictures and all(picture.stat().st_size > 10_000 for picture in seen.pictures)


@pytest.mark.thorough
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_run_all(notebook: Path) -> None:
    folder = ROOT / "build" / "browser" / notebook.parent.name
    for old in folder.glob(f"{notebook.stem}-*.png"):
        old.unlink()
    seen = browser.visit(notebook, folder / notebook.stem)
    failed = [(i, kind) for i, cell in enumerate(seen.outputs, 1) for kind in cell if kind.startswith("error")]
    assert not failed and seen.page_errors == [] and seen.outside == []
    assert any(seen.outputs) and len(seen.pictures) >= 5
