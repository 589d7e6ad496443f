"""A learner's copies: made once, never written over, and a newer lab is always found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import pytest

from labkit import source
from minimegatron.commands import my_labs
from minimegatron.commands.my_labs import bring, digest
from minimegatron.commands.prose import Which, mark
from minimegatron.errors import ConfigError

NAME = "01_a.ipynb"
FIRST = "your labs are in my-labs/: copies, yours to change"


def ship(root: Path, *cells: str, name: str = NAME) -> None:
    """A lab as a build writes it."""
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(cell, id=f"c{i}") for i, cell in enumerate(cells)]
    )
    notebook.metadata["minimegatron"] = {"digest": digest(notebook)}
    (root / "labs").mkdir(exist_ok=True)
    nbformat.write(notebook, root / "labs" / name)


def change(path: Path, text: str) -> None:
    """What a learner does, and JupyterLab saves."""
    notebook = nbformat.read(path, 4)
    notebook.cells[0].source = text
    notebook.metadata["language_info"] = {"name": "python", "version": "3.12"}
    nbformat.write(notebook, path)


def run(path: Path) -> None:
    notebook = nbformat.read(path, 4)
    notebook.cells[0].outputs = [nbformat.v4.new_output("stream", name="stdout", text="3")]
    notebook.cells[0].execution_count = 7
    nbformat.write(notebook, path)


def cells(path: Path) -> list[str]:
    return [cell.source for cell in nbformat.read(path, 4).cells]


def test_copies_are_made_once(tmp_path: Path) -> None:
    ship(tmp_path, "1", "two\nlines\n")
    mine, said = bring(tmp_path / "labs")
    assert mine == tmp_path / "my-labs" and said == [FIRST]
    assert (mine / NAME).read_bytes() == (tmp_path / "labs" / NAME).read_bytes()
    change(mine / NAME, "mine")
    assert bring(tmp_path / "labs") == (mine, []) and cells(mine / NAME)[0] == "mine"
    ship(tmp_path, "a second lab", name="02_b.ipynb")
    assert bring(tmp_path / "labs")[1] == [] and cells(mine / "02_b.ipynb") == ["a second lab"]
    assert sorted(path.name for path in mine.iterdir()) == [NAME, "02_b.ipynb"]


def test_a_copy_that_was_only_run_is_replaced_by_a_newer_lab(tmp_path: Path) -> None:
    ship(tmp_path, "1")
    mine, _ = bring(tmp_path / "labs")
    run(mine / NAME)
    assert bring(tmp_path / "labs")[1] == [] and "stdout" in (mine / NAME).read_text(), "outputs stay"
    ship(tmp_path, "2")
    assert bring(tmp_path / "labs")[1] == [f"{NAME}: replaced by a newer version; you had not changed it"]
    assert cells(mine / NAME) == ["2"]


def test_a_copy_that_was_changed_stays_and_the_newer_lab_lies_beside_it(tmp_path: Path) -> None:
    ship(tmp_path, "1")
    mine, _ = bring(tmp_path / "labs")
    change(mine / NAME, "mine")
    ship(tmp_path, "2")
    assert bring(tmp_path / "labs")[1] == [
        f"{NAME}: there is a newer version; yours stays, the new one is 01_a-new.ipynb"
    ]
    assert bring(tmp_path / "labs")[1] == [], "said once"
    ship(tmp_path, "3")
    assert bring(tmp_path / "labs")[1] == [
        f"{NAME}: there is a newer version; yours stays, the new one is 01_a-new.ipynb"
    ]
    assert cells(mine / "01_a-new.ipynb") == ["3"], "nothing of the learner's was in it"
    change(mine / "01_a-new.ipynb", "mine too")
    ship(tmp_path, "4")
    assert "the new one is 01_a-new2.ipynb" in bring(tmp_path / "labs")[1][0]
    assert [cells(path) for path in sorted(mine.iterdir())] == [["mine too"], ["4"], ["mine"]]
    assert bring(tmp_path / "labs")[1] == []


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"cells": [1], "metadata": {"minimegatron": {"digest": "1"}}}'])
def test_what_cannot_be_read_is_a_learners(tmp_path: Path, text: str) -> None:
    ship(tmp_path, "1")
    mine, _ = bring(tmp_path / "labs")
    (mine / NAME).write_text(text)
    assert "yours stays" in bring(tmp_path / "labs")[1][0] and (mine / NAME).read_text() == text
    assert cells(mine / "01_a-new.ipynb") == ["1"]


def test_work_that_was_done_in_the_shipped_folder_comes_along(tmp_path: Path) -> None:
    ship(tmp_path, "1")
    ship(tmp_path, "b", name="02_b.ipynb")
    for lab in ("01_a", "02_b"):
        exercises = tmp_path / "labs" / ".work" / lab / "exercises"
        exercises.mkdir(parents=True)
        (exercises / "one.py").write_text("x = 1")
        (exercises.parent / "runs").mkdir()
    change(tmp_path / "labs" / NAME, "mine")
    mine, said = bring(tmp_path / "labs")
    assert said == [FIRST, f"{NAME}: what you did in labs/ is here too"] and cells(mine / NAME) == ["mine"]
    found = sorted(str(path.relative_to(mine)) for path in mine.rglob("*.py"))
    assert found == [".work/01_a/exercises/one.py"] and not (mine / ".work/01_a/runs").exists()
    change(tmp_path / "labs" / NAME, "mine, later")
    assert bring(tmp_path / "labs")[1] == [] and cells(mine / NAME) == ["mine"]


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    ship(tmp_path, "1")
    (tmp_path / "my-labs").write_text("a file")
    with pytest.raises(ConfigError, match="my-labs cannot be written") as caught:
        bring(tmp_path / "labs")
    assert "minimegatron lab FOLDER" in caught.value.fix


def test_the_shipped_labs_have_their_own_digest() -> None:
    labs = sorted((Path(__file__).resolve().parents[2] / "labs").glob("*.ipynb"))
    assert labs
    for lab in labs:
        notebook: dict[str, Any] = json.loads(lab.read_text())
        assert notebook["metadata"]["minimegatron"]["digest"] == digest(notebook), lab.name
        assert not source.edited(nbformat.read(lab, 4))


def test_git_does_not_see_them() -> None:
    root = Path(__file__).resolve().parents[2]
    assert f"/{my_labs.FOLDER}/" in (root / ".gitignore").read_text().splitlines()


def in_two_languages(root: Path, english: str = "# One", of: str = "# One", code: str = "1") -> None:
    """A lab with a prose cell and one of code, and the Chinese of the prose `of`."""
    prose_cell, code_cell = nbformat.v4.new_markdown_cell(english, id="one"), nbformat.v4.new_code_cell(code, id="two")
    notebook = nbformat.v4.new_notebook(cells=[prose_cell, code_cell])
    notebook.metadata["minimegatron"] = {"digest": digest(notebook)}
    (root / "labs").mkdir(exist_ok=True)
    nbformat.write(notebook, root / "labs" / NAME)
    (root / "course" / "01_a").mkdir(parents=True, exist_ok=True)
    (root / "course" / "01_a" / "zh.md").write_text(f"{mark(Which('cell', 'one'), of)}\n# 一\n", encoding="utf-8")


def test_a_switch_of_language_changes_the_prose_and_keeps_the_work(tmp_path: Path) -> None:
    in_two_languages(tmp_path)
    mine = bring(tmp_path / "labs")[0] / NAME
    assert cells(mine) == ["# One", "1"]
    notebook = nbformat.read(mine, 4)
    notebook.cells[1].source = "mine"
    nbformat.write(notebook, mine)
    for language, want in (("zh", "# 一"), (None, "# 一"), ("en", "# One"), (None, "# One"), ("zh", "# 一")):
        assert bring(tmp_path / "labs", language)[1] == []
        assert cells(mine) == [want, "mine"], language
    notebook = nbformat.read(mine, 4)
    notebook.cells[0].source = "# 一, and a note of mine"
    nbformat.write(notebook, mine)
    bring(tmp_path / "labs", "en")
    assert cells(mine) == ["# 一, and a note of mine", "mine"]
    with pytest.raises(ConfigError, match="there are no labs in 'de'.*"):
        bring(tmp_path / "labs", "de")


def test_an_update_comes_in_the_language_of_the_copies(tmp_path: Path) -> None:
    in_two_languages(tmp_path)
    mine = bring(tmp_path / "labs", "zh")[0] / NAME
    in_two_languages(tmp_path, code="2")
    assert bring(tmp_path / "labs")[1] == [f"{NAME}: replaced by a newer version; you had not changed it"]
    assert cells(mine) == ["# 一", "2"]
    in_two_languages(tmp_path, english="# One, and more", code="2")  # the translation is older
    bring(tmp_path / "labs")
    assert cells(mine) == ["# One, and more", "2"]
