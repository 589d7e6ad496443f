"""What all capstones have: a page with every criterion, a start that gets no point, and a command that copies it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labkit import acceptance
from labkit.begin import main as begin
from labkit.program import Program, filled, left_of
from minimegatron.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(acceptance.known())
OPTIONS = {"04_service": ["--checkpoint", "{published}"]}  # that a grading needs


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_every_criterion_with_its_points_and_its_limit(name):
    page = (ROOT / "docs" / "capstones.md").read_text()
    criteria = acceptance.load(name).criteria
    assert acceptance.of(criteria) == 100
    for criterion in criteria:
        assert f"| `{criterion.name}` | {criterion.points} | {criterion.limit} |" in page, criterion.name


@pytest.mark.parametrize("name", NAMES)
def test_the_start_gets_no_point(name, tmp_path, capsys):
    assert begin([name[:2], str(tmp_path / "mine")]) == 0
    assert f"--capstone {name[:2]}" in capsys.readouterr().out
    assert (tmp_path / "mine" / "README.md").is_file() and (tmp_path / "mine" / acceptance.load(name).file).is_file()
    (tmp_path / "config.json").write_text("{}")
    options = [word.format(published=tmp_path) for word in OPTIONS.get(name, [])]
    line = [str(tmp_path / "mine"), "--capstone", name[:2], "--json", str(tmp_path / "marks.json"), *options]
    assert acceptance.main(line) == 0
    kept = json.loads((tmp_path / "marks.json").read_text())
    (results,) = kept["learners"].values()
    assert len(results) == len(acceptance.load(name).criteria) and not any(result["met"] for result in results)
    assert all(result["told"] for result in results)
    assert kept["machine"]["cores"] >= 1 and kept["versions"]["torch"]


def test_a_capstone_is_begun_once_and_named_rightly(tmp_path, capsys):
    assert begin([]) == 0
    said = capsys.readouterr().out
    assert all(f"{name}: " in said for name in NAMES)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "work.txt").touch()
    for line, told in (
        (["04", str(tmp_path / "mine")], "is there, and not empty"),
        (["04"], "no folder is named"),
        (["99", str(tmp_path / "other")], "there is no capstone"),
    ):
        with pytest.raises(ConfigError) as error:
            begin(line)
        assert told in error.value.what and error.value.fix


def test_what_a_capstone_raises_is_told_for_each_criterion_that_is_left(tmp_path, monkeypatch, capsys):
    def run(folder, options, random, tell):
        tell(acceptance.Result(options.criteria[0], True, "seen"))
        raise acceptance.Missed("plan.txt is empty")

    two = [acceptance.Criterion("a", 3, "la"), acceptance.Criterion("b", 4, "lb")]
    toy = acceptance.Capstone("09_toy", "plan.txt", two, lambda parser: None, run)
    monkeypatch.setattr(acceptance, "load", lambda wanted: toy)
    (tmp_path / "plan.txt").touch()
    assert acceptance.main([str(tmp_path), "--capstone", "9"]) == 0
    said = capsys.readouterr().out
    assert "3 of 7 points" in said and "plan.txt is empty" in said and "wanted: lb" in said


def test_criteria_are_in_the_order_of_their_functions_and_tell_what_was_wrong():
    criteria = acceptance.Criteria()

    @criteria(10, "even")
    def even(number):
        acceptance.require(number % 2 == 0, f"{number} is odd")
        return f"{number} is even"

    @criteria(5, "there")
    def there(number):
        raise ConfigError("nothing is there", fix="put it there")

    first, second = criteria
    assert (first.name, second.name) == ("even", "there")
    assert criteria.result(first, 4) == acceptance.Result(first, True, "4 is even")
    assert criteria.result(first, 5) == acceptance.Result(first, False, "5 is odd")
    assert "nothing is there" in criteria.result(second, 5).told and not criteria.result(second, 5).met


def test_a_program_is_ended_with_all_that_it_has_started(tmp_path):
    line = "bash -c 'echo {what} >&2; sleep 60 & sleep 61'"
    program = Program(line, tmp_path, {"what": "begun"}, tmp_path / "log")
    while len(program.processes()) < 3:
        assert program.alive
    below = program.processes()
    assert not program.ends(0.05) and program.status is None
    assert program.having("PATH") and not program.having("NO_SUCH_VARIABLE")
    program.end(0.2)
    assert not program.alive and not left_of(below, 5.0) and program.last_words() == "begun"


@pytest.mark.parametrize(
    "command, told", [("", "without a word"), ("a 'b", "no command line"), ("/no/such", "started")]
)
def test_a_command_that_is_none(command, told, tmp_path):
    with pytest.raises(ConfigError, match=told):
        Program(command, tmp_path, {}, tmp_path / "log")


def test_words_are_filled_in_after_the_line_is_cut():
    assert filled("a {b} c{b}", {"b": "two words"}) == ["a", "two words", "ctwo words"]
