"""Comparison: strict where a learner means something, lenient where not, always in words, and it never raises."""

from __future__ import annotations

import math

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit import plain
from labkit.compare import ANYTHING, counted, difference, show

ONES = torch.ones(2, 3)


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (8, 8), (8.0, 8), (8, 8.0), (0.1 + 0.2, 0.3), ((1, 2), [1, 2]), ([[1], [2.0]], [[1], [2]]), ("ring", "ring"),
        (None, None), (True, True), (math.nan, math.nan), (math.inf, math.inf), ({"a": 1}, {"a": 1.0}), ({}, {}),
        (ONES, ONES), (ONES + 1e-6, ONES), (torch.tensor(2.0), 2), (2.0, torch.tensor(2.0)), (torch.tensor(3), 3),
        (torch.tensor([math.nan]), torch.tensor([math.nan])), (torch.zeros(0), torch.zeros(0)),
    ],
)  # fmt: skip
def test_as_good_as(got: object, want: object) -> None:
    assert difference(got, want) is None


@pytest.mark.parametrize(
    ("got", "want", "says"),
    [
        (7, 8, "got 7, expected 8"), (8.5, 8, "got 8.5, expected 8"), (True, 1, "got True, expected 1"),
        (1, True, "got 1, expected True"), (None, 0, "got None, expected 0"), ("8", 8, "got '8', expected 8"),
        (math.nan, 1.0, "got nan, expected 1.0"), (math.inf, 1.0, "got inf, expected 1.0"), (math.inf, 8, "got inf"),
        (math.nan, 8, "got nan"), ([1, 2], [1, 3], "got [1, 2], expected [1, 3]"),
        ([1], [1, 2], "got [1], expected [1, 2]"),
        ([1, 2, 3], [1, 2], "got [1, 2, 3], expected [1, 2]"), ([], [1], "got [], expected [1]"),
        (list(range(50)), list(range(51)), "got 50 items, expected 51"),
        ([0] * 50, [0] * 49 + [1], "at [49]: got 0, expected 1"),
        ({"a": 1}, {"b": 1}, "got the keys ['a'], expected ['b']"), ({"a": 1}, {"a": 2}, "a: got 1, expected 2"),
        (ONES.double(), ONES, "got dtype float64, expected float32"),
        (ONES.t(), ONES, "got a tensor [3, 2], expected [2, 3]"), ([1.0], ONES, "got [1.0], expected a tensor [2, 3]"),
        (ONES * 2, ONES, "got tensor([[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]), expected"),
        (torch.zeros(10, 10), torch.eye(10), "at [0, 0]: got 0.0, expected 1.0 (10 of 100 differ)"),
        (torch.tensor([1, 2]), torch.tensor([1, 3]), "got tensor([1, 2]), expected tensor([1, 3])"),
        (torch.tensor([math.nan]), torch.tensor([1.0]), "got tensor([nan])"), (ONES, 1.0, "got tensor"),
        (torch.zeros(0), ONES, "got a tensor [0]"), (1.0, ONES, "got 1.0, expected a tensor"),
        (ONES, [1], "got [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], expected [1]"),
    ],
)  # fmt: skip
def test_what_differs_is_said(got: object, want: object, says: str) -> None:
    phrase = difference(got, want)
    assert phrase is not None and phrase.startswith(says)


def test_tolerances_are_of_the_dtype_or_given() -> None:
    third = torch.tensor([1 / 3])
    assert difference(third.bfloat16(), third.bfloat16() * 1.01) is None
    assert difference(third, third * 1.01) is not None
    assert difference(third, third * 1.01, rtol=0.02) is None
    assert difference(1.0, 1.01, rtol=0.02) is None
    assert difference(third, third + 1e-6, rtol=0, atol=0) is not None


def test_long_values_are_shown_short() -> None:
    assert show(list(range(100))) == "a list of 100"
    assert show(torch.zeros(4, 4)) == "a tensor [4, 4] of float32"
    assert len(show("x" * 1000)) <= 64 and len(show({i: i for i in range(1000)})) <= 64


HUGE = 10**400


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (HUGE, HUGE), (-0.0, 0.0), (-0.0, 0), ([1, 2, 3], range(1, 4)), (torch.tensor([1, 2]), [1, 2]),
        (torch.tensor([0.1, 0.2]), [0.1, 0.2]), (torch.tensor([[1, 2], [3, 4]]), [(1, 2), (3, 4)]),
        (torch.ones(2, 3), [torch.ones(3), torch.ones(3)]), ([(0, 1), (2, 3)], [[0, 1], [2, 3]]),
        (2.9999999999999996, 3), (torch.tensor(0.1), 0.1), (True, torch.tensor(True)), (8, numpy.int64(8)),
        (0.5, numpy.float32(0.5)), (torch.tensor([1.0]), numpy.ones(1, dtype=numpy.float32)), ({1: 2}, {1.0: 2}),
    ],
)  # fmt: skip
def test_the_same_in_another_form(got: object, want: object) -> None:
    assert difference(got, want) is None


