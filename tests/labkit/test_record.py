"""Progress survives restarts, other kernels, kills and damage; or it says what it lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from labkit import progress, record
from labkit.exercises import Case, Exercise, Lab
from labkit.grading import Course
from labkit.progress import standing, table
from labkit.record import NAME, Record, read
from labkit.verdict import Row, Verdict
from minimegatron import cli

SOURCES = {"one": "x = 1", "two": "from exercises.one import x", "three": ""}


def verdict(name: str, points: int = 1) -> Verdict:
    row = Row("case", points, 1, "" if points else "no")
    return Verdict(name, "passed" if points else "wrong", 1, (row,))


def test_it_is_there_after_a_restart_until_something_changes(tmp_path: Path) -> None:
    Record(tmp_path, "checks").put(verdict("two"), SOURCES)
    again = Record(tmp_path, "checks")
    assert again.get("two", SOURCES) == verdict("two") and again.trouble == ""
    assert again.get("one", SOURCES) is None
    assert again.get("two", {**SOURCES, "three": "y"}) == verdict("two"), "it does not import three"
    for changed in ({"two": "pass"}, {"one": "x = 2"}):
        assert again.get("two", {**SOURCES, **changed}) is None
    assert Record(tmp_path, "other checks").get("two", SOURCES) is None


def test_it_says_which_used_exercise_undid_a_pass(tmp_path: Path) -> None:
    Record(tmp_path).put(verdict("two"), SOURCES)
    again = Record(tmp_path)
    assert again.changed_below("two", SOURCES) == [] == again.changed_below("one", SOURCES)
    assert again.changed_below("two", {**SOURCES, "one": "x = 2"}) == ["one"]
    assert again.changed_below("two", {**SOURCES, "one": "x = 2", "two": "pass"}) == [], "its own text has changed"
    again.put(verdict("two", points=0), SOURCES)
    assert again.changed_below("two", {**SOURCES, "one": "x = 2"}) == [], "it had not passed"


def wrong(texts: dict[str, str], record: Record) -> int:
    return record.put(verdict("two", points=0), {**SOURCES, **texts}).attempt


def test_failures_are_counted_over_restarts_until_it_passes(tmp_path: Path) -> None:
    assert wrong({"two": "a"}, Record(tmp_path)) == 1
    assert wrong({"two": "a"}, Record(tmp_path)) == 1, "the same text fails once"
    assert wrong({"two": "a", "one": "b"}, Record(tmp_path)) == 1, "another cell is not this one's text"
    assert wrong({"two": "b"}, Record(tmp_path, "other checks")) == 2
    assert Record(tmp_path).put(Verdict("two", "todo", 1), SOURCES).attempt == 2, "a stub is no failure"
    unread = replace(verdict("two", points=0), tried=False)
    assert Record(tmp_path).put(unread, {**SOURCES, "two": "("}).attempt == 2, "nor is what cannot be read"
    assert wrong({"two": "b"}, Record(tmp_path)) == 2
    assert wrong({"two": "a"}, Record(tmp_path)) == 3
    assert Record(tmp_path).get("two", {**SOURCES, "two": "a"}) == replace(verdict("two", points=0), attempt=3)
    assert Record(tmp_path).put(verdict("two"), SOURCES).attempt == 0
    assert wrong({"two": "a"}, Record(tmp_path)) == 1


def test_failures_are_counted_by_each_kernel_and_where_nothing_can_be_written(tmp_path: Path) -> None:
    first, second = Record(tmp_path), Record(tmp_path)
    assert [wrong({"two": "a"}, first), wrong({"two": "b"}, second), wrong({"two": "c"}, first)] == [1, 2, 3]
    (tmp_path / NAME).write_text('{"format": 4}')
    assert [wrong({"two": "d"}, first), wrong({"two": "d"}, first), wrong({"two": "e"}, first)] == [4, 4, 5]


@pytest.mark.parametrize("version", [1, 2])
def test_a_record_of_an_earlier_version_is_read(tmp_path: Path, version: int) -> None:
    """1 counted no failures; 2 kept hints."""
    plain = {"exercise": "two", "state": "wrong", "of": 1, "rows": [["case", 0, 1, "no"]], "note": "", "hint": "h"}
    plain |= {"attempt": 2, "answered": True} if version == 2 else {}
    kept = {"two": {"digest": record.digest("two", SOURCES, ""), "verdict": plain}}
    (tmp_path / NAME).write_text(json.dumps({"format": version, "sum": record._sum(kept), "exercises": kept}))
    old = Record(tmp_path)
    assert old.get("two", SOURCES) == replace(verdict("two", points=0), attempt=2 * version - 2) and old.trouble == ""
    assert wrong({"two": "a"}, old) == 2 * version - 1 and Record(tmp_path).trouble == ""


DAMAGE = {
    "": "could not be read", "{": "could not be read", "[]": "could not be read", "null": "could not be read",
    "[" * 100_000: "could not be read", '{"format": 1}': "could not be read", '{"format": 0}': "is of an older format",
    '{"format": "1"}': "is of an older format", '{"format": true}': "is of an older format",
    '{"format": 1, "exercises": {"one": 3}}': "could not be read",
    '{"format": 1, "exercises": {"one": {"digest": "", "verdict": {"exercise": "one", "state": "won", "of": 1}}}}':
        "could not be read",
    '{"format": 1, "exercises": {"one": {"digest": "", "verdict": {"exercise": "one", "state": "todo", "of": "9"}}}}':
        "could not be read",
}  # fmt: skip


@pytest.mark.parametrize("text", DAMAGE, ids=range(len(DAMAGE)))
def test_what_is_damaged_is_kept_aside_and_said(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    broken = Record(tmp_path)
    assert broken.trouble.startswith(f"{NAME} {DAMAGE[text]}; it is kept as {NAME}.broken")
    assert (tmp_path / f"{NAME}.broken").read_text() == text
    broken.put(verdict("one"), SOURCES)
    assert Record(tmp_path).get("one", SOURCES) and Record(tmp_path).trouble == ""


def test_a_flipped_bit_is_noticed_or_harmless(tmp_path: Path) -> None:
    """What is read is what was written, or nothing, and then it is said."""
    draw = random.Random(0)
    original = Record(tmp_path).put(verdict("one", points=0), SOURCES)
    whole = (tmp_path / NAME).read_bytes()
    for _ in range(200):
        raw = bytearray(whole)
        raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
        (tmp_path / NAME).write_bytes(raw)
        after = Record(tmp_path)
        assert after.get("one", SOURCES) in (None, original)
        assert after.get("one", SOURCES) or after.trouble


def test_a_newer_file_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text('{"format": 4, "what": "ever"}')
    newer = Record(tmp_path)
    newer.put(verdict("one"), SOURCES)
    assert newer.get("one", SOURCES) == verdict("one") and "is of a newer minimegatron" in newer.trouble
    assert (tmp_path / NAME).read_text() == '{"format": 4, "what": "ever"}'


def test_where_nothing_can_be_written_it_is_remembered_and_said(tmp_path: Path, monkeypatch: Any) -> None:
    Record(tmp_path).put(verdict("one"), SOURCES)

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    closed = Record(tmp_path)
    closed.put(verdict("two"), SOURCES)
    assert closed.get("one", SOURCES) and closed.get("two", SOURCES)
    assert closed.trouble.startswith(f"{NAME} cannot be written (Permission denied): what you pass now is forgotten")
    (tmp_path / f"{NAME}.lock").unlink()
    (tmp_path / f"{NAME}.lock").mkdir()
    assert "cannot be written" in Record(tmp_path).trouble and Record(tmp_path).get("one", SOURCES)


def test_two_kernels_keep_each_others_verdicts(tmp_path: Path) -> None:
    first, second = Record(tmp_path), Record(tmp_path)
    first.put(verdict("one"), SOURCES)
    second.put(verdict("two"), SOURCES)
    assert set(read(tmp_path / NAME)) == {"one", "two"}
    assert second.get("one", SOURCES) == verdict("one")


def test_a_lock_that_is_never_free_does_not_hang(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(record, "_LOCK_SECONDS", 0.1)
    one, two = Record(tmp_path), Record(tmp_path)
    with one._locked():
        two.put(verdict("two"), SOURCES)
    assert two.get("two", SOURCES) and "cannot be written" in two.trouble


def write_for_ever(folder: str, name: str) -> None:
    mine = Record(Path(folder))
    for count in range(10**9):
        mine.put(Verdict(name, "wrong", 1, (Row(str(count) * 500, 0, 1),)), SOURCES)


@pytest.mark.thorough
def test_writers_killed_in_the_middle_leave_a_whole_file(tmp_path: Path) -> None:
    """N=50 kills of two writers at once: what was there before them is never lost, the file is always whole."""
    Record(tmp_path).put(verdict("one"), SOURCES)
    context, draw = multiprocessing.get_context("fork"), random.Random(0)
    for _ in range(25):
        writers = [context.Process(target=write_for_ever, args=(str(tmp_path), name)) for name in ("two", "three")]
        for writer in writers:
            writer.start()
        time.sleep(draw.uniform(0.005, 0.05))
        for writer in writers:
            os.kill(writer.pid or 0, signal.SIGKILL)
            writer.join(10)
        after = Record(tmp_path)
        assert after.get("one", SOURCES) == verdict("one") and after.trouble == ""
    after.put(verdict("two"), SOURCES)
    assert set(path.name for path in tmp_path.iterdir()) <= {NAME, f"{NAME}.lock", f"{NAME}.new"}


# ----------------------------------------------------------------------------------------------- on the command line


def test_the_command_shows_every_lab(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["progress"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["01_process_groups", "0/54", "✔", "0", "✘", "0", "○", "10"]
    assert lines[-1].split()[0] == "all" and lines[-1].split()[1].startswith("0/")
    assert cli.main(["progress", "nowhere"]) == 2


def test_the_better_of_two_folders_counts(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    course = Course("tests.labkit.mini_course", Lab("00_x", [Exercise("one", [Case("a", {})], lambda: 1)]))
    monkeypatch.setattr(progress, "known_courses", lambda package: {"00_x": course})
    monkeypatch.chdir(tmp_path)
    for folder, points in (("labs", 1), ("my-labs", 0), ("my-labs", 1)):
        work = tmp_path / folder / ".work" / "00_x"
        (work / "exercises").mkdir(parents=True, exist_ok=True)
        (work / "exercises" / "one.py").write_text(SOURCES["one"])
        Record(work, record.course_digest(course.module)).put(verdict("one", points=points), SOURCES)
        assert cli.main(["progress"]) == 0
        assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["00_x", "1/1"], folder
    assert cli.main(["progress", "my-labs"]) == 0


def test_the_table_counts_what_still_holds(tmp_path: Path) -> None:
    lab = Lab("00_x", [Exercise(name, [Case("a", {})], lambda: 1) for name in SOURCES])
    course = Course("tests.labkit.mini_course", lab)
    work = tmp_path / ".work" / "00_x"
    (work / "exercises").mkdir(parents=True)
    for name, text in SOURCES.items():
        (work / "exercises" / f"{name}.py").write_text(text)
    kept = Record(work, record.course_digest(course.module))
    kept.put(verdict("two"), SOURCES)
    kept.put(verdict("three", points=0), SOURCES)
    lines = table([tmp_path], {"00_x": course}).splitlines()
    assert lines[1].split() == ["00_x", "1/3", "✔", "1", "✘", "1", "○", "1"] and lines[2].split() == ["all", "1/3"]
    (work / "exercises" / "one.py").write_text("x = 2")
    assert standing(work, course)[0] == [replace(verdict("three", points=0), attempt=1)]
    (work / NAME).write_text("{")
    assert table([tmp_path], {"00_x": course}).splitlines()[-1] == f"00_x: {NAME} could not be read"
    assert (work / NAME).read_text() == "{", "looking changes nothing"


def test_the_file_is_readable(tmp_path: Path) -> None:
    Record(tmp_path).put(verdict("one"), SOURCES)
    data = json.loads((tmp_path / NAME).read_text())
    assert data["format"] == 3 and data["exercises"]["one"]["verdict"]["state"] == "passed"


def test_a_verdict_depends_on_the_parts_of_its_course_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("98_mini/__init__", "LAB = 1\n"), ("98_mini/checks/first", "x = 1\n")):
        (tmp_path / f"{name}.py").parent.mkdir()
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    before = record.course_digest("98_mini")
    (tmp_path / "another.py").write_text("x = 2\n")
    assert record.course_digest("98_mini") == before
    (tmp_path / "98_mini/checks/first.py").write_text("x = 2\n")
    assert record.course_digest("98_mini") != before
