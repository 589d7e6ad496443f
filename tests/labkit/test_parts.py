"""Which of several outputs is wrong, and in which way, without a number of the answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from labkit.fresh import Nursery
from labkit.judge import judge
from labkit.parts import named, other_number, wrong_parts

RIGHT = {"dq": torch.ones(9), "dk": torch.ones(9), "dv": torch.ones(9)}
NAN = torch.tensor([1.0, torch.nan])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"dk": torch.zeros(9)}, "dk is wrong"),
        ({"dq": torch.zeros(9), "dv": torch.zeros(9)}, "dq is wrong, dv is wrong"),
        ({"dk": torch.ones(8)}, "dk is wrong (its shape)"),
        ({"dk": torch.ones(9).double()}, "dk is wrong (float64, not float32)"),
        ({"dk": torch.full((9,), torch.nan)}, "dk is wrong (it holds NaN)"),
        ({"dk": None}, "dk is wrong (it is None)"),
        ({"dk": 3.0}, "dk is wrong (it is no tensor)"),
        ({"more": 3.0}, "wrong (it has other keys)"),
    ],
)
def test_every_part_that_is_wrong_is_named_with_the_way(change: dict[str, Any], says: str) -> None:
    assert wrong_parts({**RIGHT, **change}, RIGHT) == says


def test_parts_of_parts_tuples_and_what_has_no_parts() -> None:
    assert wrong_parts({"y": 1, "grads": {"w": 2, "b": 2}}, {"y": 1, "grads": {"w": 2, "b": 3}}) == "grads: b is wrong"
    assert wrong_parts([1.0, 2.0], (1.0, 3.0)) == "output [1] is wrong"
    assert wrong_parts([torch.ones(2), NAN], [torch.ones(2), torch.ones(2)]) == "output [1] is wrong (it holds NaN)"
    assert wrong_parts([1, 2, 3], [1, 2, 4]) == "wrong", "a list of numbers is one output"
    assert wrong_parts([1, 2], [1, 2, 4]) == "wrong (its length)"
    assert wrong_parts({}, {"a": 1}) == "wrong (keys are missing)"
    assert wrong_parts(3, {"a": 1}) == "wrong (it is no dict)"
    assert wrong_parts(NAN, NAN + 1) == "wrong", "NaN is asked for"


def test_many_parts_are_few_names() -> None:
    many = {f"w{i}": i for i in range(9)}
    assert wrong_parts(dict.fromkeys(many, -1), many).endswith("w5 is wrong, and 3 more")


def test_a_tuple_gets_the_names_of_its_outputs() -> None:
    outputs = ("dq", "dk")
    assert named((1, 2), outputs) == named([1, 2], outputs) == {"dq": 1, "dk": 2}
    assert [*named(torch.ones(2, 3), outputs)] == ["dq", "dk"]
    for value in ({"dq": 1}, [1, 2, 3], None, torch.tensor(1.0), "ab"):
        assert named(value, outputs) is value
    assert named((1, 2), ()) == (1, 2)
    assert other_number([1], outputs) == "got 1 value, expected 2: dq, dk"
    assert other_number(None, outputs) == "got None, expected 2: dq, dk"
    assert other_number(named((1, 2), outputs), outputs) is None


# --------------------------------------------------------------------------------------------------- in a verdict

HIDDEN = "; the inputs and answers of this case stay hidden"


def notes(nursery: Nursery, exercise: str, body: str, inputs: str = "x") -> list[str]:
    source = f"def {exercise}({inputs}):\n    return {body}"
    return [row.note for row in judge(nursery, "tests.labkit.parts_course", exercise, {exercise: source}).rows]


def test_which_output_is_wrong_is_said_in_every_case(nursery: Nursery) -> None:
    assert notes(nursery, "both", "x + 1, x * 3") == [
        "double: got tensor([3.0, 3.0, 3.0]), expected tensor([2.0, 2.0, 2.0])",
        f"double is wrong{HIDDEN}",
    ]
    assert (
        notes(nursery, "both", "x, x.double()")[1] == f"plus is wrong, double is wrong (float64, not float32){HIDDEN}"
    )
    few = "got 1 value, expected 2: plus, double"
    assert notes(nursery, "both", "[x + 1]") == [few, few]
    assert notes(nursery, "unnamed", "x, 2 * x") == [f"output [0] is wrong{HIDDEN}"]
    assert notes(nursery, "ranks", "x + 1, x") == [f"rank 0: double is wrong{HIDDEN}"]


def test_every_wrong_key_is_told_at_once_with_the_inputs_where_there_are_several(nursery: Nursery) -> None:
    body = "{'sum': n * m, 'product': n + m, 'first': n}"
    assert notes(nursery, "sizes", body, "n, m") == [
        "with n=2, m=3: sum: got 6, expected 5; product: got 5, expected 6",
        f"sum is wrong, product is wrong{HIDDEN}",
    ]
    late = "{'sum': n + m if n == 2 else 0, 'product': n * m, 'first': n}"
    assert notes(nursery, "sizes", late, "n, m")[0] == "with n=4, m=5: sum: got 0, expected 9"
    hidden = notes(nursery, "sizes", "{'sum': n + m}", "n, m")[1]
    assert hidden == f"wrong (keys are missing){HIDDEN}", "names of keys can be an answer"