@pytest.mark.parametrize(
    ("got", "want", "says"),
    [
        (HUGE, 0.5, "got an integer of about 401 digits, expected 0.5"),
        (HUGE, math.inf, "got an integer of about 401"),
        (0.5, HUGE, "got 0.5, expected 1000"),
        (-HUGE, HUGE, "got -1000"), (HUGE, math.nan, "got an integer"), (math.nan, HUGE, "got nan"),
        (HUGE, torch.tensor(1.0), "got an integer of about 401 digits, expected 1.0"),
        (HUGE, torch.tensor(1, dtype=torch.uint8), "got an integer"),
        (300, torch.tensor(44, dtype=torch.uint8), "got 300"),
        (2.7, torch.tensor(2), "got 2.7, expected 2, a whole number"),
        ("8", 8, "got '8', expected 8: a text where a number is asked for"),
        (1, True, "got 1, expected True: a number where a truth value is asked for"),
        (8.5, 8, "got 8.5, expected 8, a whole number"),
        (100000.05, 100000, "got 100000.05, expected 100000, a whole number"),
        (float(2**53), 2**53 + 1, "got 9007199254740992.0, expected 9007199254740993 (floats are exact up to 2**53"),
        (0.12345678, 0.12345699, "got 0.12345678, expected 0.12345699"),
        ([0.12345678], [0.12345699], "at [0]: got 0.12345678, expected 0.12345699"),
        ({"1": "a"}, {1: "a"}, "the key '1' is a text, the key asked for is 1, a number"),
        ({1: "a"}, {"1": "a"}, "the key 1 is a number, the key asked for is '1', a text"),
        ({i: 0 for i in range(50)}, {i: 0 for i in range(1, 52)}, "got 50 keys, expected 51; missing: 50, 51; not"),
        ({i: 0 for i in range(52)}, {i: 0 for i in range(51)}, "got 52 keys, expected 51; not asked for: 51"),
        ([(0, 1), (2, 3)], [(0, 1), (3, 2)], "got [[0, 1], [2, 3]], expected [[0, 1], [3, 2]]"),
        (torch.tensor([1, 2]), [1, 3], "got [1, 2], expected [1, 3]"), (torch.tensor([1.5]), [1], "got [1.5]"),
        (torch.tensor([True]), [1], "got [True], expected [1]"),
        ([1, 2], {"a": 1}, "got [1, 2], expected {'a': 1}"), ("x" * 100, "y", "got 'xxx"),
    ],
)  # fmt: skip
def test_numbers_keys_and_types_in_words(got: object, want: object, says: str) -> None:
    phrase = difference(got, want)
    assert phrase is not None and phrase.replace("\x1b", "").startswith(says) and len(phrase) < 250


def test_every_wrong_key_is_said_at_once() -> None:
    got, want = {"dp": 3, "edp": [1], "ok": 1}, {"dp": 4, "edp": [1, 2], "ok": 1}
    assert difference(got, want) == "dp: got 3, expected 4; edp: got [1], expected [1, 2]"
    many = {f"key {i}": i for i in range(100)}
    said = difference(dict.fromkeys(many, -1), many)
    assert said is not None and said.startswith("key 0: got -1, expected 0; key 1: got -1, expected 1; key 2:")
    assert "also wrong: key 1" in said and said.endswith(" more") and len(said) < 900


def test_a_whole_number_is_whole_to_the_last_digit() -> None:
    assert difference(2**60 + 1, 2**60) is not None
    assert difference(1e9 + 0.5, 10**9) is not None
    assert difference(torch.tensor(100000.4), 100000) is not None
    assert difference(8.004, 8, rtol=1e-3) is None, "where the exercise says so"


def test_only_the_beginning_of_a_large_value_is_made_a_text() -> None:
    class Counted(list):  # type: ignore[type-arg]
        read = 0

        def __iter__(self):  # type: ignore[no-untyped-def]
            for item in list.__iter__(self):
                Counted.read += 1
                yield item

    assert show(Counted([1] * 100_000)) == "a list of 100000" and Counted.read < 100


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.just(HUGE) | st.just(-HUGE)
    | st.sampled_from([torch.tensor(1.5), torch.tensor([1, 2]), torch.zeros(0), torch.tensor(math.nan)]),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=2) | st.integers(0, 3), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(anything, anything)
def test_it_never_raises_and_what_is_the_same_is_the_same(got: object, want: object) -> None:
    phrase = difference(plain.loads(plain.dumps(got)), want)
    assert phrase is None or (phrase and len(phrase) < 2000)
    assert difference(plain.loads(plain.dumps(want)), want) is None


def test_names_that_are_the_answer_are_counted_and_never_said() -> None:
    assert counted(("a", "b"), ["a", "b"]) is None
    assert counted(["a", "x"], ["a", "b", "c"]) == "got 2 names: 2 missing, 1 not asked for"
    assert counted(["b", "a"], ["a", "b"]) == "another order or a name twice"
    assert counted(None, ["a", "b"]) == "got None, expected a list of names"


# ------------------------------------------------------------------------------ what is asked


def test_a_part_may_be_anything_and_the_others_not() -> None:
    want = {"loss": torch.ones(3), "dz": ANYTHING}
    assert difference({"loss": torch.ones(3), "dz": None}, want) is None
    assert difference({"loss": torch.zeros(3), "dz": None}, want) is not None
    assert difference({"loss": torch.ones(3)}, want) is not None


def test_of_a_list_of_names_it_is_said_which_are_missing_or_too_many() -> None:
    layer = [f"layers.0.attention.{name}" for name in ("q_layernorm.weight", "linear_proj.bias", "linear_qkv.bias")]
    assert difference(layer[:1], layer) == f"got 1 item, expected 3; missing: {layer[1]}, {layer[2]}"
    assert difference(layer, layer[:2]) == f"got 3 items, expected 2; not asked for: {layer[2]}"
    assert difference([layer[0], layer[2]], layer[:2]) == f"missing: {layer[1]}; not asked for: {layer[2]}"
    assert difference(layer[::-1], layer) is not None


def test_as_many_names_are_said_as_there_is_room_for() -> None:
    names = [f"layers.{i}.attention.linear_qkv.bias" for i in range(20)]
    said = difference([], names)
    assert said.startswith(f"got 0 items, expected 20; missing: {names[0]}, {names[1]}")
    assert said.endswith(" more") and len(said) < 250
