"""Exercises are found by name, whatever a notebook looks like; what cannot be read is one line, never a crash."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from labkit import submissions
from labkit.exercises import Case, Exercise, Lab
from labkit.notebook_file import MAX_BYTES, read_cells
from labkit.submissions import Submission, collect, odd
from minimegatron.errors import ConfigError, DataError
from tests.labkit.cells import SOURCES, exercise_cells
from tests.labkit.handed_in import BUBBLE, DOUBLE, OPEN, RING, SOLVED, hand_in, notebook
from tests.labkit.mini_course import LAB

OTHER = Lab("07_other", [Exercise("bubble", [Case("x", {})], lambda: 1), Exercise("else", [Case("x", {})], lambda: 1)])
LABS = {LAB.name: LAB, OTHER.name: OTHER}


def one(folder: Path, text: str, name: str = "ada.ipynb", only: str = "") -> Submission:
    [found] = collect(hand_in(folder, {name: text}), LABS, only)
    return found


def test_exercises_are_what_check_would_have_saved(tmp_path: Path) -> None:
    found = one(tmp_path, notebook(SOLVED))
    assert (found.learner, found.lab, found.file, found.reason) == ("ada", "00_mini", "ada.ipynb", "")
    assert set(found.sources) == set(LAB.exercises) and found.remarks == ()
    assert found.sources["bubble"] == "# " + BUBBLE


def test_layouts(tmp_path: Path) -> None:
    text = notebook(SOLVED)
    names = ["ada.ipynb", "ben/home work (2).ipynb", "eva/00_mini/00_mini.ipynb", "kim.py"]
    hidden = [".x/a.ipynb", "ben/.ipynb_checkpoints/home work (2)-checkpoint.ipynb", "__MACOSX/ada.ipynb"]
    files = dict.fromkeys([*names, *hidden], text) | {"kim.py": percent(), "marks.csv": "a,b", "README.md": "x"}
    found = collect(hand_in(tmp_path, files), LABS)
    assert [(f.learner, f.file, len(f.sources), f.reason) for f in found] == [
        (learner, name, 3, "") for learner, name in zip(["ada", "ben", "eva", "kim"], names, strict=True)
    ]
    assert len({tuple(f.sources.items()) for f in found}) == 1, "a percent script gives the same text"


def percent() -> str:
    """The same cells as Jupytext writes them: magics commented out."""
    lines = []
    for cell in SOLVED:
        lines += ["# %%", *(f"# {line}" if line.startswith("%") else line for line in cell.splitlines()), ""]
    return "\n".join(["# %% [markdown]", "# %%exercise bubble is explained here", *lines])


def test_of_two_cells_with_one_name_the_last_counts_and_it_is_said(tmp_path: Path) -> None:
    wrong = BUBBLE.replace("m + p - 1", "m")
    found = one(tmp_path, notebook([DOUBLE, wrong, OPEN, RING, BUBBLE]))
    assert found.sources["bubble"] == "# " + BUBBLE
    assert found.remarks == ("exercise bubble is there twice; the last one counts",)


@pytest.mark.parametrize(
    ("cell", "remark"),
    [
        ("%%exercise bubbel\nx = 1", "there is no exercise `bubbel` in this lab; did you mean `bubble`?"),
        ("# mine\n%%exercise double\nx = 1", "code cell 3: %%exercise is not its first line, so it is no exercise"),
        ("%%exercise\nx = 1", "code cell 3: %%exercise without a name"),
        ("%%exercise ../../up\nx = 1", "there is no exercise `../../up` in this lab"),
    ],
)
def test_what_is_not_an_exercise_is_said(tmp_path: Path, cell: str, remark: str) -> None:
    found = one(tmp_path, notebook([OPEN, BUBBLE, cell]))
    assert found.remarks == (remark,) and set(found.sources) == {"bubble"}


def test_which_lab_it_is(tmp_path: Path) -> None:
    bare = notebook([BUBBLE, RING])
    assert one(tmp_path / "1", notebook(["%lab 07_other", BUBBLE, RING])).lab == "07_other"
    assert one(tmp_path / "2", bare).lab == "00_mini", "most of its exercises"
    metadata = {"minimegatron": {"source": "solutions/07_other.py"}}
    assert one(tmp_path / "3", notebook([BUBBLE], **metadata)).lab == "07_other"
    assert one(tmp_path / "4", notebook([BUBBLE]), only="07_other").lab == "07_other"
    assert one(tmp_path / "5", notebook([BUBBLE])).reason == "nothing in it says which lab it is"
    assert "is not known here" in one(tmp_path / "6", notebook(["%lab 99_mine my.module"])).reason
    assert "this is the grading of 07_other" in one(tmp_path / "7", notebook(SOLVED), only="07_other").reason


def test_a_module_named_in_a_notebook_is_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hand_in(tmp_path, {"evil.py": "raise SystemExit('imported')"})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert one(tmp_path / "in", notebook(["%lab 00_mini evil", BUBBLE])).sources


BAD = {
    "": "it is empty", "{": "it is not a notebook: Expecting", "[]": "it is JSON, but not a notebook",
    "{}": "it is JSON, but not a notebook", "null": "it is JSON", '{"cells": 3}': "it is JSON",
    '{"cells": [3]}': "it is JSON", '{"cells": [{"cell_type": "code"}]}': "it is JSON",
    '{"cells": [{"cell_type": "code", "source": [1]}]}': "it is JSON",
    "[" * 100_000: "it is not a notebook: lists inside",
}  # fmt: skip


@pytest.mark.parametrize("text", BAD, ids=range(len(BAD)))
def test_what_is_not_a_notebook_is_said(tmp_path: Path, text: str) -> None:
    found = one(tmp_path, text)
    assert found.reason.startswith(BAD[text]) and not found.sources


def test_bytes_that_are_no_notebook(tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").write_bytes(b"\x80\x81")
    with open(tmp_path / "b.ipynb", "wb") as stream:
        stream.truncate(100 << 20)
    (tmp_path / "c.ipynb").symlink_to("/etc/hostname")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "lab.pdf").write_text("x")
    (tmp_path / "e.ipynb").mkdir()
    (tmp_path / "f.ipynb").write_text("\ufeff" + notebook(SOLVED), encoding="utf-8")
    found = {f.learner: f for f in collect(tmp_path, LABS)}
    assert found["a"].reason == "it is not text in UTF-8, from byte 0 on"
    assert found["b"].reason == f"it has 100 MiB; at most {MAX_BYTES >> 20} are read"
    assert found["c"].reason == "it is a link"
    assert found["d"].reason == "there is no notebook in the folder; handed in as d/lab.pdf, which is not read"
    assert found["e.ipynb"].reason == "there is no notebook in the folder"
    assert len(found["f"].sources) == 3
    assert {f.lab for f in found.values()} == {"00_mini"}, "the one lab of this run"


def test_an_old_notebook_and_half_a_surrogate(tmp_path: Path) -> None:
    cells = [{"cell_type": "code", "language": "python", "input": [BUBBLE], "outputs": []}]
    assert "bubble" in one(tmp_path / "3", json.dumps({"worksheets": [{"cells": cells}]}), only="00_mini").sources
    found = one(tmp_path / "4", notebook([OPEN, BUBBLE + "# \ud800"]))
    assert found.sources["bubble"].encode().endswith(b"# ?")


def test_of_two_notebooks_the_labs_name_counts(tmp_path: Path) -> None:
    wrong = notebook([OPEN, BUBBLE])
    files = {"ada/00_mini.ipynb": notebook(SOLVED), "ada/Untitled.ipynb": wrong, "ada/broken.ipynb": "{"}
    [found] = collect(hand_in(tmp_path, files), LABS)
    assert found.file == "ada/00_mini.ipynb" and len(found.sources) == 3
    assert found.remarks[0] == "ada/Untitled.ipynb is not graded, ada/00_mini.ipynb is"
    assert found.remarks[1].startswith("ada/broken.ipynb: it is not a notebook")


def test_a_learner_may_hand_in_two_labs(tmp_path: Path) -> None:
    files = {"ada/a.ipynb": notebook(SOLVED), "ada/b.ipynb": notebook(["%lab 07_other", BUBBLE])}
    assert [f.lab for f in collect(hand_in(tmp_path, files), LABS)] == ["00_mini", "07_other"]


def test_nothing_handed_in(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a folder"):
        collect(tmp_path / "nowhere", LABS)
    with pytest.raises(DataError, match="no submission in"):
        collect(hand_in(tmp_path, {"README.md": "x"}), LABS)


# ------------------------------------------------------------------------------------------ nothing ends the others

PERCENT = {
    "nothing.py": ("", "it is empty"), "space.py": (" \n\n", "it is empty"),
    "plain.py": ("print(1)\n", "it has no cells: in a .py file `# %%` stands before each, and %%exercise NAME is its"),
}  # fmt: skip


@pytest.mark.parametrize("name", PERCENT)
def test_a_script_without_cells_is_said(tmp_path: Path, name: str) -> None:
    text, reason = PERCENT[name]
    assert one(tmp_path, text, name).reason.startswith(reason)


@pytest.mark.parametrize("marker", ["# %%", "#%%", "# %% one", "#  %%", "# %% [code]"])
def test_markers_of_a_script(tmp_path: Path, marker: str) -> None:
    text = percent().replace("# %%\n", f"{marker}\n")
    assert set(one(tmp_path, text, "kim.py").sources) == set(LAB.exercises)


def test_a_script_of_exercises_without_markers(tmp_path: Path) -> None:
    text = "import math\n" + BUBBLE + "# %%exercise double\r\n" + DOUBLE.partition("\n")[2]
    found = one(tmp_path, text, "kim.py", only="00_mini")
    assert set(found.sources) == {"bubble", "double"} and found.sources["bubble"].startswith("# %%exercise bubble\ndef")


def test_an_exception_that_is_not_foreseen_is_one_learners_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(path: Path) -> object:
        if path.stem == "ben":
            raise RuntimeError("of no kind\x1b")
        return read_cells(path)

    monkeypatch.setattr(submissions, "read_cells", breaks)
    found = collect(hand_in(tmp_path, {f"{name}.ipynb": notebook(SOLVED) for name in ("ada", "ben", "eva")}), LABS)
    assert [len(one.sources) for one in found] == [3, 0, 3]
    assert found[1].reason == "it could not be read (RuntimeError: of no kind\x1b)"
    assert found[1].fault == "RuntimeError: of no kind\x1b" and not found[0].fault


def test_remarks_are_few_and_names_short(tmp_path: Path) -> None:
    cells = [f"%%exercise {'x' * 500_000}{i}\n1" for i in range(3)] + [f"%%exercise n{i}\n1" for i in range(500)]
    found = one(tmp_path, notebook([OPEN, BUBBLE, *cells]))
    assert len(found.remarks) == 21 and found.remarks[-1].startswith("and ") and max(map(len, found.remarks)) < 200
    large = one(tmp_path / "2", notebook([OPEN, BUBBLE, DOUBLE + "#" * (1 << 20)]))
    assert (
        large.remarks == ("exercise double: its cell has 2 MiB; at most 1 are read",) and "double" not in large.sources
    )


def test_a_digest_is_of_all_that_a_mark_depends_on() -> None:
    first = Submission("ada", "00_mini", "ada.ipynb", {"bubble": "x", "double": "y"})
    assert first.digest == dataclasses.replace(first, sources={"double": "y", "bubble": "x"}).digest
    other = [{"learner": "b"}, {"lab": "b"}, {"sources": {"bubble": "x"}}, {"reason": "b"}, {"remarks": ("\udc80",)}]
    assert len({first.digest, *(dataclasses.replace(first, **one).digest for one in other)}) == 1 + len(other)


ODD = {
    "from labkit import process_group\nprocess_group.LOG.calls.clear()": ["labkit.process_group"],
    "from labkit.evidence import Evidence\nEvidence.to_plain = None": ["labkit.evidence.Evidence"],
    "import sys\nsys.modules['labkit.process_group'].LOG.calls.clear()": ["sys"],
    "import gc, fcntl\ngc.get_objects()": ["fcntl", "gc"],
    "f = (lambda: 0).__globals__['x']": ["__globals__"],
    "exec('import sys')": ["exec"],
    "(": [],
}


@pytest.mark.parametrize("text", ODD, ids=range(len(ODD)))
def test_what_no_exercise_needs_is_remarked(tmp_path: Path, text: str) -> None:
    found = one(tmp_path, notebook([OPEN, f"{BUBBLE}{text}"]))
    assert found.remarks == ((f"look at bubble: it names {', '.join(ODD[text])}",) if ODD[text] else ())


def test_no_solution_is_remarked() -> None:
    labs = {path.parent.name: exercise_cells(path.parent.name, solved=True) for path in SOURCES}
    assert {
        (lab, name): said for lab, cells in labs.items() for name, text in cells.items() if (said := odd(text))
    } == {}
    ordinary = "import torch, numpy, math\nfrom course.lab07.cuda import Kernel\nmodel.eval()\nlist(model.modules())"
    assert odd(ordinary) == []
