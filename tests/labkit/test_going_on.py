"""A learner who comes back, runs cells in another order, or mistypes: what they read, in a real kernel."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.labkit.kernel import Kernel, Said
from tests.warm_kernels import WarmManager

pytestmark = pytest.mark.slow  # two starts of a kernel; `test_magics` has one
ROOT = Path(__file__).resolve().parents[2]
BUBBLE = "%%exercise bubble\ndef bubble(p, m):\n    return (p - 1) / (m + p - 1)\n"
STUB = '%%exercise bubble\ndef bubble(p, m):\n    raise NotImplementedError("your code here")\n'
DOUBLE = "%%exercise double\nfrom exercises.bubble import bubble\ndef double(x):\n    return 2 * x\n"
SOURCE = """
# %% [markdown]
# words = "of a text make nothing"

# %%
# %load_ext course
# %lab late late

# %%
import math as maths
plain, (first, *rest) = 1, (2, 3)
for step in range(3):
    inner = [hidden for hidden in range(3)]

# %%
# %%exercise bubble
def bubble(p, m): ...

# %%
# %%ranks 2 --name parts --out counted
print("a local name")
local = 3

# %%
# %%needs bubble
trained = bubble(2, 2)
"""
OPEN = "%load_ext course\n%lab late late"
SAVED = "%load_ext course\n%lab saved saved"
LOOK = "import sys; 'torch' in sys.modules, [name for name in dir() if 'prepare' in name]"


CELLS = ['check("bubble")', "progress()", 'guess("x", 1)', "%%ranks 2\nprint(1)", "%%exercise bubble\nx = 1",
         "%%torchrun -n 2\nprint(1)", "%%needs bubble\nprint(1)"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the lab `late` (the miniature lab's exercises, and a source of its own) and others like it."""
    folder = tmp_path_factory.mktemp("late")
    for name in ("late", "later", "moving", "saved"):
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text("from tests.labkit.mini_course import LAB as LAB\n")
        (folder / name / "lab.py").write_text(SOURCE)
    return folder


class Evening(NamedTuple):
    """A learner's second kernel, and what cells said in the first: without a lab, and in the lab `saved`."""

    kernel: Kernel
    without: dict[str, Said]
    saved: list[Said]


@pytest.fixture(scope="module")
def evening(folder: Path) -> Iterator[Evening]:
    """One kernel for all tests, after another, which Python was executed for.

    `make lab` puts the startup file where every kernel of the environment finds it; a profile's folder works the same.
    """
    startup = folder / ".ipython" / "profile_default" / "startup"
    startup.mkdir(parents=True)
    [name] = re.findall(r"^STARTUP = \$\(VENV\)/etc/ipython/startup/(\S+)$", (ROOT / "Makefile").read_text(), re.M)
    shutil.copy(ROOT / "labkit" / "ipython_startup.py", startup / name)
    with Kernel(folder, PYTHONPATH=f"{ROOT}:{folder}") as running:  # the judge's processes find the labs there
        without = {cell: running.run(cell) for cell in (*CELLS, LOOK)}
        saved = [running.run(cell) for cell in (SAVED, STUB, SAVED, BUBBLE, DOUBLE)]
    with Kernel(folder, WarmManager, PYTHONPATH=f"{ROOT}:{folder}") as running:
        yield Evening(running, without, saved)


@pytest.fixture
def kernel(evening: Evening) -> Kernel:
    """With the lab `late` open."""
    assert evening.kernel.run(OPEN).error == ""
    return evening.kernel


def opened(first_cell: Said) -> list[str]:
    """What the first cell shows beside the standing."""
    standing, *said = first_cell.text.splitlines()
    assert standing.startswith("lab 00_mini: ")
    return said


# -------------------------------------------------------------------------------------------------- coming back


def test_the_first_cell_loads_what_was_saved(folder: Path, evening: Evening) -> None:
    nothing, _, stub, *_ = evening.saved
    assert nothing.text == "lab 00_mini: 0 of 12 points; next: bubble", "nothing is saved, nothing is said"
    assert opened(stub) == [], "a stub is nobody's work"
    kernel = evening.kernel
    assert opened(kernel.run(SAVED)) == ["your exercises are loaded: bubble, double; go on where you were"]
    assert kernel.run("bubble(4, 8) == 3 / 11, double(4)").text == "(True, 8)"
    assert kernel.run("from exercises.bubble import bubble as same; same is bubble").text == "True"
    assert "passed" in kernel.run('check("bubble")').text

    saved = folder / ".work" / "saved" / "exercises" / "double.py"
    saved.write_text("# %%exercise double\nprint('never shown')\n1 / 0\n")
    assert opened(kernel.run(SAVED)) == [
        "your exercises are loaded: bubble; go on where you were",
        "✘ your exercise double cannot be loaded: ZeroDivisionError: division by zero (line 3); mend its cell",
    ]
    saved.write_text("# %%exercise double\ndef double(x):\n    return = 2\n")
    said = opened(kernel.run(SAVED))[1]
    assert "✘ your exercise double cannot be loaded: SyntaxError: invalid syntax (double.py, line 3)" in said
    assert kernel.run("bubble(1, 1)").text == "0.0"


