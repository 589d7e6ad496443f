"""What crosses the border between processes: exactly plain data, or an error."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import math
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from labkit import plain
from minimegatron.errors import DataError

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner))


@given(values)
def test_plain_values_come_back(value: object) -> None:
    assert plain.loads(plain.dumps(value)) == value
    assert "\n" not in plain.dumps(value)


@pytest.mark.parametrize("dtype", plain.DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3, 4)])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 100).to(dtype)
    back = plain.loads(plain.dumps(tensor))
    assert back.dtype == dtype and back.shape == tensor.shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_a_tensor_of_one_number_comes_back_whatever_its_stride() -> None:
    """It is contiguous with any stride, and torch sees only stride 1 as bytes."""
    third = torch.arange(3.0)[::3].clone()
    assert third.stride() == (3,) and plain.loads(plain.dumps(third)).tolist() == [0.0]


def test_what_is_kept_and_what_becomes_what() -> None:
    back = plain.loads(plain.dumps([(1, 2), {(0, 1): torch.ones(2, requires_grad=True)}, numpy.float32(0.5), math.inf]))
    assert back[0] == [1, 2] and back[2:] == [0.5, math.inf]
    assert not back[1][0, 1].requires_grad
    assert math.isnan(plain.loads(plain.dumps(math.nan)))
    for strided in (torch.arange(6).view(2, 3).t(), torch.arange(6.0).view(3, 2)[:1, 1]):
        assert torch.equal(plain.loads(plain.dumps(strided)), strided)


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 0, b"bytes", torch.ones(1, dtype=torch.complex64)])
def test_what_is_no_plain_data_is_refused_by_name(value: object) -> None:
    with pytest.raises(DataError) as caught:
        plain.dumps({"a": [value]})
    assert "answer['a'][0]" in caught.value.what


Point = collections.namedtuple("Point", "x y")
OTHER_FORMS: list[tuple[Any, Any]] = [
    (Fraction(6, 3), 2), (Fraction(1, 3), 1 / 3), (Decimal("7"), 7), (Decimal("0.25"), 0.25),
    (Decimal("-Infinity"), -math.inf),
    (range(3), [0, 1, 2]), ({1: "a"}.keys(), [1]), ({1: "a"}.values(), ["a"]), ({1: "a"}.items(), [[1, "a"]]),
    (iter([1, 2]), [1, 2]), ((n * n for n in range(3)), [0, 1, 4]), (map(str, [1]), ["1"]),
    (zip([1], [2], strict=True), [[1, 2]]),
    (Point(1, 2), [1, 2]), (collections.deque([1]), [1]), (collections.OrderedDict(a=1), {"a": 1}),
    (collections.Counter("aab"), {"a": 2, "b": 1}), (collections.ChainMap({"a": 1}), {"a": 1}),
    (torch.Size([2, 3]), [2, 3]),
    (numpy.int64(3), 3), (numpy.uint64(2**64 - 1), 2**64 - 1), (numpy.float16(0.5), 0.5), (numpy.longdouble(0.5), 0.5),
    (numpy.bool_(True), True), (numpy.array(3), 3), (numpy.array([True]), torch.tensor([True])),
    (numpy.array([1, 2], dtype=">i4"), torch.tensor([1, 2], dtype=torch.int32)),
    (numpy.array([1, 2], dtype=numpy.uint16), torch.tensor([1, 2])),
    (numpy.array([2**63], dtype=numpy.uint64), [2**63]),
    (numpy.array([0.5], dtype=numpy.longdouble), torch.tensor([0.5], dtype=torch.float64)), (numpy.array(["a"]), ["a"]),
    (numpy.arange(6).reshape(2, 3).T, torch.arange(6).reshape(2, 3).T), ({numpy.int64(1): Fraction(2)}, {1: 2}),
    ({Point(0, 1): 2}, {(0, 1): 2}), (torch.eye(2).to_sparse(), torch.eye(2)), (10**400, 10**400), (-0.0, 0.0),
]  # fmt: skip


@pytest.mark.parametrize(("value", "want"), OTHER_FORMS, ids=range(len(OTHER_FORMS)))
def test_other_forms_of_the_same_become_plain(value: Any, want: Any) -> None:
    got = plain.loads(plain.dumps(value))
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype and torch.equal(got, want)
    else:
        assert got == want and type(got) is type(want)


@dataclasses.dataclass
class Pair:
    x: int = 1


LOOP: list[Any] = []
LOOP += [LOOP, LOOP, LOOP]
DEEP: list[Any] = []
for _ in range(10_000):
    DEEP = [DEEP]


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({1, 2}, "answer is a set, which a check cannot read: return a list, not a set, which has no order"),
        (frozenset(), "answer is a frozenset, which a check cannot read: return a list, not a set"),
        (Pair(), "answer is a Pair, which a check cannot read: return numbers, strings, lists, dicts or tensors"),
        ([1j], "answer[0] is a complex, which a check cannot read: return numbers"),
        (numpy.complex64(1), "answer is a complex64, which a check cannot read"),
        (b"x", "answer is a bytes"),
        (numpy.datetime64("2026-01-01"), "answer is a datetime64"),
        (torch.float32, "answer is a dtype"),
        (numpy.array([object()]), "answer[0] is a object"),
        (Fraction(10**400, 3), "answer is a Fraction"),
        (Decimal("1e1000000"), "answer is a Decimal"),
        (10**5000, "answer is an integer of more than 13,000 bits"),
        (LOOP, "answer[0][0][0][0][0][0][...]: lists inside lists, more than 32 deep"),
        (DEEP, "answer[0][0][0][0][0][0]"),
        (itertools.count(), "answer is a count of more than 100,000 items"),
        ([[0] * 1000] * 1000, "the answer holds more"),
        ([torch.ones(1, device="meta")], "answer[0] is a tensor on the meta device"),
        (torch.zeros(1).expand(1 << 40), "answer is a tensor of 4194304 MiB"),
        ({(1, 2): [torch.ones(1, dtype=torch.complex64)]}, "answer[(1, 2)][0] is a tensor of complex64; a check reads"),
    ],
    ids=range(19),
)
def test_what_cannot_be_read_is_said_with_what_is_wanted(value: Any, says: str) -> None:
    with pytest.raises(DataError) as caught:
        plain.dumps(value)
    assert caught.value.what.startswith(says) and len(caught.value.what) < 300


def test_an_iterator_is_read_once_by_settled() -> None:
    seen = []
    lazy = {"a": (seen.append(i) or i for i in range(3))}
    settled = plain.settled(lazy)
    assert settled == {"a": [0, 1, 2]} == plain.loads(plain.dumps(settled)) and seen == [0, 1, 2]


def test_data_of_our_own_has_no_limit_and_an_answer_has_one() -> None:
    many = [0] * (plain.MAX_REPLY + 1)
    text = plain.dumps(many, most=None)
    assert plain.loads(text, most=None) == many
    with pytest.raises(DataError, match="at most 300,000 are read"):
        plain.loads(text)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[1,", '{"tensor": 1}', '{"pickle": "x"}', '{"a": 1, "b": 2}', "{}",
        '{"tensor": ["float32", [2], "AAAA"]}', '{"tensor": ["object", [0], ""]}', '{"tensor": ["float32", [-1], ""]}',
        '{"tensor": ["float32", [1e9], ""]}', '{"tensor": ["float32", [true], "AAAAAA=="]}',
        '{"dict": [[{"dict": []}, 1]]}', f'{{"dict": [[{2**61}, 1]]}}', '{"dict": 1}', '{"dict": [[[1], 2, 3]]}',
        '{"tensor": ["float32", [0, 1000000000000000000000], ""]}', '{"tensor": ["float32", 3, ""]}',
        '{"tensor": [[], [0], ""]}', "[" + "[]," * 1_000_000 + "1]", "1" * 5000, "\ud800",
        "[" * 100_000, "1" * 100_000,
    ],
)  # fmt: skip
def test_garbage_is_refused(text: str) -> None:
    with pytest.raises(DataError):
        plain.loads(text)


tagged = st.sampled_from(["tensor", "dict"])


@given(st.recursive(st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(tagged, inner)))
def test_any_json_is_read_or_refused(value: object) -> None:
    try:
        plain.loads(json.dumps(value))
    except DataError:
        pass


# --------------------------------------------------------------------------- JSON of strangers is counted unread


def made(value: Any) -> int:
    """Values and keys in it."""
    if isinstance(value, list):
        return 1 + sum(map(made, value))
    return 1 + sum(1 + made(item) for item in value.values()) if isinstance(value, dict) else 1


texts = st.text(st.sampled_from('a",:[]{}\\ é'), max_size=6)
nested = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
)


@given(nested, st.booleans(), st.sampled_from([None, 1]))
def test_the_count_is_a_bound_and_strings_do_not_raise_it(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
    assert made(value) <= plain.values_in(text, 10**9) <= 2 * made(value)
    assert plain.bounded_json(text, 2 * made(value)) == plain.bounded_json(text.encode(), None) == value


@pytest.mark.parametrize("unit", ["[]", "1", '""', '{"":1}', '"\\""', '"\\\\"'])
def test_too_many_values_are_refused_before_any_is_made(unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json, "loads", lambda _: pytest.fail("it was parsed"))
    with pytest.raises(ValueError, match="values; at most 10,000 are read"):
        plain.bounded_json(f"[{','.join([unit] * 20_000)}]", 10_000)


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, b"\xff", "", '"', "[1,]", b"\x00[\x00]"])
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        plain.bounded_json(text, 1_000_000)
