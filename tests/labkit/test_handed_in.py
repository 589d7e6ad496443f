"""Whatever stands in the folder is read, or named with its learner: nothing is missing silently."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from labkit import handed_in
from labkit.handed_in import learners, passed_over
from labkit.submissions import Submission, collect
from minimegatron.errors import ConfigError
from tests.labkit.handed_in import SOLVED, hand_in, notebook
from tests.labkit.mini_course import LAB


def collected(root: Path) -> dict[str, Submission]:
    return {one.learner: one for one in collect(root, {LAB.name: LAB})}


NOT_READ = {
    "ada.zip": " (unpack it)", "ada.tar.gz": " (unpack it)", "ada.7z": " (unpack it)", "ada.html": "", "ada.md": "",
    "ada.txt": "", "ada.docx": "", "ada": "",
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_READ)
def test_what_is_not_read_is_its_learners_zero(tmp_path: Path, name: str) -> None:
    [found] = collected(hand_in(tmp_path, {name: "x"})).values()
    assert found.learner == "ada" and found.reason == f"handed in as {name}, which is not read{NOT_READ[name]}"


@pytest.mark.parametrize("name", ["ada.IPYNB", "ada.ipynb.txt", "ada.ipynb.json", "ada/Lab.Ipynb"])
def test_notebooks_by_other_endings(tmp_path: Path, name: str) -> None:
    [found] = collected(hand_in(tmp_path, {name: notebook(SOLVED)})).values()
    assert found.learner == "ada" and len(found.sources) == 3 and not found.remarks


def test_beside_a_notebook_it_is_a_remark(tmp_path: Path) -> None:
    text = notebook(SOLVED)
    files = {"ada.ipynb": text, "ada.zip": "x", "ben/a.ipynb": text, "ben/a.html": "x", "ben/b.py": "x"}
    found = collected(hand_in(tmp_path, files))
    assert found["ada"].remarks == ("not read: ada.zip",) and len(found["ada"].sources) == 3
    assert found["ben"].remarks == ("not read beside a notebook: b.py", "not read: ben/a.html")


def test_many_names_are_shortened(tmp_path: Path) -> None:
    found = collected(hand_in(tmp_path, {f"ada/{i}.pdf": "x" for i in range(9)}))
    assert "ada/0.pdf, ada/1.pdf, ada/2.pdf, ada/3.pdf, ada/4.pdf and 4 more" in found["ada"].reason


def test_links_are_named_and_not_followed(tmp_path: Path) -> None:
    text = notebook(SOLVED)
    hand_in(tmp_path, {"away/lab.ipynb": text, "in/ben/a.ipynb": text})
    root = tmp_path / "in"
    (root / "ada").symlink_to(tmp_path / "away")
    (root / "eva.ipynb").symlink_to(tmp_path / "away/lab.ipynb")
    (root / "loop").symlink_to(root / "loop")
    (root / "ben/all").symlink_to("/")
    found = collected(root)
    assert found["ada"].reason == "ada is a link, which is not followed"
    assert found["loop"].reason == "loop is a link, which is not followed"
    assert found["eva"].reason == "it is a link"
    assert found["ben"].remarks == ("ben/all is a link, which is not followed",)


def test_deeper_and_more_than_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = notebook(SOLVED)
    files = {"ada/1/2/3/4/a.ipynb": text, "ben/1/2/3/4/5/a.ipynb": text}
    files |= {f"eva/{i:02}.ipynb": text for i in range(51)}
    found = collected(hand_in(tmp_path, files))
    assert len(found["ada"].sources) == 3 and not found["ada"].remarks
    deeper = "the folders in ben/1/2/3/4 are not read: they lie deeper than 4"
    assert found["ben"].reason == "there is no notebook in the folder" and found["ben"].remarks == (deeper,)
    assert "51 notebooks were handed in; the first 50 are read" in [work.remarks for work in learners(tmp_path)][2]
    monkeypatch.setattr(handed_in, "MAX_ENTRIES", 20)
    assert learners(tmp_path)[2].trouble == ["more than 20 files; the others are not read"]
    assert len(learners(tmp_path)[2].notebooks) == 20


def test_what_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in ("ada.ipynb", "ben.zip", "d/eva.py"):
        os.mkfifo(tmp_path / name)
    found = collected(tmp_path)
    assert found["ada"].reason == found["d"].reason == "it is not a file"
    assert found["ben"].reason == "handed in as ben.zip, which is not read (unpack it)"


def test_folders_that_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that runs as root may open all of them, so the system's refusal is played."""
    hand_in(tmp_path, {"ada/closed/a.ipynb": "x", "ben/b.ipynb": notebook(SOLVED), "eva.ipynb": notebook(SOLVED)})
    scan, opened = os.scandir, os.open

    def refused(path: Path) -> object:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return scan(path)

    def not_opened(path: Path, flags: int) -> int:
        if str(path).endswith("b.ipynb"):
            raise PermissionError(13, "Permission denied")
        return opened(path, flags)

    monkeypatch.setattr(os, "scandir", refused)
    monkeypatch.setattr(os, "open", not_opened)
    found = collected(tmp_path)
    assert found["ada"].remarks == ("the folder ada/closed cannot be read: Permission denied",)
    assert found["ben"].reason == "it cannot be read: Permission denied" and len(found["eva"].sources) == 3


def test_the_instructors_own_files_are_passed_over_and_named(tmp_path: Path) -> None:
    hand_in(tmp_path, {"ada.ipynb": notebook(SOLVED), "marks.csv": "x", "marks.json": "x", "README.md": "x"})
    assert list(collected(tmp_path)) == ["ada"]
    assert passed_over(tmp_path) == ["README.md", "marks.csv", "marks.json"]


def test_a_folder_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is not a folder that can be read: Not a directory"):
        learners(tmp_path / "file")
