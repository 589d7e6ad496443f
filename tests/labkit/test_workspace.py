"""The files of a notebook: importable, line for line the cell, and never in the way of another module."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit.verdict import Verdict
from labkit.workspace import Workspace
from minimegatron.errors import ConfigError


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Workspace]:
    yield Workspace("00_mini", tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "exercises"]:
        del sys.modules[name]


def test_exercises_are_modules_for_cells_and_for_scripts(work: Workspace) -> None:
    work.define(work.save_exercise("one", "one", "def one():\n    return 1\n"))
    second = work.define(
        work.save_exercise("two", "two", "from exercises.one import one\ndef two():\n    return 2 * one()")
    )
    assert second.two() == 2
    script = work.save_script("both", "%%torchrun -n 1", "from exercises.two import two\nprint(two())")
    said = subprocess.run(
        [sys.executable, work.relative(script)], cwd=work.root, capture_output=True, text=True, timeout=30
    )
    assert said.stdout == "2\n" and work.relative(script) == ".work/00_mini/both.py"


def test_an_exercise_run_again_replaces_the_first(work: Workspace) -> None:
    work.define(work.save_exercise("one", "one", "def one():\n    return 1\n"))
    work.define(work.save_exercise("one", "one", "def one():\n    return 11\n"))
    from exercises.one import one  # type: ignore[import-not-found]

    assert one() == 11


def test_another_process_never_sees_the_text_before(work: Workspace) -> None:
    """Python knows a compiled file by second and size; an edit may change neither."""
    run = [sys.executable, "-c", "from exercises.one import one; print(one())"]
    place = work.folder / "exercises" / "one.py"
    for answer in ("1", "2"):
        work.save_exercise("one", "one", f"def one():\n    return {answer}\n")
        os.utime(place, (1_000_000_000, 1_000_000_000))
        env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        said = subprocess.run(run, cwd=work.folder, env=env, capture_output=True, text=True, timeout=30)
        assert said.stdout == f"{answer}\n", said.stderr
        assert list(place.parent.glob("__pycache__/one.*"))


def test_another_lab_has_its_own_exercises(work: Workspace, tmp_path: Path) -> None:
    work.define(work.save_exercise("one", "one", "x = 1"))
    other = Workspace("01_other", tmp_path)
    other.define(other.save_exercise("two", "two", "y = 2"))
    assert "exercises.two" in sys.modules and "exercises.one" not in sys.modules


def test_line_n_of_the_file_is_line_n_of_the_cell(work: Workspace) -> None:
    path = work.save_exercise("one", "one", "def one():\n    return 1\n")
    assert path.read_text().splitlines() == ["# %%exercise one", "def one():", "    return 1"]
    with pytest.raises(SyntaxError) as caught:
        work.define(work.save_exercise("bad", "bad", "x = 1\ny = = 2"))
    assert caught.value.lineno == 3


@pytest.mark.parametrize("name", ["torch", "json", "exercises", "minimegatron", "no name", "../up", "pytest"])
def test_a_script_may_not_hide_a_module(work: Workspace, name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a cell"):
        work.save_script(name, "%%torchrun", "")


def test_a_script_may_be_saved_again(work: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(work.folder))
    for text in ("x = 1", "x = 2"):
        assert work.save_script("mine", "%%torchrun", text).read_text().endswith(text)


def test_verdicts_are_remembered_until_the_code_changes(work: Workspace) -> None:
    verdict = Verdict("two", "passed", 1)
    work.save_exercise("one", "one", "x = 1")
    work.save_exercise("two", "two", "from exercises.one import x")
    work.save_exercise("three", "three", "")
    work.remember(verdict)
    work.save_exercise("three", "three", "z = 3")
    assert work.remembered("two") == verdict
    work.save_exercise("one", "one", "x = 2")
    assert work.remembered("two") is None
