"""Whatever one learner hands in, the two others keep their marks, and the instructor reads why this one has 0."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.labkit.grading_run import Run, run
from tests.labkit.handed_in import DOUBLE, OPEN, hand_in, notebook

pytestmark = pytest.mark.thorough

Make = Callable[[Path], object]
GOOD = notebook([OPEN, DOUBLE])
CELL = '{"cell_type":"code","source":""}'
NUMBER, OBJECT = (CELL.replace('""', other) for other in ("[1]", '{"a":1}'))


def cells(*texts: str) -> Make:
    return text("eve.ipynb", notebook([OPEN, *texts]))


def text(name: str, content: str | bytes) -> Make:
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda root: (root / name).write_bytes(raw)


def sparse(root: Path) -> None:
    with open(root / "eve.ipynb", "wb") as stream:
        stream.truncate(1 << 40)


def tree(root: Path) -> None:
    (root / "eve" / "/".join("a" * 400)).mkdir(parents=True)


def crowd(root: Path) -> None:
    (root / "eve").mkdir()
    for i in range(10_050):
        (root / "eve" / f"{i}.x").touch()


KINDS: dict[str, tuple[Make, str]] = {
    "an empty script": (text("eve.py", ""), "it is empty"),
    "a script without cells": (text("eve.py", "print(1)"), "it has no cells"),
    "a script with nothing in its cell": (text("eve.py", "#%%\n#%%\n"), "no cell starts with"),
    "a script of a line without end": (text("eve.py", "# %%" + " " * (8 << 20)), "no cell starts with"),
    "a notebook cut off": (text("eve.ipynb", GOOD[:-20]), "it is not a notebook"),
    "lists without end": (text("eve.ipynb", "[" * 1_000_000), "it is not a notebook"),
    "objects without end": (text("eve.ipynb", '{"cells":' * 100_000), "it is not a notebook"),
    "12 MiB of lists": (text("eve.ipynb", "[" + "[]," * (4 << 20) + "1]"), "at most 2,000,000 are read"),
    "30 MiB of texts": (text("eve.ipynb", "[" + '"",' * (10 << 20) + "1]"), "at most 2,000,000 are read"),
    "a million cells": (text("eve.ipynb", f'{{"cells":[{",".join([CELL] * 10**6)}]}}'), "at most 2,000,000 are read"),
    "100,000 cells": (text("eve.ipynb", f'{{"cells":[{",".join([CELL] * 100_000)}]}}'), "it has 100,000 code cells"),
    "numbers for sources": (text("eve.ipynb", f'{{"cells":[{NUMBER}]}}'), "no cells with sources"),
    "an object for a source": (text("eve.ipynb", f'{{"cells":[{OBJECT}]}}'), "no cell starts with"),
    "an object for cells": (text("eve.ipynb", '{"cells":{"a":1}}'), "no cells with sources"),
    "a huge integer": (text("eve.ipynb", '{"cells":' + "1" * 100_000 + "}"), "it is not a notebook"),
    "a huge float": (text("eve.ipynb", '{"cells":1e' + "9" * 100_000 + "}"), "no cells with sources"),
    "NUL bytes": (text("eve.ipynb", b"\0" * 5000), "it is not a notebook"),
    "NUL in a cell": (cells(DOUBLE + "\0"), ""),
    "half a surrogate": (cells("%%exercise \udc80\udc80"), "there is no exercise `??`"),
    "UTF-16": (text("eve.ipynb", GOOD.encode("utf-16")), "it is not text in UTF-8"),
    "a terabyte of nothing": (sparse, "it has 1048576 MiB; at most 32 are read"),
    "a pipe": (lambda root: os.mkfifo(root / "eve.ipynb"), "it is not a file"),
    "a pipe as a script": (lambda root: os.mkfifo(root / "eve.py"), "it is not a file"),
    "a link to a device": (lambda root: (root / "eve.ipynb").symlink_to("/dev/zero"), "it is a link"),
    "a link to itself": (lambda root: (root / "eve.ipynb").symlink_to(root / "eve.ipynb"), "it is a link"),
    "a link to a folder": (lambda root: (root / "eve").symlink_to("/"), "eve is a link, which is not followed"),
    "a folder in a notebook's name": (lambda root: (root / "eve.ipynb").mkdir(), "there is no notebook in the folder"),
    "folders without end": (tree, "lie deeper than 4"),
    "10,000 files": (crowd, "more than 10000 files"),
    "an archive": (text("eve.zip", "PK"), "handed in as eve.zip, which is not read"),
    "a page": (text("eve.html", "<script>"), "handed in as eve.html, which is not read"),
    "a line break in the name": (text("eve\nada,00_mini,100.ipynb", "{"), "it is not a notebook"),
    "escapes in the name": (text("\x1b[2J\x1b]0;eve\x07.ipynb", "{"), "it is not a notebook"),
    "a name that is no text": (lambda root: (root / os.fsdecode(b"\xff\xfe.ipynb")).write_text("{"), ""),
    "a formula in the name": (text("=cmd|'calc'!A1.ipynb", "{"), "it is not a notebook"),
    "a name that is too long": (text("x" * 249 + ".ipynb", "{"), "it is not a notebook"),
    "markup in the name": (text("<img src=x onerror=alert(1)>.ipynb", "{"), "it is not a notebook"),
    "a cell of 16 MiB": (cells(DOUBLE + "#" * (16 << 20)), "its cell has 17 MiB"),
    "a lab's name of 1 MiB": (text("eve.ipynb", notebook(["%lab " + "x" * (1 << 20)])), "which is not known here"),
    "an exercise's name of 1 MiB": (cells("%%exercise " + "x" * 999_999), "there is no exercise `xxx"),
    "escapes in an exercise's name": (cells("%%exercise \x1b[2J"), "`\\x1b[2J`"),
    "15,000 exercises": (cells(*(f"%%exercise x{i}" for i in range(15_000))), "more remarks"),
    "an exercise 5,000 times": (cells(*["%%exercise double\n1"] * 5000), "is there twice"),
    "an escape in an exception": (
        cells("%%exercise double\ndef double(x): raise ValueError('\\x1b[2J\\u202e')"), ""
    ),
    "an escape in the source": (cells("%%exercise double\ndef double(x): '\x1b[2J\x07'+1"), ""),
    "it imports what is not there": (
        cells("%%exercise double\nimport nothing\x1b\ndef double(x): 1"), ""
    ),
}  # fmt: skip


def of(graded: Run, honest: bool) -> list[dict[str, object]]:
    return [row for row in graded.rows["marks"] if (row["learner"] in ("ada", "zoe")) is honest]


@pytest.mark.parametrize("kind", KINDS)
def test_one_hostile_file_between_two_honest_ones(tmp_path: Path, warm: None, kind: str) -> None:
    make, says = KINDS[kind]
    make(hand_in(tmp_path / "in", {"ada.ipynb": GOOD, "zoe/lab.ipynb": GOOD}) and tmp_path / "in")
    graded = run(tmp_path, "--only", "double", "--seed", "s")
    assert graded.status == 0 and graded.left == []
    assert [(row["learner"], row["points"], row["max"]) for row in of(graded, True)] == [("ada", 1, 1), ("zoe", 1, 1)]
    [eve] = of(graded, False)
    assert eve["points"] == 0 and eve["max"] == 1
    assert says in "; ".join(map(str, eve["remarks"])), eve  # type: ignore[call-overload]
    assert eve["remarks"] or eve["exercises"][0]["note"], "the reason is said"  # type: ignore[index]
    assert_clean(graded)


def assert_clean(graded: Run) -> None:
    """Nothing that controls a terminal or a spreadsheet, no row that is none, no markup, and all of it UTF-8."""
    rows = list(csv.reader((graded.out / "marks.csv").open(newline="", encoding="utf-8")))
    cells = [cell for row in rows for cell in row]
    assert len(rows) == 4 and {len(row) for row in rows} == {8}
    pages = [path.read_text("utf-8") for path in [graded.out / "report.html", *(graded.out / "feedback").iterdir()]]
    lines = [*cells, *graded.said.splitlines(), *graded.complaints.splitlines(), *(graded.out / "feedback").iterdir()]
    shown = [*map(str, lines), *(line for page in pages for line in page.splitlines())]
    assert all(line.isprintable() for line in shown), [line for line in shown if not line.isprintable()]
    assert not any("<img" in page or "<script" in page for page in pages)
    assert len(pages) == 4 and len(graded.said.splitlines()) == 4
    assert not any(cell.startswith(("=", "+", "-", "@")) for cell in cells)
    assert max(map(len, cells)) < 30_000 and json.dumps(graded.rows)


def test_all_of_them_at_once(tmp_path: Path, warm: None) -> None:
    """In one folder, each in a folder of its own where their names are the same."""
    hand_in(tmp_path / "in", {"ada.ipynb": GOOD, "zoe/lab.ipynb": GOOD})
    for number, (make, _) in enumerate(KINDS.values()):
        (tmp_path / "in" / f"h{number:02}").mkdir()
        make(tmp_path / "in" / f"h{number:02}")
    graded = run(tmp_path, "--only", "double", "--seed", "s")
    assert graded.status == 0 and len(graded.rows["marks"]) == 2 + len(KINDS)
    assert [row["points"] for row in of(graded, True)] == [1, 1] and not any(row["points"] for row in of(graded, False))
