"""A class is graded by one command: honest, late, odd and hostile submissions side by side, each with its reason."""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest

from labkit import grade as command
from labkit import grading, promises, submissions
from labkit.fresh import Nursery
from labkit.grading import Course, Mark, grade
from labkit.judge import CourseError
from labkit.marks import as_csv, feedback
from labkit.report import as_html, same_text
from labkit.submissions import Submission, collect
from labkit.verdict import Row, Verdict
from minimegatron import cli
from minimegatron.kernels.build import KernelsUnavailable
from tests.labkit.cheats import CHEATS
from tests.labkit.grading_run import COURSE, Run, run
from tests.labkit.handed_in import BUBBLE, DOUBLE, OPEN, RING, SOLVED, UNTOUCHED, hand_in, notebook, stub
from tests.labkit.mini_course import LAB

ROOT = Path(__file__).resolve().parents[2]
DIVIDED = RING.replace("return total", "return total * (1 / 0)")
WRONG = BUBBLE.replace("m + p - 1", "m")

HONEST = {
    "solved.ipynb": notebook(SOLVED),
    "untouched.ipynb": notebook(UNTOUCHED),
    "partial/00_mini/00_mini.ipynb": notebook([OPEN, BUBBLE, DIVIDED, stub("double")]),
    "twice/copy of lab (3).ipynb": notebook([DOUBLE, WRONG, RING, OPEN, "1 / 0", BUBBLE]),
    "missing.ipynb": notebook([OPEN, BUBBLE]),
    "broken.ipynb": notebook(SOLVED)[:-40],
    "other_lab.ipynb": notebook(["%lab 01_process_groups", BUBBLE]),
    "pdf/lab.pdf": "%PDF",
}
HOSTILE = ["patches torch", "fills the disk"]


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Run:
    """One folder of submissions, graded once, two at a time: one nursery is the command's own, which ends with it."""
    two = iter([Nursery(), contextlib.nullcontext(nursery)])
    folder = tmp_path_factory.mktemp("class")
    hostile = {f"h {name}.ipynb": notebook([OPEN, "%%exercise bubble" + CHEATS[name], DOUBLE]) for name in HOSTILE}
    hand_in(folder / "in", {**HONEST, **hostile})
    with open(folder / "in" / "huge.ipynb", "wb") as stream:
        stream.truncate(100 << 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "Nursery", lambda: next(two))
        return run(folder, "--jobs", "2", "--seed", "class of 26")


def row(graded: Run, learner: str) -> dict[str, Any]:
    [found] = [one for one in graded.rows["marks"] if one["learner"] == learner]
    return dict(found)


def points(graded: Run, learner: str) -> list[int]:
    return [one["points"] for one in row(graded, learner)["exercises"]]


# -------------------------------------------------------------------------------------------------------- honest


@pytest.mark.slow
def test_everybody_is_graded_and_nothing_is_left(graded: Run) -> None:
    assert graded.status == 0 and graded.left == []
    learners = [one["learner"] for one in graded.rows["marks"]]
    assert learners == sorted(learners) and len(learners) == len(HONEST) + len(HOSTILE) + 1
    assert graded.rows["seed"] == "class of 26" and graded.rows["complete"] is True


def test_honest_marks(graded: Run) -> None:
    assert points(graded, "solved") == [5, 6, 1] and row(graded, "solved")["percent"] == 100.0
    assert points(graded, "untouched") == [0, 0, 0]
    assert {one["state"] for one in row(graded, "untouched")["exercises"]} == {"todo"}
    assert points(graded, "partial") == [5, 0, 0]
    assert row(graded, "partial")["exercises"][1]["mistake"] == "A sum divides by nothing."
    assert points(graded, "twice") == [5, 6, 1]
    assert row(graded, "twice")["remarks"] == ["exercise bubble is there twice; the last one counts"]
    assert points(graded, "missing") == [5, 0, 0]
    assert row(graded, "missing")["exercises"][2]["note"] == "there is no such cell in the notebook"