@pytest.mark.thorough
def test_before_a_lab_is_open_all_words_say_so_and_it_is_found_by_its_number(tmp_path: Path) -> None:
    with Kernel(tmp_path) as kernel:
        kernel.run("%load_ext course")
        for cell in CELLS:
            said = kernel.run(cell)
            assert said.text == "" and said.error.splitlines() == [
                "no lab is open", "  fix: run the notebook's first cell: %lab NAME",
            ], cell  # fmt: skip
        for name in ("1", "01", "01_process_groups"):
            assert kernel.run(f"%lab {name}").text.startswith("lab 01_process_groups: 0 of ")
        assert [path.name for path in (tmp_path / ".work").iterdir()] == ["01_process_groups"]
        for name in ("98", "99", "nothing", ""):
            error = kernel.run(f"%lab {name}").error
            assert "01_process_groups, 02_tensor_parallel" in error and len(error.splitlines()) == 2
        assert "did you mean `01_process_groups`?" in kernel.run("%lab 01_process_group").error


@pytest.mark.thorough
def test_a_second_lab_in_one_kernel_has_its_own_modules(kernel: Kernel) -> None:
    kernel.run(BUBBLE)
    kernel.run("%%ranks 2 --name parts\nlab = 'the first'")
    assert kernel.run("import parts; from exercises.bubble import bubble; parts.lab").text == "the first".join("''")
    kernel.run("%lab later later")
    kernel.run("%%exercise double\ndef double(x):\n    return 2 * x\n")
    kernel.run("%%ranks 2 --name parts\nlab = 'the second'")
    assert kernel.run("import parts; from exercises.double import double; parts.lab, double(2)").text == (
        "('the second', 4)"
    )
    assert kernel.run("%%ranks 2\nfrom exercises.double import double\nprint(double(3))").text == "[ranks 0-1] 6"
    kernel.run("%%ranks 2 --name parts\nlab = 'changed'")
    assert kernel.run("import parts; parts.lab").text == "'changed'"
    assert "`exercises.bubble` is made by" in kernel.run("import exercises.bubble").error
    kernel.run(OPEN)


# ------------------------------------------------------------------------------------------ cells in another order


@pytest.mark.parametrize(
    ("cell", "name", "first"),
    [
        ("trained + 1", "trained", "%%needs bubble"),
        ("def use():\n    return trained\nuse()", "trained", "%%needs bubble"),
        ("maths.pi", "maths", "import math as maths"),
        ("rest[0]", "rest", "import math as maths"),
        ("inner", "inner", "import math as maths"),
        ("counted[0]", "counted", "%%ranks 2 --name parts --out counted"),
        ("from exercises.bubble import bubble", "exercises.bubble", "%%exercise bubble"),
        ("%%ranks 2\nfrom exercises.bubble import bubble", "exercises.bubble", "%%exercise bubble"),
        ("%%ranks 2\nimport parts", "parts", "%%ranks 2 --name parts --out counted"),
        ("%%needs\nimport parts", "parts", "%%ranks 2 --name parts --out counted"),
        ("%%needs\nx = trained", "trained", "%%needs bubble"),
    ],
)
def test_a_name_of_another_cell_is_one_line(folder: Path, kernel: Kernel, cell: str, name: str, first: str) -> None:
    shutil.rmtree(folder / ".work" / "late")
    kernel.run("%lab late late")
    said = f"`{name}` is made by a cell above that has not run: run it first (it begins with {first})"
    assert kernel.run(cell) == ("", said)


@pytest.mark.thorough
def test_a_name_of_torchruns_ranks_is_one_line(folder: Path, kernel: Kernel) -> None:
    (folder / ".work" / "late" / "parts.py").unlink(missing_ok=True)
    said = kernel.run("%%torchrun -n 2\nimport parts").error
    assert said.startswith("`parts` is made by a cell above that has not run") and len(said.splitlines()) == 1


@pytest.mark.parametrize("cell", ["hidden", "local", "words", "typo", "import typo", "bubble.__globals__['x']"])
def test_other_names_are_shown_as_always(kernel: Kernel, cell: str) -> None:
    kernel.run(BUBBLE)
    assert "Traceback" in kernel.run(cell).error


