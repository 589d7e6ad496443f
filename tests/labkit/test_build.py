"""From one source to two stored notebooks, and every way in which what is stored may not be trusted."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import nbformat
import pytest

from labkit import build
from labkit.exercises import load_lab
from labkit.source import notebooks
from minimegatron.errors import ConfigError
from tests.labkit.cells import SOURCES
from tests.thorough import mostly_thorough
from tests.warm_kernels import AsyncWarmManager

pytestmark = pytest.mark.slow  # a build starts two kernels
ROOT = Path(__file__).resolve().parents[2]
MINI = Path(__file__).parent / "mini" / "course" / "00_mini" / "lab.py"
FOLDED = '# %% jupyter={"source_hidden": true}'
SOURCE = "course/00_mini/lab.py"
WARM = functools.partial(build.NotebookClient, kernel_manager_class=AsyncWarmManager)
ELSEWHERE = "/" + "home/ada/x.py"  # in two parts: no file of the project names a path of a machine


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the miniature lab, built."""
    root = tmp_path_factory.mktemp("repository")
    shutil.copytree(MINI.parents[1], root / "course")
    with mock.patch.object(build, "NotebookClient", WARM):
        assert build.build(root / SOURCE) == []
    return root


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    """The same, to be damaged."""
    shutil.copytree(built, tmp_path / "copy", ignore=shutil.ignore_patterns(".work"))
    return tmp_path / "copy"


def read(root: Path, name: str) -> Any:
    return nbformat.read(root / name, 4)


