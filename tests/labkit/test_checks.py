"""Comparison: strict where a learner means something, lenient where not, and always in words."""

from __future__ import annotations

import math

import pytest
import torch

from labkit.checks import at_most, count, difference, no_tensor_above, only, show, to_the_next
from labkit.evidence import Call, Evidence
from labkit.exercises import Answer

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
        (ONES, [1], "got tensor"),
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


def test_judges_of_evidence() -> None:
    calls = (Call("send", 100, 1, 3), Call("recv", 100, 1, 3), Call("all_reduce", 8, -1, 5))
    answer = Answer(0, {"n": 50}, [Evidence(calls[:2], (), 9, 4096), Evidence(calls, (), 9, 64)])
    assert only("send", "recv", "all_reduce")(answer) is None
    assert only("send", "recv")(answer) == "it calls all_reduce; allowed here: send, recv"
    assert only()(answer) == "it calls all_reduce, recv, send; allowed here: no communication"
    assert count("send", 1)(answer) is None
    assert count("all_reduce", 1)(answer) == "rank 0 calls all_reduce 0 times, expected 1"
    assert at_most("2n", lambda inputs: 2 * inputs["n"], "send")(answer) is None
    assert at_most("n", lambda inputs: inputs["n"], "send")(answer) == "rank 0 moves 100 bytes; n is 50"
    assert to_the_next(Answer(0, {}, [answer.evidence[0]] * 2)) == (
        "rank 1 sends to rank 1; in this ring it sends to the next rank only, 0"
    )
    assert to_the_next(Answer(0, {}, [answer.evidence[0], Evidence((), (), 9, 64)])) is None
    assert no_tensor_above("4 KiB", lambda _: 4096)(answer) is None
    assert no_tensor_above("1 KiB", lambda _: 1024)(answer) == "its largest tensor has 4096 bytes; 1 KiB is 1024"