def test_a_name_that_an_exercise_does_not_import_is_no_cells_fault(kernel: Kernel) -> None:
    """It would not see what another cell makes."""
    kernel.run("%%exercise bubble\ndef bubble(p, m):\n    return trained")
    said = kernel.run("bubble(1, 1)").error
    assert "NameError" in said and "Traceback" in said and "made by" not in said
    assert "UnboundLocalError" in kernel.run("def f():\n    trained += 1\nf()").error


def test_what_a_failed_cell_should_have_made_is_gone(kernel: Kernel) -> None:
    kernel.run("%%ranks 2 --name parts --out counted\nreport(1)")
    assert kernel.run("counted").text == "[1, 1]"
    assert "planted" in kernel.run("%%ranks 2 --name parts --out counted\nraise ValueError('planted')").error
    assert kernel.run("counted").error == (
        "`counted` is made by a cell above that has failed: mend it first "
        "(it begins with %%ranks 2 --name parts --out counted)"
    )
    kernel.run("%%ranks 2 --name parts --out counted\nreport(2)")
    assert kernel.run("counted").text == "[2, 2]"


# ------------------------------------------------------------------------------------------------ words of errors


@pytest.mark.parametrize("magic", ["%%exercise bubble", "%%ranks 2", "%%torchrun -n 2", "%%needs"])
def test_a_syntax_error_is_its_line_and_a_caret(kernel: Kernel, magic: str) -> None:
    said = kernel.run(f"{magic}\nx = 1\nif x:\n    return = 1\n")
    assert said == ("", "SyntaxError in line 4 of this cell: invalid syntax\n    return = 1\n           ^")
    said = kernel.run(f"{magic}\n    x = 1")
    assert said.error.startswith("IndentationError in line 2 of this cell: unexpected indent\n    x = 1\n")
    assert "SyntaxError in line 2 of this cell: 'return' outside function" in kernel.run(f"{magic}\nreturn 1").error


@pytest.mark.parametrize("magic", ["%%exercise bubble", "%%needs"])
def test_an_exception_shows_the_cell_and_its_line(kernel: Kernel, magic: str) -> None:
    said = re.sub(r"\x1b\[[\d;]*m", "", kernel.run(f"{magic}\ndef wrong(x):\n    return 1 / x\n\n\nwrong(0)\n").error)
    assert "Could not get source" not in said and "IPython" not in said and "labkit" not in said
    assert "ZeroDivisionError: division by zero" in said
    assert "----> 6 wrong(0)" in said and "----> 3     return 1 / x" in said, said


# ---------------------------------------------------------------------------------------- before a lab is open


def test_in_a_fresh_kernel_the_words_say_which_cell_to_run(evening: Evening) -> None:
    said = dict(evening.without)
    assert said.pop(LOOK).text == "(False, [])"
    words = "no lab is open in this kernel: run the notebook's first cell, then go on where you were"
    assert said == dict.fromkeys(CELLS, Said("", words))


# ------------------------------------------------------------------------------------------- a panel that moves


def displayed(kernel: Kernel, cell: str) -> list[tuple[str, str, str]]:
    """(kind, display id, text) of what a cell displays or changes."""
    message, found = kernel.start(cell), []
    while True:
        reply = kernel.client.get_iopub_msg(timeout=60)
        content, kind = reply["content"], reply["msg_type"]
        if reply["parent_header"].get("msg_id") != message:
            continue
        if kind in ("display_data", "update_display_data"):
            found.append((kind, content["transient"].get("display_id", ""), content["data"]["text/plain"]))
        elif kind == "status" and content["execution_state"] == "idle":
            return found


def test_the_first_cell_shows_each_new_standing(kernel: Kernel) -> None:
    kind, cell = "update_display_data", "%load_ext course\n%lab moving moving"
    [(_, first, text)] = displayed(kernel, cell)
    assert first and text == "lab 00_mini: 0 of 12 points; next: bubble"
    assert displayed(kernel, 'check("bubble")') == [], "nothing has changed"
    kernel.run(BUBBLE)
    passed = "lab 00_mini: 5 of 12 points; next: ring_all_reduce"
    assert displayed(kernel, 'check("bubble")') == [(kind, first, passed)]
    kernel.run(BUBBLE.replace("- 1)\n", "- 2)\n"))
    kernel.run("%%exercise double\ndef double(x):\n    return 2 * x\n")
    assert displayed(kernel, "%%needs bubble double\nprint('never')") == [
        (kind, first, "lab 00_mini: 0 of 12 points; next: bubble"),
        (kind, first, "lab 00_mini: 1 of 12 points; next: bubble"),
    ]
    assert displayed(kernel, "progress()") == [], "all is known"
    [(_, second, text)] = displayed(kernel, cell)
    assert second != first and text.splitlines() == [
        "lab 00_mini: 1 of 12 points; next: bubble",
        "your exercises are loaded: bubble, double; go on where you were",
    ]
