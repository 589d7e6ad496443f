"""JSON of strangers: what is counted is never less than what `json` makes of it, and too much is refused unread."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit import bounded_json


def made(value: Any) -> int:
    """Values and keys in it."""
    if isinstance(value, list):
        return 1 + sum(map(made, value))
    return 1 + sum(1 + made(item) for item in value.values()) if isinstance(value, dict) else 1


texts = st.text(st.sampled_from('a",:[]{}\\ é'), max_size=6)
values = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
)


@given(values, st.booleans(), st.sampled_from([None, 1]))
def test_the_count_is_a_bound_and_strings_do_not_raise_it(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert made(value) <= bounded_json.values_in(text, 10**9) <= 2 * made(value)
    assert bounded_json.loads(text, 2 * made(value)) == bounded_json.loads(text.encode(), None) == value


@pytest.mark.parametrize("unit", ["[]", "{}", "1", '""', "[[]]", '{"":1}', "null", '"\\""', '"\\\\"'])
def test_too_many_values_are_refused_before_any_is_made(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("it was parsed"))
    with pytest.raises(ValueError, match="values; at most 10,000 are read"):
        bounded_json.loads(f"[{','.join([unit] * 20_000)}]", 10_000)


def test_one_long_text_is_one_value() -> None:
    assert len(bounded_json.loads(json.dumps(",[" * 100_000), 5)) == 200_000


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, b"\xff", "", '"', "[1,]", '{"a":', b"\x00[\x00]"])
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        bounded_json.loads(text, 1_000_000)
