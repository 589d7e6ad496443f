"""Compares an answer with the expected one, in words.

`difference` says in one short phrase how an answer differs from what was expected, or returns None. It never raises,
whatever plain data an answer is. For a list or a tensor it names the first difference, for a dict every key.

| strict, because it is a mistake                | lenient, because the meaning is the same                  |
|------------------------------------------------|-----------------------------------------------------------|
| whole numbers, to the last digit               | 8 or 8.0                                                  |
| `True` is not 1, `"8"` is not 8                | tuple or list                                             |
| length, keys                                   | order of a dict's keys                                    |
| dtype and shape of a tensor                    | a number or a tensor of no dimensions                     |
| floating-point numbers within `TOLERANCES`     | a tensor of the numbers where a list of them is asked for |

Two values with the same text are shown with more digits; two of different types with their types. A reference may hold
`ANYTHING` where a value is not judged.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

# dtype -> (relative, absolute): wide enough for another order of summation, narrower than any wrong formula.
TOLERANCES = {
    torch.float64: (1e-7, 1e-9), torch.float32: (1e-4, 1e-5), torch.bfloat16: (1.6e-2, 1e-3),
    torch.float16: (2e-3, 1e-4), torch.float8_e4m3fn: (0.0, 0.0), torch.float8_e5m2: (0.0, 0.0),
}  # fmt: skip
_NUMBER = (1e-6, 1e-9)
_WHOLE = (1e-12, 1e-9)  # a float beside a whole number: what rounding can leave
_SHORT = 64  # characters of a value in a phrase
_ROOM = 160  # characters of some names, or a third of those for the keys of a dict
_EXACT = 1 << 53  # a float holds whole numbers up to here
_NAMES = {bool: "a truth value", int: "a number", float: "a number", str: "a text", type(None): "no value",
          list: "a list", dict: "a dict"}  # fmt: skip

Tolerance = tuple[float | None, float | None]


class _Anything:
    def __repr__(self) -> str:
        return "anything"


ANYTHING = _Anything()


def difference(got: Any, want: Any, rtol: float | None = None, atol: float | None = None) -> str | None:
    """None if `got` is as good as `want`; else the difference, in one phrase with both values."""
    return _difference(got, _of_python(want), (rtol, atol))


def _of_python(value: Any) -> Any:
    """A NumPy value of a reference as a Python value."""
    if type(value).__module__ != "numpy":
        return value
    return value.item() if value.ndim == 0 else torch.from_numpy(value)


def _difference(got: Any, want: Any, tolerance: Tolerance) -> str | None:
    if want is ANYTHING:
        return None
    if isinstance(want, torch.Tensor):
        return _tensor_difference(got, want, tolerance)
    if isinstance(want, list | tuple | range):
        if isinstance(got, torch.Tensor) and got.ndim > 0:
            tensors = any(isinstance(item, torch.Tensor) for item in want)
            tolerance = _tolerance(got.dtype, tolerance) if got.is_floating_point() else tolerance
            if tensors and len(got) != len(want):  # each row of a list would be a tensor of its own
                return f"got {len(got)} items, expected {len(want)}"
            got = list(got) if tensors else got.tolist()
        if isinstance(got, list | tuple | range):
            return _list_difference(got, want, tolerance)
    if isinstance(want, dict) and isinstance(got, dict):
        return _dict_difference(got, want, tolerance)
    if isinstance(got, torch.Tensor) and got.ndim == 0:
        if got.is_floating_point():
            tolerance = _tolerance(got.dtype if isinstance(want, float) else torch.float64, tolerance)
        got = got.item()
    return None if _same_scalar(got, want, tolerance) else _scalar_phrase(got, want)


def _tolerance(dtype: torch.dtype, asked: Tolerance) -> tuple[float, float]:
    """The tolerance asked for, else that of the dtype, at least that of Python's numbers."""
    wide = TOLERANCES.get(dtype, _NUMBER)
    relative, absolute = max(wide[0], _NUMBER[0]), max(wide[1], _NUMBER[1])
    return relative if asked[0] is None else asked[0], absolute if asked[1] is None else asked[1]


# ------------------------------------------------------------------------------------------------------ numbers


