"""What a learner reads: three states told apart without colour, the same text every time, HTML that shows all of it."""

from __future__ import annotations

import dataclasses

import pytest

from labkit.said import WORDS, columns
from labkit.verdict import Panel, Progress, Row, Verdict
from minimegatron.commands.my_labs import SAID_IN

PASSED = Verdict("ring", "passed", 5, (Row("two ranks", 5, 5),))
WRONG = Verdict(
    "bubble", "wrong", 3, (Row("4 stages", 1, 1), Row("a < b & c", 0, 2, "got <1>, expected 2")), mistake="p-1 & m"
)
TODO = Verdict("double", "todo", 1)


def test_the_states_as_text() -> None:
    assert repr(TODO) == "○ double   not done yet   0/1"
    assert repr(PASSED) == "✔ ring   passed         5/5"
    assert repr(WRONG).splitlines() == [
        "✘ bubble   not right yet  1/3",
        "  ✔ 4 stages              1/1",
        "  ✘ a < b & c             0/2  got <1>, expected 2",
        "  mistake: p-1 & m",
    ]


def test_one_cause_is_said_once() -> None:
    broken = Verdict(
        "ring", "wrong", 2, (Row("a", 0, 1, "SyntaxError"), Row("b", 0, 1, "SyntaxError")), note="SyntaxError"
    )
    assert repr(broken).splitlines() == ["✘ ring   not right yet  0/2", "  SyntaxError"]
    assert broken._repr_html_().count("SyntaxError") == 1


LATER, HOW = "  (the second try shows an idea)", '  `hint("f")` says how'


@pytest.mark.parametrize(
    ("attempt", "mistake", "idea", "shown"),
    [
        (1, "", "think", [LATER]),
        (1, "mean", "think", ["  mistake: mean"]),
        (1, "", "", []),
        (2, "", "think", ["  idea: think", HOW]),
        (3, "mean", "think", ["  mistake: mean", "  idea: think", HOW]),
        (2, "", "", [HOW]),
        (0, "", "think", ["  idea: think"]),
        (0, "mean", "think", ["  mistake: mean", "  idea: think"]),
    ],
)
def test_what_helps_depends_on_how_often_it_failed(attempt: int, mistake: str, idea: str, shown: list[str]) -> None:
    one = Verdict("f", "wrong", 1, (Row("a", 0, 1, "no"),), "", mistake, idea, attempt)
    assert repr(one).splitlines()[2:] == shown
    page = one._repr_html_()
    for word in ("mean", "think", "says how", "second try"):
        assert (word in page) == any(word in line for line in shown), word


def test_what_could_not_be_tried_gets_no_help() -> None:
    one = Verdict("f", "wrong", 1, (Row("a", 0, 1, "SyntaxError"),), "", "mean", "think", 2, tried=False)
    assert repr(one).splitlines()[2:] == []


def test_a_text_is_said_once() -> None:
    notes = ("one cause", "one cause", "", "another", "one cause", "one cause")
    rows = tuple(Row(f"case {i}", int(not note), 1, note) for i, note in enumerate(notes))
    said = ["one cause", "as in `case 0`", "", "another", "as in `case 0`", "as in `case 0`"]
    lines = repr(Verdict("f", "wrong", 6, rows)).splitlines()[1:]
    assert [line[len("  ✘ case 0          0/1  ") :].strip() for line in lines] == said
    page = Verdict("f", "wrong", 6, rows)._repr_html_()
    assert page.count("one cause") == 1 and page.count("as in") == 3


def test_html_is_escaped_and_says_the_same() -> None:
    page = WRONG._repr_html_()
    assert "a &lt; b &amp; c" in page and "got &lt;1&gt;, expected 2" in page and "p-1 &amp; m" in page
    assert page.count("<tr>") == 2 and "✘ not right yet" in page and "1/3" in page
    code = Verdict("f", "wrong", 1, (Row("a", 0, 1, "line 2: `x < y`"),), attempt=2)._repr_html_()
    assert "<code>x &lt; y</code>" in code and "<code>hint(&quot;f&quot;)</code> says how" in code
    assert "<table" not in PASSED._repr_html_() and "✔ passed" in PASSED._repr_html_()


def test_progress_adds_up() -> None:
    progress = Progress("00_mini", [PASSED, WRONG, TODO])
    assert (progress.points, progress.of) == (6, 9)
    assert repr(progress).splitlines() == [
        "✔ ring    passed           5/5",
        "✘ bubble  not right yet    1/3",
        "○ double  not done yet     0/1",
        "  lab 00_mini              6/9",
    ]
    assert progress._repr_html_().count("<code>") == 3


def test_a_table_in_chinese_has_straight_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SAID_IN, "zh")
    verdict = WRONG.with_cases(["4 个阶段", "很多个阶段，而且只有一个微批次"])
    head, first, second, mistake = repr(verdict).splitlines()
    assert head.startswith("✘ bubble   还不对") and mistake == "  错误: p-1 & m"
    ends = [columns(line[: line.index(points)]) for line, points in ((head, "1/3"), (first, "1/1"), (second, "0/2"))]
    assert len(set(ends)) == 1 and "很多个阶段" in second and "很多个阶段" in verdict._repr_html_()
    assert verdict.points == WRONG.points and WRONG.with_cases(["4 个阶段"]) == WRONG, (
        "a list that does not fit is left out"
    )
    hidden = Verdict("f", "wrong", 1, (Row("a", 0, 1, WORDS["note-whole"]), Row("b", 0, 1, "got 1")))
    assert "保持隐藏" in repr(hidden) and "got 1" in repr(hidden) and "保持隐藏" in hidden._repr_html_()
    lines = repr(Progress("00_mini", [PASSED, WRONG, TODO])).splitlines()
    assert len({columns(line) for line in lines}) == 1 and lines[-1].startswith("  实验 00_mini")
    assert repr(Panel("00_mini", 3, 9, "ring")) == "实验 00_mini: 3 分（满分 9）; 下一个是 ring"


def test_a_mistake_is_told_in_chinese_where_it_is_translated() -> None:
    verdict = dataclasses.replace(WRONG, mistake="It is `p`\tand not p-1.")
    told = verdict.with_mistake({"Another one.": "另一个。", "It is `p`\tand not p-1.": "是 `p`，不是 p-1。"})
    assert "mistake: 是 `p`，不是 p-1。" in repr(told) and "<code>p</code>，不是" in told._repr_html_()
    assert verdict.with_mistake({"Another one.": "另一个。"}) == verdict


def test_verdicts_travel_as_plain_data() -> None:
    for verdict in (PASSED, WRONG, TODO):
        assert Verdict.from_plain(verdict.to_plain()) == verdict
