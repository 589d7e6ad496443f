"""What crosses the border between processes: exactly plain data, or an error."""

from __future__ import annotations

import json
import math

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


@pytest.mark.parametrize("dtype", plain._DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0), (2, 3, 4)])
def test_tensors_come_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 100).to(dtype)
    back = plain.loads(plain.dumps(tensor))
    assert back.dtype == dtype and back.shape == tensor.shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))


def test_what_is_kept_and_what_becomes_what() -> None:
    back = plain.loads(plain.dumps([(1, 2), {(0, 1): torch.ones(2, requires_grad=True)}, numpy.float32(0.5), math.inf]))
    assert back[0] == [1, 2] and back[2:] == [0.5, math.inf]
    assert not back[1][0, 1].requires_grad
    assert math.isnan(plain.loads(plain.dumps(math.nan)))
    strided = torch.arange(6).view(2, 3).t()
    assert torch.equal(plain.loads(plain.dumps(strided)), strided)


@pytest.mark.parametrize("value", [object(), {1, 2}, lambda: 0, b"bytes", torch.ones(1, dtype=torch.complex64)])
def test_what_is_no_plain_data_is_refused_by_name(value: object) -> None:
    with pytest.raises(DataError) as caught:
        plain.dumps({"a": [value]})
    assert "answer['a'][0]" in caught.value.what


def test_a_list_that_holds_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(DataError):
        plain.dumps(loop)


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[1,", '{"tensor": 1}', '{"pickle": "x"}', '{"a": 1, "b": 2}', "{}",
        '{"tensor": ["float32", [2], "AAAA"]}', '{"tensor": ["object", [0], ""]}', '{"tensor": ["float32", [-1], ""]}',
        '{"tensor": ["float32", [1e9], ""]}', '{"tensor": ["float32", [true], "AAAAAA=="]}',
        '{"dict": [[{"dict": []}, 1]]}',
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
