"""What a stranger wrote is shown on one line and controls nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.shown import MOST, clean
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


def test_it_is_short() -> None:
    assert clean("x" * 10**7) == "x" * (MOST - 1) + "…" and len(clean("\x1b" * 10**7)) == MOST


def test_notes_of_a_verdict_are_clean() -> None:
    verdict = Verdict("ring", "wrong", 1, (Row("case", 0, 1, "got '\x1b[31m'"),), "", "a\nb", "c\nd", "e\nf")
    assert "\x1b" not in repr(verdict) + verdict._repr_html_() and repr(verdict).count("\n") == 4
    noted = Verdict("ring", "wrong", 1, note="ValueError: \x1b]0;title\x07")
    assert noted.note == "ValueError: \\x1b]0;title\\x07"
