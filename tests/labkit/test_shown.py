"""What a stranger wrote is shown on one line and controls nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.shown import MOST, clean, named
from labkit.verdict import Row, Verdict


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ada", "ada"), ("Zoë Ünal ✔ 字", "Zoë Ünal ✔ 字"), ("a\x1b[2Jb", "a\\x1b[2Jb"), ("a\nb\tc\r", "a b c "),
        ("\x00\x7f\x9b", "\\x00\\x7f\\x9b"), ("a\u202eb", "a\\u202eb"), ("\udc80", "\\udc80"),
        ("a\u2028b\xa0c", "a b c"),
        ("می\u200cخواهم", "می\u200cخواهم"), ("<x at 0x7f31c0ffee10>", "<x at 0x…>"),
        ("0x1f of 0xdeadbeef7", "0x1f of 0x…"), ("the mask 0xffffffff", "the mask 0xffffffff"),
        ("\U000e0041", "\\U000e0041"),
    ],
)  # fmt: skip
def test_clean(text: str, shown: str) -> None:
    assert clean(text) == shown


@given(st.text(st.characters(), max_size=40))
def test_nothing_that_controls_is_left_and_twice_is_once(text: str) -> None:
    once = clean(text)
    assert all(c.isprintable() or c in "\u200c\u200d" for c in once) and clean(once) == once
    once.encode()


@given(st.text(st.characters(), max_size=9), st.text(st.characters(), max_size=9))
def test_names_stay_different_and_control_nothing(one: str, other: str) -> None:
    assert all(c.isprintable() or c in "\u200c\u200d" for c in named(one))
    assert (named(one) == named(other)) == (one == other)


@pytest.mark.parametrize(
    "names", [("a b", "a\nb"), ("a\x1b", "a\\x1b"), ("x" * 1100, "x" * 1101), ("\udc80", "\udc81")]
)
def test_names_that_look_alike_do_not_when_named(names: tuple[str, str]) -> None:
    assert clean(names[0]) == clean(names[1]) or "\udc80" in names
    assert named(names[0]) != named(names[1]) and named("0x123456789") == "0x123456789"


def test_it_is_short() -> None:
    assert clean("x" * 10**7) == "x" * (MOST - 1) + "…" and len(clean("\x1b" * 10**7)) == MOST


def test_notes_of_a_verdict_are_clean() -> None:
    verdict = Verdict("ring", "wrong", 1, (Row("case", 0, 1, "got '\x1b[31m'"),), "", "a\nb", "c\nd")
    assert "\x1b" not in repr(verdict) + verdict._repr_html_() and repr(verdict).count("\n") == 3
    noted = Verdict("ring", "wrong", 1, note="ValueError: \x1b]0;title\x07")
    assert noted.note == "ValueError: \\x1b]0;title\\x07"