def test_what_cannot_be_graded_is_0_with_the_reason(graded: Run) -> None:
    reasons = {
        "broken": "not graded: it is not a notebook: ",
        "other_lab": "not graded: it is of lab 01_process_groups; this is the grading of 00_mini",
        "pdf": "not graded: there is no notebook in the folder",
        "huge": "not graded: it has 100 MiB; at most 32 are read",
    }
    for learner, reason in reasons.items():
        found = row(graded, learner)
        assert (found["points"], found["max"]) == (0, 12) and found["remarks"][0].startswith(reason)


# ------------------------------------------------------------------------------------------------------- hostile

SAYS = {
    "fills the disk": "File too large",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_submissions_get_what_they_did_right(graded: Run, name: str) -> None:
    """The cheat 0, the honest exercise beside it its points; and a reason that says what happened."""
    assert points(graded, f"h {name}") == [0, 0, 1]
    bubble = row(graded, f"h {name}")["exercises"][0]
    assert bubble["state"] == "wrong" and SAYS.get(name, "") in json.dumps(bubble), bubble


def test_the_report_says_what_the_machine_prevents(graded: Run) -> None:
    assert {"see other processes", "reach the network", "start processes"} < set(graded.rows["prevented"])
    page = (graded.out / "report.html").read_text()
    assert all(what in page for what in graded.rows["prevented"])


# ----------------------------------------------------------------------------------------------------- the files


def test_the_table(graded: Run) -> None:
    rows = list(csv.DictReader((graded.out / "marks.csv").open(newline="")))
    assert list(rows[0]) == ["learner", "lab", "file", *LAB.exercises, "total", "max", "percent", "remarks"]
    solved = next(one for one in rows if one["learner"] == "solved")
    assert [solved[name] for name in (*LAB.exercises, "total", "max", "percent")] == [*"561", "12", "12", "100.0"]
    assert len(rows) == len(graded.rows["marks"])


def test_feedback_is_what_check_shows_and_hides_what_check_hides(graded: Run) -> None:
    pages = {path.stem: path.read_text() for path in (graded.out / "feedback").iterdir()}
    assert set(pages) == {one["learner"] for one in graded.rows["marks"]}
    assert "✔ passed" in pages["solved"] and "12 of 12 points" in pages["solved"]
    assert "A sum divides by nothing" in pages["partial"] and "solved" not in pages["partial"]
    assert "not graded: it is not a notebook" in pages["broken"]
    assert not any("class of 26" in page for page in pages.values()), "the seed is not for learners"


def test_the_report_is_one_page_for_the_instructor(graded: Run) -> None:
    page = (graded.out / "report.html").read_text()
    assert "class of 26" in page and "<code>ring_all_reduce</code>" in page
    assert "1 × A sum divides by nothing." in page
    assert "<script" not in page and "http" not in page
    assert "solved, twice" in page, "the same ring in two notebooks"


def test_the_summary_is_a_line_a_learner(graded: Run) -> None:
    *lines, seed = graded.said.splitlines()
    assert graded.rows["seed"] in seed
    assert len(lines) == len(graded.rows["marks"])
    assert next(line for line in lines if line.startswith("solved")).split() == [
        "solved",
        "00_mini",
        "12/12",
        "100.0",
        "%",
    ]


# --------------------------------------------------------------------------------------------------- the command


def test_a_machine_that_keeps_nothing_apart_gives_marks_on_trust_only(
    tmp_path: Path, warm: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promises, "tried", lambda nursery, secrets: {"start processes": True, "read the rest": False})
    hand_in(tmp_path / "in", {"ada.ipynb": notebook(SOLVED)})
    refused = run(tmp_path, "--only", "bubble")
    assert refused.status == 2 and "One could read the rest" in refused.complaints
    assert not refused.rows["marks"]
    trusted = run(tmp_path, "--only", "bubble", "--trust")
    assert trusted.status == 0 and trusted.rows["trusted"] is True
    [one] = trusted.rows["marks"]
    assert one["points"] == 5 and one["remarks"] == ["on trust: it could read the rest"]


def test_the_same_seed_asks_the_same_questions(tmp_path: Path, warm: None) -> None:
    """A wrong answer that depends on what was asked gets the same marks again, byte for byte."""
    source = "%%exercise bubble\ndef bubble(p, m):\n    return float(p * m)\n"
    hand_in(tmp_path / "in", {"ada.ipynb": notebook([OPEN, source])})
    first = run(tmp_path, "--only", "bubble", "--seed", "s")
    table = (first.out / "marks.csv").read_bytes()
    assert first.rows["marks"][0]["max"] == 5
    second = run(tmp_path, "--only", "bubble", "--seed", "s")
    assert (second.out / "marks.csv").read_bytes() == table
    third = run(tmp_path, "--only", "bubble")
    assert third.rows["seed"] not in ("", "s")


@pytest.mark.thorough
def test_an_interrupt_writes_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bar(contextlib.nullcontext[Any]):
        def __init__(self, **_: Any) -> None:
            super().__init__(self)

        def set_postfix_str(self, _: str) -> None: ...

        def update(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(command, "tqdm", Bar)
    sleeper = notebook([OPEN, "%%exercise bubble\nimport time\ndef bubble(p, m): time.sleep(1000)"])
    hand_in(tmp_path / "in", {"a.ipynb": notebook([OPEN, BUBBLE]), **{f"b{i}.ipynb": sleeper for i in range(9)}})
    stopped = run(tmp_path, "--only", "bubble")
    assert stopped.status == 130 and stopped.left == []
    assert [one["learner"] for one in stopped.rows["marks"]] == ["a"] and stopped.rows["complete"] is False
    assert "interrupted: 1 of 10 submissions are graded" in stopped.complaints
    assert "The run was interrupted" in (stopped.out / "report.html").read_text()


def test_a_check_that_fails_is_the_courses_fault(tmp_path: Path, warm: None) -> None:
    hand_in(tmp_path / "in", {"a.ipynb": notebook(["%%exercise fails\ndef fails(): return 1"])})
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(io.StringIO()) as table:
        assert cli.main(["grade", str(tmp_path / "in"), "--lab", "tests.labkit.broken_course"]) == 1
    assert "the course's own checks failed: fails" in said.getvalue() and "0/1" in table.getvalue()


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["nowhere"], 2, "nowhere is not a folder"), (["empty"], 4, "no submission in empty"),
        (["in", "--lab", "77"], 2, "there is no lab `77`"), (["in", "--lab", "01_proces_groups"], 2, "did you mean"),
        (["in", "--lab", COURSE, "--only", "buble"], 2, "did you mean `bubble`?"),
        (["in", "--jobs", "0"], 2, "--jobs 0"),
        (["in", "--out", "empty"], 2, "cannot be written"), (["in", "--out", "no/where.csv"], 2, "cannot be written"),
    ],
)  # fmt: skip
def test_mistakes_in_calling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, words: list[str], status: int, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    hand_in(tmp_path, {"in/a.ipynb": notebook(SOLVED)})
    assert cli.main(["grade", *words]) == status
    assert says in capsys.readouterr().err