def _same_scalar(got: Any, want: Any, tolerance: Tolerance) -> bool:
    number = isinstance(got, int | float) and isinstance(want, int | float)
    if not number or isinstance(got, bool) != isinstance(want, bool):
        return type(got) is type(want) and bool(got == want)
    if isinstance(want, int) and (isinstance(got, int) or got.is_integer()):
        return bool(got == want)
    near = _WHOLE if isinstance(want, int) else _NUMBER
    a, b = _float(got), _float(want)
    if math.isnan(a) or math.isnan(b):
        return math.isnan(a) and math.isnan(b)
    if math.isinf(a) or math.isinf(b):
        return bool(got == want)
    relative = near[0] if tolerance[0] is None else tolerance[0]
    absolute = near[1] if tolerance[1] is None else tolerance[1]
    return math.isclose(a, b, rel_tol=relative, abs_tol=absolute)


def _float(number: int | float) -> float:
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def _scalar_phrase(got: Any, want: Any) -> str:
    one, other = show(got), show(want)
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (got, want))
    beyond = isinstance(got, float) and isinstance(want, int) and abs(want) > _EXACT
    if numbers and (one == other or beyond):
        one, other = repr(got)[:_SHORT], repr(want)[:_SHORT]
    phrase = f"got {one}, expected {other}"
    if numbers and isinstance(want, int) and isinstance(got, float):
        if got.is_integer() and beyond:
            return f"{phrase} (floats are exact up to 2**53 only: divide whole numbers with //)"
        return f"{phrase}, a whole number" if math.isfinite(got) and not got.is_integer() else phrase
    if type(got) is not type(want) and not numbers and _alike(got, want):
        return f"{phrase}: {_named(got)} where {_named(want)} is asked for"
    return phrase


def _alike(got: Any, want: Any) -> bool:
    """Whether values of these different types may be compared."""
    if isinstance(got, bool) or isinstance(want, bool):
        return isinstance(got, int | float) and isinstance(want, int | float) and got == want
    return str in (type(got), type(want)) and _text(got).strip("'\"") == _text(want).strip("'\"")


def _named(value: Any) -> str:
    return _NAMES.get(type(value), f"a {type(value).__name__}")


# -------------------------------------------------------------------------------------------------- collections


def _list_difference(got: Any, want: Any, tolerance: Tolerance) -> str | None:
    found = ((i, phrase) for i, pair in enumerate(zip(got, want, strict=False))
             if (phrase := _difference(*pair, tolerance)))  # fmt: skip
    first = next(found, None)
    if first is None and len(got) == len(want):
        return None
    one, other = _text(got), _text(want)
    if max(len(one), len(other)) <= _SHORT and one != other:
        return f"got {one}, expected {other}"
    if all(isinstance(name, str) for name in (*got, *want)) and (mine := set(got)) != (asked := set(want)):
        counts = f"got {len(got)} item{'s' * (len(got) != 1)}, expected {len(want)}; " if len(got) != len(want) else ""
        missing, more = [name for name in want if name not in mine], [name for name in got if name not in asked]
        return counts + "; ".join(_names_said(missing, "missing") + _names_said(more, "not asked for"))
    if len(got) != len(want):
        return f"got {len(got)} items, expected {len(want)}"
    return f"at [{first[0]}]: {first[1]}" if first else None


def counted(got: Any, want: Sequence[str]) -> str | None:
    """The difference of a list of names, which are the answer: how many are wrong, never which."""
    if difference(got, want) is None:
        return None
    if not isinstance(got, list | tuple) or not all(isinstance(name, str) for name in got):
        return f"got {show(got)}, expected a list of names"
    missing, more = len(set(want) - set(got)), len(set(got) - set(want))
    said = [f"{many} {what}" for many, what in ((missing, "missing"), (more, "not asked for")) if many]
    return f"got {len(got)} name{'s' * (len(got) != 1)}: {', '.join(said)}" if said else "another order or a name twice"


def _names_said(names: Iterable[Any], what: str) -> list[str]:
    """A phrase with as many names as there is room for; [] without names."""
    shown = [_name(name) for name in dict.fromkeys(names)]
    rooms = itertools.accumulate(len(name) + 2 for name in shown)
    fit = max(1, sum(room <= _ROOM for room in rooms))
    more = f" and {len(shown) - fit} more" if len(shown) > fit else ""
    return [f"{what}: {', '.join(shown[:fit])}{more}"] if shown else []


def _name(key: Any) -> str:
    return key[:_SHORT] if isinstance(key, str) else _text(key)