def outputs(notebook: Any) -> dict[str, str]:
    """{cell id: text}."""
    return {
        cell.id: "".join(o.get("text", "") + o.get("data", {}).get("text/plain", "") for o in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    }


# -------------------------------------------------------------------------------------------------- what is built


def test_the_solution_gets_full_marks_and_the_lab_none(built: Path) -> None:
    solution, lab = (outputs(read(built, f"{folder}/00_mini.ipynb")) for folder in ("solutions", "labs"))
    assert solution["check-bubble"] == "✔ bubble   passed         5/5"
    assert lab["check-bubble"] == "○ bubble   not done yet   0/5"
    assert solution["torchrun-sums"].splitlines()[1:3] == ["1 rank on a CPU (gloo)", "[rank 0] the sum is 1"]
    assert lab["torchrun-sums"] == "○ this cell waits for exercise ring_all_reduce\n"
    assert "ValueError: a planted mistake" in solution["ranks-broken"]
    assert lab["ranks-broken"] == "○ this cell waits for exercise bubble\n", "a failure that is expected waits, too"
    assert [list(one.values())[0] for one in (solution, lab)] == [
        "lab 00_mini: 12 of 12 points", "lab 00_mini: 0 of 12 points; next: bubble",
    ], "the first cell's panel has moved"  # fmt: skip
    assert "12/12" in list(solution.values())[-1] and "0/12" in list(lab.values())[-1]


def test_the_lab_has_stubs_and_nothing_of_the_solution(built: Path) -> None:
    text = (built / "labs" / "00_mini.ipynb").read_text()
    assert "SOLUTION" not in text and "travelling" not in text and "m + p - 1" not in text and "run.reports" not in text
    cells = {cell.id: cell for cell in read(built, "labs/00_mini.ipynb").cells}
    assert cells["exercise-bubble"].source.splitlines()[-1] == '    raise NotImplementedError("your code here")'
    assert "SOLUTION" not in (built / "solutions" / "00_mini.ipynb").read_text()


def test_the_stored_notebooks_are_quiet_and_portable(built: Path) -> None:
    for folder in ("labs", "solutions"):
        notebook = read(built, f"{folder}/00_mini.ipynb")
        text = (built / folder / "00_mini.ipynb").read_text()
        assert str(built) not in text and str(ROOT) not in text and "/tmp" not in text and "stderr" not in text
        assert set(notebook.metadata) == {"kernelspec", "language_info", "minimegatron"}
        assert notebook.metadata["language_info"] == {"name": "python"}
        assert all("execution" not in cell.metadata for cell in notebook.cells)
    exercise, check = (read(built, "labs/00_mini.ipynb").cells[i].metadata for i in (5, 6))
    assert not exercise["deletable"] and not check["deletable"] and not check["editable"]


def test_an_answer_to_guess_is_run_and_not_stored(built: Path) -> None:
    for folder in ("labs", "solutions"):
        cells = read(built, f"{folder}/00_mini.ipynb").cells
        [hidden] = [cell for cell in cells if "hide-output" in cell.metadata.get("tags", [])]
        assert hidden.execution_count and hidden.outputs == []
        assert hidden.metadata["tags"] == ["hide-output", "nbval-ignore-output"]


def test_a_folded_cell_stays_folded(built: Path) -> None:
    for folder in ("labs", "solutions"):
        folded = [cell for cell in read(built, f"{folder}/00_mini.ipynb").cells if "jupyter" in cell.metadata]
        assert [(cell.source, cell.metadata["jupyter"]) for cell in folded] == [
            ("STAGES, MICROBATCHES = 4, 8", {"source_hidden": True})
        ]


def test_a_guess_stands_before_and_beside_the_number(built: Path) -> None:
    said = [list(outputs(read(built, f"{folder}/00_mini.ipynb")).values()) for folder in ("labs", "solutions")]
    assert all("○ no guess yet: put a number in place of None\n" in one for one in said)
    assert "it is 3 steps; you made no guess\n" in said[1] and not any("it is 3" in text for text in said[0])


# field -> type, as nbgrader's schema 3 has them; it knows no others
NBGRADER = {
    "schema_version": int, "grade": bool, "solution": bool, "locked": bool, "task": bool, "grade_id": str,
    "points": int, "checksum": str, "cell_type": str,
}  # fmt: skip


@pytest.mark.parametrize("source", mostly_thorough([MINI, *SOURCES], [0]), ids=lambda path: path.parent.name)
def test_nbgraders_metadata_obey_its_schema(source: Path) -> None:
    """The rules of nbgrader's own validator, without nbgrader."""
    for notebook, _ in notebooks(source):
        known = [(cell, cell.metadata["nbgrader"]) for cell in notebook.cells if "nbgrader" in cell.metadata]
        ids = [meta["grade_id"] for _, meta in known]
        assert len(set(ids)) == len(ids) > 0
        for cell, meta in known:
            assert all(type(value) is NBGRADER[key] for key, value in meta.items())
            assert {"schema_version", "grade", "solution", "locked", "task", "grade_id"} <= set(meta)
            assert meta["schema_version"] == 3 and meta["grade_id"] == cell.id and not meta["task"]
            assert ("points" in meta) == meta["grade"] and cell.cell_type == "code"
            assert meta["solution"] != meta["locked"], "a learner writes in solution cells and in no others"
        lab = load_lab("tests.labkit.mini_course" if source == MINI else f"course.{source.parent.name}")
        assert sum(meta.get("points", 0) for _, meta in known) == lab.points


def test_cell_ids_do_not_move_when_a_cell_is_inserted(tmp_path: Path) -> None:
    first = [cell.id for notebook, _ in notebooks(MINI) for cell in notebook.cells]
    longer = write(
        tmp_path, lambda text: text.replace("# %% [markdown]\n# ## Run", "# %%\n1 + 1\n\n# %% [markdown]\n# ## Run")
    )
    second = [cell.id for notebook, _ in notebooks(longer) for cell in notebook.cells]
    assert len(second) == len(first) + 2 and [one for one in second if one in set(first)] == first
    assert all(len(set(ids)) == len(ids) for ids in ([c.id for c in notebook.cells] for notebook, _ in notebooks(MINI)))


# ------------------------------------------------------------------------------------------------- what is stale


def test_what_was_just_built_is_fresh(
    built: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(built)
    assert build.main(["--check"]) == 0 and build.main(["--check", "00"]) == 0
    assert capsys.readouterr().out == ""


def test_a_changed_source_is_stale(
    copy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = copy / SOURCE
    source.write_text(source.read_text().replace("Two ranks", "Three ranks"))
    monkeypatch.chdir(copy)
    assert build.main(["--check"]) == 2
    assert capsys.readouterr().out.splitlines() == [
        "solutions/00_mini.ipynb: not what the source says, from cell 00-a-miniature-lab on; build it again",
        "labs/00_mini.ipynb: not what the source says, from cell 00-a-miniature-lab on; build it again",
    ]


def test_a_missing_notebook_is_stale(copy: Path) -> None:
    (copy / "labs" / "00_mini.ipynb").unlink()
    assert build.check(copy / SOURCE) == ["labs/00_mini.ipynb: missing"]


def cell(notebook: Any, identity: str) -> Any:
    return next(cell for cell in notebook.cells if cell.id == identity)


def output(kind: str, **content: Any) -> Any:
    return nbformat.v4.new_output(kind, **content)


DAMAGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "not run": (lambda nb: cell(nb, "check-bubble").update(execution_count=None), "not run from top to bottom"),
    "run out of order": (lambda nb: cell(nb, "check-bubble").update(execution_count=40), "not run from top to bottom"),
    "other metadata": (lambda nb: nb.metadata.update(widgets={}), "its metadata are not what the build writes"),
    "a tag": (lambda nb: cell(nb, "check-bubble").metadata.update(tags=["nbval-skip"]), "from cell check-bubble on"),
    "an error": (
        lambda nb: cell(nb, "check-bubble").outputs.append(output("error", ename="E", evalue="")),
        "cell check-bubble: it ended in an error",
    ),
    "a warning": (
        lambda nb: cell(nb, "check-bubble").outputs.append(output("stream", name="stderr", text="beware")),
        "cell check-bubble: it wrote to stderr",
    ),
    "an absolute path": (
        lambda nb: cell(nb, "torchrun-sums").outputs.append(output("stream", name="stdout", text=f"in {ELSEWHERE}")),
        f"cell torchrun-sums: an absolute path, {ELSEWHERE}",
    ),
    "an answer to guess": (
        lambda nb: next(c for c in nb.cells if "hide-output" in c.metadata.get("tags", [])).outputs.append(
            output("stream", name="stdout", text="steps: 11")
        ),
        "it stores an answer that a learner is to guess",
    ),
    "another verdict": (
        lambda nb: cell(nb, "check-bubble").outputs[0].data.update({"text/plain": "✘ bubble   not right yet  0/5"}),
        "cell check-bubble: its check should say",
    ),
}  # fmt: skip


BOTH = list(itertools.product(("labs", "solutions"), DAMAGES))


@pytest.mark.parametrize(("folder", "damage"), mostly_thorough(BOTH, range(0, len(BOTH), 2)))
def test_a_damaged_notebook_is_stale(copy: Path, folder: str, damage: str) -> None:
    notebook = read(copy, f"{folder}/00_mini.ipynb")
    change, says = DAMAGES[damage]
    change(notebook)
    nbformat.write(notebook, copy / folder / "00_mini.ipynb")
    [problem] = build.check(copy / SOURCE)
    assert problem.startswith(f"{folder}/00_mini.ipynb: ") and says in problem


def test_a_lab_that_somebody_has_worked_in_is_not_overwritten(copy: Path) -> None:
    path = copy / "labs" / "00_mini.ipynb"
    notebook = nbformat.read(path, 4)
    cell(notebook, "exercise-bubble").source += "\n    # an evening's work"
    nbformat.write(notebook, path)
    before = path.read_text()
    with pytest.raises(ConfigError, match="holds cells that no build wrote"):
        build.refuse_to_overwrite(path)
    assert path.read_text() == before


# ------------------------------------------------------------------------------------------ faults of the author


def write(folder: Path, change: Callable[[str], str]) -> Path:
    path = folder / SOURCE
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(change(MINI.read_text()))
    return path


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("%lab 00_mini", "%lab 01_other", "a source opens its lab once, under its own name"),
        ("# %load_ext course\n# %lab 00_mini tests.labkit.mini_course\n", "1\n", "a source opens its lab once"),
        ("    ### END SOLUTION", "", "do not match"),
        ("    ### BEGIN SOLUTION", "    ### END SOLUTION", "do not match"),
        ("    ### BEGIN SOLUTION\n    return 2 * x\n    ### END SOLUTION", "    return 2 * x", "nothing to do"),
        ("%%exercise double", "%%exercise bubble", "exercise bubble is there twice"),
        ("%%exercise double", "%%exercise duble", "lab 00_mini has no exercise `duble`"),
        ('check("double")', '1', "double: not in the source, or never checked"),
        ("# %%exercise double\n", "", "a solution outside of an exercise"),
        ("# %%exercise ring_all_reduce", "# %%torchrun -n 1 --needs double\n1\n\n# %%\n# %%exercise ring_all_reduce",
         "it needs exercise double, which is not above it"),
        ("--name broken", "--name sums", "two cells are called sums"),
        ("STAGES, MICROBATCHES = 4, 8\n", "STAGES, MICROBATCHES = 4, 8\n" + "1\n" * 36, None),
        ("# %% tags=[\"hide-output\"]\n# %%needs bubble\n", "# %%\n" + "1\n" * 34, None),
        ("# %% tags=[\"hide-output\"]\n# %%needs bubble\n", "# %%\n" + "1\n" * 35, "an open cell of 36 lines"),
        ("# %%\n# %%exercise double", f"{FOLDED}\n# %%exercise double", "are never folded"),
        ("# %%\ncheck(\"double\")", f"{FOLDED}\ncheck(\"double\")", "are never folded"),
        ("guess(\"idle\", None", "guess(\"idle\", 3", "begins with a number"),
        ("guessed(\"idle\"", "guessed(\"idl\"", "without a guess"),
        ("STAGES, MICROBATCHES = 4, 8\n", "guess(\n    \"idle\", None, \"\"\n)\n", "is there twice"),
    ],
)  # fmt: skip
def test_the_rules_of_a_source(tmp_path: Path, old: str, new: str, says: str | None) -> None:
    path = write(tmp_path, lambda text: text.replace(old, new))
    assert path.read_text() != MINI.read_text()
    if says is None:
        assert list(notebooks(path))
        return
    with pytest.raises(ConfigError, match=says) as caught:
        list(notebooks(path))
    assert "00_mini" in str(caught.value)


def test_a_cell_that_fails_is_named_and_nothing_is_written(tmp_path: Path) -> None:
    path = write(tmp_path, lambda text: text.replace("# %%\n# %load", "# %%\n1 / 0\n# %load"))
    with (
        mock.patch.object(build, "NotebookClient", WARM),
        pytest.raises(ConfigError, match=r"cell 2 did not end well: 1 / 0") as caught,
    ):
        build.build(path)
    assert "division by zero" in caught.value.fix and caught.value.where == "solutions/00_mini.ipynb"
    assert not path.with_suffix(".ipynb").exists()


def test_the_command_says_what_there_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert build.main([]) == 2
    write(tmp_path, str)
    assert build.main(["07"]) == 2
    said = capsys.readouterr().err
    assert "run this in the repository's root" in said and "choose from 00_mini" in said
