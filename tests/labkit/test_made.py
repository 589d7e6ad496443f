"""Which cell makes a name, read off the source of a lab."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.made import makers

SOURCES = sorted(Path(__file__).resolve().parents[2].glob("course/[0-9][0-9]_*/lab.py"))

TEXT = """
# %% [markdown]
# prose = "is no code"

# %% tags=["nbval-ignore-output"]
# %load_ext course
first: int = 1
with open("x") as stream, open("y"):
    if (walrus := first):
        from pathlib import Path as Folder
sorted(key for key in range(3))

def function(argument):
    inside = argument

class Kind:
    attribute = 3

# %%
first = 2
broken = (

# %%
# %%exercise ring
def ring(x): ...

# %%
# %%torchrun -n 2 --name=script --needs ring --out run
own = 1

# %%
# %%needs ring
after = 1
"""


def test_names_and_their_first_cells(tmp_path: Path) -> None:
    (tmp_path / "lab.py").write_text(TEXT)
    ran = "%%torchrun -n 2 --name=script --needs ring --out run"
    plain = dict.fromkeys(["first", "stream", "walrus", "Folder", "function", "Kind"], "%load_ext course")
    assert makers(tmp_path / "lab.py") == {
        **plain, "exercises.ring": "%%exercise ring", "ring": "%%exercise ring", "script": ran, "run": ran,
        "after": "%%needs ring",
    }  # fmt: skip


def test_without_a_source_nothing_is_known(tmp_path: Path) -> None:
    assert makers(tmp_path / "lab.py") == {}
    (tmp_path / "lab.py").write_bytes(b"\xff\xfe")
    assert makers(tmp_path / "lab.py") == {}


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.parent.name)
def test_every_exercise_and_result_of_a_lab_is_known(source: Path) -> None:
    known = makers(source)
    text = source.read_text()
    exercises = [line.split()[2] for line in text.splitlines() if line.startswith("# %%exercise")]
    assert exercises and {f"exercises.{name}" for name in exercises} <= set(known)
    outs = [
        line.split("--out ")[1].split()[0] for line in text.splitlines() if line.startswith("# %%") and "--out " in line
    ]
    assert set(outs) <= set(known)