def _dict_difference(got: dict[Any, Any], want: dict[Any, Any], tolerance: Tolerance) -> str | None:
    """The difference of every wrong key, as far as there is room."""
    if got.keys() != want.keys():
        return _key_difference(got, want)
    said: list[str] = []
    others: list[Any] = []
    for key in want:
        if phrase := _difference(got[key], want[key], tolerance):
            room = not said or sum(map(len, said)) + len(phrase) <= 3 * _ROOM
            (said if room else others).append(f"{_name(key)}: {phrase}" if room else key)
    return "; ".join(said + _names_said(others, "also wrong")) or None


def _key_difference(got: dict[Any, Any], want: dict[Any, Any]) -> str:
    missing = [key for key in want if key not in got]
    named = {_text(key).strip("'\""): key for key in got if key not in want}
    for key in missing:
        if (other := named.get(_text(key).strip("'\""))) is not None and type(other) is not type(key):
            return f"the key {_text(other)} is {_named(other)}, the key asked for is {_text(key)}, {_named(key)}"
    one, other = _text(list(got)), _text(list(want))
    if max(len(one), len(other)) <= _SHORT:
        return f"got the keys {one}, expected {other}"
    said = _names_said(missing, "missing") + _names_said((key for key in got if key not in want), "not asked for")
    return f"got {len(got)} keys, expected {len(want)}; {'; '.join(said)}"


def _tensor_difference(got: Any, want: torch.Tensor, tolerance: Tolerance) -> str | None:
    if want.ndim == 0 and isinstance(got, bool | int | float):
        number = want.item()
        alike = _same_scalar(got, number, _tolerance(want.dtype, tolerance))
        return None if alike else _scalar_phrase(got, number)
    if not isinstance(got, torch.Tensor):
        return f"got {show(got)}, expected a tensor {list(want.shape)}"
    if got.shape != want.shape:
        return f"got a tensor {list(got.shape)}, expected {list(want.shape)}"
    if got.dtype != want.dtype:
        return f"got dtype {_dtype(got)}, expected {_dtype(want)}"
    relative, absolute = TOLERANCES.get(want.dtype, (0.0, 0.0))
    relative, absolute = (relative if tolerance[0] is None else tolerance[0],
                          absolute if tolerance[1] is None else tolerance[1])  # fmt: skip
    a, b = (got.double(), want.double()) if want.is_floating_point() else (got, want)
    same = torch.isclose(a, b, rtol=relative, atol=absolute, equal_nan=True) if want.is_floating_point() else a == b
    if bool(same.all()):
        return None
    if want.numel() <= 8 and show(got) != show(want):
        return f"got {show(got)}, expected {show(want)}"
    index = torch.nonzero(~same)[0].tolist()
    at = tuple(index)
    return (f"at {index}: {_scalar_phrase(a[at].item(), b[at].item())} "
            f"({int((~same).sum())} of {want.numel()} differ)")  # fmt: skip


# --------------------------------------------------------------------------------------------------- as a text


def show(value: Any) -> str:
    """A short form of a value for a table."""
    if isinstance(value, torch.Tensor):
        if value.numel() > 8:
            return f"a tensor {list(value.shape)} of {_dtype(value)}"
        return f"tensor({_text(value.to(torch.float64).tolist() if value.is_floating_point() else value.tolist())})"
    text = _text(value)
    if isinstance(value, list | tuple | range) and len(text) > _SHORT:
        return f"a list of {len(value)}"
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 1]}…"


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _text(value: Any) -> str:
    """The value as Python writes it, with shortened numbers, cut after `_SHORT` characters."""
    text = ""
    for part in _parts(value):
        text += part
        if len(text) > _SHORT:
            break
    return text


def _parts(value: Any) -> Iterator[str]:
    if isinstance(value, list | tuple | range):
        yield "["
        for i, item in enumerate(value):
            yield ", " if i else ""
            yield from _parts(item)
        yield "]"
    elif isinstance(value, dict):
        yield "{"
        for i, (key, item) in enumerate(value.items()):
            yield ", " if i else ""
            yield from _parts(key)
            yield ": "
            yield from _parts(item)
        yield "}"
    elif isinstance(value, float):
        yield f"{value:.6g}" if not value.is_integer() or abs(value) > 1e15 else f"{value:.1f}"
    elif isinstance(value, int) and value.bit_length() > 128:
        yield f"an integer of about {int(value.bit_length() * math.log10(2)) + 1} digits"
    elif isinstance(value, str):
        yield repr(value[: _SHORT + 1])
    else:
        yield show(value) if isinstance(value, torch.Tensor) else repr(value)
