"""A grading can be repeated from its JSON: the same files byte for byte, or what has changed since."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labkit import grade, regrade
from labkit.fresh import Nursery
from labkit.verdict import Verdict
from tests.labkit.grading_run import Run, run
from tests.labkit.handed_in import BUBBLE, DOUBLE, OPEN, hand_in, notebook
from tests.thorough import mostly_thorough

BY_SEED = "%%exercise bubble\ndef bubble(p, m):\n    return float(p * m) if p % 2 else object()\n"


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Run:
    files = {"ada.ipynb": notebook([OPEN, BY_SEED, DOUBLE]), "ben.zip": "x", "eva.ipynb": notebook([OPEN, BUBBLE])}
    folder = hand_in(tmp_path_factory.mktemp("first"), {f"in/{name}": text for name, text in files.items()})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grade, "Nursery", lambda: contextlib.nullcontext(nursery))
        return run(folder, "--only", "bubble")


@pytest.fixture
def first(graded: Run, tmp_path: Path, warm: None) -> Run:
    """The same submissions and files, to be changed."""
    shutil.copytree(graded.out.parent, tmp_path, dirs_exist_ok=True)
    return graded._replace(out=tmp_path / "out")


def again(folder: Path, first: Run, *words: str) -> Run:
    """Repeat it into another folder."""
    earlier = folder / "earlier.json"
    earlier.write_bytes((first.out / "marks.json").read_bytes())
    for path in first.out.glob("marks.*"):
        path.unlink()
    return run(folder, "--regrade", str(earlier), *words, lab="")


def test_the_same_marks_byte_for_byte(tmp_path: Path, first: Run) -> None:
    table, page = (first.out / "marks.csv").read_bytes(), (first.out / "marks.json").read_text()
    second = again(tmp_path, first)
    assert second.status == 0 and second.said == first.said and second.complaints == first.complaints
    assert (second.out / "marks.csv").read_bytes() == table
    before, after = page.partition('"seconds"')[0], (second.out / "marks.json").read_text().partition('"seconds"')[0]
    assert before == after and '"exercises"' in before and "time" not in before
    assert second.rows["seed"] == first.rows["seed"] and len(second.rows["marks"]) == 3


def test_learners_whose_names_look_alike_have_their_own_marks(tmp_path: Path, warm: None) -> None:
    """Also of names that look like an address in memory, which `clean` takes out of messages."""
    wrong = "%%exercise bubble\ndef bubble(p, m): return 0\n"
    names = {"ada b": BUBBLE, "ada\nb": wrong, "0x123456789": BUBBLE, "0x123456780": wrong}
    files = {f"in/{name}.ipynb": notebook([OPEN, text]) for name, text in names.items()}
    before = run(hand_in(tmp_path, files), "--only", "bubble")
    assert len({row["learner"] for row in before.rows["marks"]}) == 4
    after = again(tmp_path, before)
    assert after.status == 0 and after.rows["marks"] == before.rows["marks"]


def change(folder: Path, name: str, text: str) -> None:
    (folder / "in" / name).write_text(text)


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "another text": (lambda at: change(at, "ada.ipynb", notebook([OPEN, BUBBLE])), "ada 00_mini has changed what was"),
    "another remark": (lambda at: change(at, "eva.zip", "x"), "eva 00_mini has changed what was handed in"),
    "one more": (lambda at: change(at, "new.ipynb", notebook([OPEN, BUBBLE])), "new 00_mini was not there"),
    "one less": (lambda at: (at / "in/ben.zip").unlink(), "ben 00_mini is missing"),
}


@pytest.mark.parametrize("what", mostly_thorough(CHANGES, [0]))
def test_what_was_handed_in_has_changed(tmp_path: Path, first: Run, what: str) -> None:
    make, says = CHANGES[what]
    make(tmp_path)
    second = again(tmp_path, first)
    assert second.status == 2 and f"this cannot be the same grading: {says}" in second.complaints
    assert first.rows["seed"] in second.complaints and not (second.out / "marks.csv").exists()


def test_output_of_a_notebook_does_not_count(tmp_path: Path, first: Run) -> None:
    change(tmp_path, "ada.ipynb", notebook([OPEN, BY_SEED, "1 + 1", DOUBLE]))
    assert again(tmp_path, first).status == 0


def test_checks_and_versions_have_changed(tmp_path: Path, first: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regrade, "course_digest", lambda module: "other")
    monkeypatch.setattr(regrade.torch, "__version__", "99.0")
    second = again(tmp_path, first)
    assert second.status == 2
    assert f"torch is 99.0, it was {first.rows['versions']['torch'][:12]}" in second.complaints
    assert "the checks of 00_mini have changed" in second.complaints


def test_marks_that_differ_all_the_same_are_named(tmp_path: Path, first: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from labkit import grading

    monkeypatch.setattr(grading, "judge", lambda *_: Verdict("bubble", "wrong", 5, note="another"))
    second = again(tmp_path, first)
    assert second.status == 1
    assert "not the same as before, with the same seed and checks: ada 00_mini, eva 00_mini" in second.complaints


@pytest.mark.parametrize(
    "words", mostly_thorough([["--seed", "x"], ["--only", "double"], ["--lab", "01"], ["--course", "tests"]], [1])
)
def test_an_option_that_asks_for_something_else(tmp_path: Path, first: Run, words: list[str]) -> None:
    second = again(tmp_path, first, *words)
    assert second.status == 2 and f"--regrade and {words[0]} {words[1]}: the earlier run had" in second.complaints


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda data: data.update(complete=False), "was interrupted"), (lambda data: data.pop("seed"), "KeyError"),
        (lambda data: data.update(format=1), "is of format 1"), (lambda data: data.update(marks=3), "TypeError"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_repeated(tmp_path: Path, first: Run, edit: Any, says: str) -> None:
    data = json.loads((first.out / "marks.json").read_text())
    edit(data)
    (first.out / "marks.json").write_text(json.dumps(data))
    second = again(tmp_path, first)
    assert second.status == 2 and says in second.complaints


def test_a_file_that_is_none(tmp_path: Path) -> None:
    assert "cannot be read: No such file" in run(tmp_path, "--regrade", "nowhere").complaints
    (tmp_path / "x").write_text("[")
    assert "is no JSON of a grading" in run(tmp_path, "--regrade", str(tmp_path / "x")).complaints


def test_the_options_of_a_run_are_those_of_the_command() -> None:
    parsed = vars(grade._options(["x"]))
    assert set(regrade._OPTIONS) < set(parsed)