def test_help_helps(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        cli.main(["grade", "--help"])
    said = capsys.readouterr().out
    assert "minimegatron grade submitted/ --out marks.csv" in said and "Exit status" in said


def test_the_labs_of_the_package_are_known() -> None:
    assert "01_process_groups" in command.known_courses("course")


@pytest.mark.parametrize(
    ("error", "remark", "complaint"),
    [
        (KernelsUnavailable("no g++ or clang++ on this machine", where="kernels"),
         "double: no g++ or clang++ on this machine: the kernels of lab 00_mini were not graded",
         "no g++ or clang++ on this machine: the kernels of lab 00_mini were not graded: double (2 times)"),
        (CourseError("draw ended"), "double: the check itself failed",
         "the course's own checks failed: double (2 times)"),
        (KeyError("x\x1b"), "double: the judge failed (KeyError: 'x\\x1b')", "the judge failed (KeyError: 'x\\x1b')"),
    ],
)  # fmt: skip
def test_whose_fault_it_is(
    tmp_path: Path, warm: None, monkeypatch: pytest.MonkeyPatch, error: Exception, remark: str, complaint: str
) -> None:
    """One exercise cannot be judged; the others are, for both learners, and the status says so."""

    def judge(nursery: Any, module: str, name: str, *_: Any) -> Verdict:
        if name == "double":
            raise error
        return Verdict(name, "passed", 1, (Row("case", 1, 1),))

    monkeypatch.setattr(grading, "judge", judge)
    hand_in(tmp_path / "in", {f"{name}.ipynb": notebook(SOLVED) for name in ("ada", "ben")})
    found = run(tmp_path)
    assert found.status == 1 and complaint in found.complaints
    assert [(one["points"], one["remarks"]) for one in found.rows["marks"]] == [(2, [remark])] * 2
    assert "2 faults of the course, this machine or this program" in (found.out / "report.html").read_text()


def test_a_fault_of_the_reader_is_counted(tmp_path: Path, warm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submissions, "read_cells", lambda path: {}["cells\x1b"])
    hand_in(tmp_path / "in", {"ada.ipynb": notebook(SOLVED)})
    found = run(tmp_path)
    assert found.status == 1 and "could not be read: ada (1 times); see the remarks" in found.complaints
    [one] = found.rows["marks"]
    assert one["remarks"] == ["not graded: it could not be read (KeyError: 'cells\\x1b')"] and one["max"] == 12
    assert one["faults"] == {"": "KeyError: 'cells\\x1b'"}


def test_files_that_are_the_instructors_are_named(tmp_path: Path, warm: None) -> None:
    hand_in(tmp_path / "in", {"ada.ipynb": notebook([OPEN]), "marks.csv": "x", "README": "x"})
    assert "taken for the instructor's own, not read: README, marks.csv" in run(tmp_path, "--only", "double").complaints


# ---------------------------------------------------------------------------------------------------- without runs


def test_exercises_of_two_labs_have_columns_of_their_own() -> None:
    other = dataclasses.replace(mark("ada"), submission=Submission("ada", "01_other", "a.ipynb"))
    table = list(csv.reader(io.StringIO(as_csv([mark("ada"), other]))))
    assert table[0][3:5] == ["00_mini/bubble", "01_other/bubble"]
    assert [row[3:5] for row in table[1:]] == [["1", ""], ["", "1"]]
    assert as_csv([mark("ada")]).splitlines()[0] == "learner,lab,file,bubble,total,max,percent,remarks"
    assert [line.split()[:3] for line in command.summary([mark("ada"), other]).splitlines()] == [
        ["ada", "00_mini", "1/2"], ["ada", "01_other", "1/2"],
    ]  # fmt: skip


def test_learners_whose_names_are_shown_alike_have_pages_of_their_own(tmp_path: Path) -> None:
    feedback([mark("a\x1b"), mark("a\\x1b")], tmp_path)
    assert len(list(tmp_path.iterdir())) == 2 and all(path.name.isprintable() for path in tmp_path.iterdir())


def mark(learner: str, source: str = "", state: str = "wrong", remarks: tuple[str, ...] = ()) -> Mark:
    verdict = Verdict("bubble", state, 2, (Row("case", 1, 2, "no"),))
    return Mark(Submission(learner, "00_mini", f"{learner}.ipynb", {"bubble": source}, remarks), (verdict,))


def test_a_cell_of_the_table_is_no_formula() -> None:
    table = as_csv([mark("=HYPERLINK(1)", remarks=("@SUM(1)", "x"))])
    assert table.splitlines()[1] == "'=HYPERLINK(1),00_mini,'=HYPERLINK(1).ipynb,1,1,2,50.0,'@SUM(1); x"


def test_what_the_kernel_does_not_prevent_is_said() -> None:
    run = {"seed": "s", "complete": True, "prevented": {"start processes": True, "reach the network": False}}
    page = as_html([mark("a")], run)
    assert "a submission cannot start processes (tried" in page
    assert "does not prevent it to reach the network: grade in a container" in page


def test_names_of_learners_are_no_markup_and_fit_into_a_file_name(tmp_path: Path) -> None:
    marks = [mark("<b>ada</b> & co"), mark("x" * 250)]
    page = as_html(marks, {"seed": "s", "complete": True, "prevented": {}})
    assert "&lt;b&gt;ada&lt;/b&gt; &amp; co" in page and "<b>ada" not in page
    assert max(map(len, command.summary([mark("x" * 250), mark("ada")]).splitlines()[1:])) < 99
    (tmp_path / "real").mkdir()
    feedback([marks[1]], tmp_path / "real")
    assert [len(path.name) < 255 for path in (tmp_path / "real").iterdir()] == [True]


def test_the_same_text_is_found_under_comments_and_space() -> None:
    long = "def bubble(p, m):\n" + "".join(f"    total_{i} = p * {i} + m\n" for i in range(12)) + "    return total_1\n"
    other = long.replace("\n", "  # mine\n").replace("def bubble(p, m):", 'def bubble(p, m):\n    """Doc."""')
    assert same_text([mark("a", long), mark("b", other), mark("c", long.replace("total", "sum"))]) == [
        ("bubble", ["a", "b"])
    ]
    assert same_text([mark("a", long, "todo"), mark("b", long, "todo")]) == [], "stubs"
    assert same_text([mark("a", BUBBLE), mark("b", BUBBLE)]) == [], "short answers are the same by themselves"


def test_a_server_killed_from_outside_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nursery: Nursery
) -> None:
    from minimegatron.errors import RankError

    calls: list[str] = []

    def failing(nursery: Any, module: str, name: str, *_: Any) -> Verdict:
        calls.append(name)
        if len(calls) < 2 or name == "double":
            raise RankError("the process that starts ranks ended")
        return Verdict(name, "passed", LAB[name].points)

    monkeypatch.setattr(grading, "judge", failing)
    handed_in = collect(hand_in(tmp_path, {"a.ipynb": notebook(SOLVED)}), {LAB.name: LAB})
    [found], interrupted = grade(handed_in, {LAB.name: Course(COURSE, LAB)}, seed="s", nurseries=[nursery])
    assert calls == ["bubble", "bubble", "ring_all_reduce", "double", "double"] and not interrupted
    assert [verdict.state for verdict in found.verdicts] == ["passed", "passed", "wrong"]
    assert found.verdicts[2].note == "could not be graded: the process that starts ranks ended"


# ----------------------------------------------------------------------------------------------------------- lab 01


@pytest.mark.thorough
def test_lab_01_as_shipped_and_as_solved(tmp_path: Path, warm: None) -> None:
    for folder in ("labs", "solutions"):
        hand_in(tmp_path / "in", {f"{folder}.ipynb": (ROOT / folder / "01_process_groups.ipynb").read_text()})
    with contextlib.redirect_stdout(io.StringIO()) as said:
        only = "bytes_sent,axis_groups,ring_all_reduce"
        assert cli.main(["grade", str(tmp_path / "in"), "--quiet", "--only", only]) == 0
    assert [line.split()[:3] for line in said.getvalue().splitlines()[:-1]] == [
        ["labs", "01_process_groups", "0/21"], ["solutions", "01_process_groups", "21/21"],
    ]  # fmt: skip
