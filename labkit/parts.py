"""Names the wrong one of several outputs, for a hidden case too, in which no number may be shown.

The problem in a sentence: "wrong; the answers of this case stay hidden" sends a learner through forward and backward
alike, when only dv is wrong.

| an answer is                  | names of its parts                                        |
|-------------------------------|-----------------------------------------------------------|
| a dict                        | its keys; those of a dict in it, `grads: w`               |
| a tuple, or a list of tensors | `Exercise(outputs=("dq", "dk", "dv"))`, or `output [1]`   |
| anything else                 | none                                                      |

    dk is wrong (its shape), dv is wrong (it holds NaN)

The kind of fault (shape, dtype, NaN, a missing value) reveals no number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from labkit.compare import difference, show

_MOST_ITEMS = 16  # a longer list is one output
_MOST_NAMED = 6
_LONGEST = 64  # characters of a name


def named(value: Any, outputs: Sequence[str]) -> Any:
    """A tuple, list or stacked tensor with one value for each name, as a dict by name; else unchanged."""
    several = isinstance(value, list | tuple) or (isinstance(value, torch.Tensor) and value.ndim > 0)
    if not outputs or not several or len(value) != len(outputs):
        return value
    return dict(zip(outputs, value, strict=True))


def other_number(got: Any, outputs: Sequence[str]) -> str | None:
    """A message if an answer has not one value for each name."""
    if isinstance(got, dict):
        return None
    what = f"{len(got)} value{'s' * (len(got) != 1)}" if isinstance(got, list | tuple) else show(got)
    return f"got {what}, expected {len(outputs)}: {', '.join(outputs)}"


def wrong_parts(got: Any, want: Any, rtol: float | None = None, atol: float | None = None) -> str:
    """The parts that are wrong and in which way, without any number; "wrong" where there are no parts."""
    found = _parts(got, want, (rtol, atol), "")
    if not found:
        return f"wrong{_way(got, want)}"
    said = [f"{name} is wrong{way}" for name, way in found[:_MOST_NAMED]]
    more = len(found) - _MOST_NAMED
    return ", ".join(said) + (f", and {more} more" if more > 0 else "")


def _parts(got: Any, want: Any, tolerance: tuple[float | None, float | None], before: str) -> list[tuple[str, str]]:
    """(name, way) of each wrong part."""
    if isinstance(want, dict) and isinstance(got, dict) and got.keys() == want.keys():
        pairs = [(f"{before}{key}"[:_LONGEST], got[key], want[key]) for key in want]
    elif _several(want) and isinstance(got, list | tuple) and len(got) == len(want):
        pairs = [(f"{before}output [{i}]", *pair) for i, pair in enumerate(zip(got, want, strict=True))]
    else:
        return []
    found = []
    for name, one, other in pairs:
        if difference(one, other, *tolerance):
            found += _parts(one, other, tolerance, f"{name}: ") or [(name, _way(one, other))]
    return found


def _several(want: Any) -> bool:
    if not isinstance(want, list | tuple) or not 1 < len(want) <= _MOST_ITEMS:
        return False
    return isinstance(want, tuple) or all(isinstance(item, torch.Tensor) for item in want)


def _way(got: Any, want: Any) -> str:
    """The kind of fault of a wrong value, in parentheses; "" if only its numbers are wrong."""
    way = ""
    if isinstance(want, dict) and isinstance(got, dict):
        way = "keys are missing" if want.keys() - got.keys() else "it has other keys" * bool(got.keys() - want.keys())
    elif isinstance(want, dict):
        way = "it is no dict"
    elif got is None and want is not None:
        way = "it is None"
    elif isinstance(want, torch.Tensor) and isinstance(got, torch.Tensor):
        if got.shape != want.shape:
            way = "its shape"
        elif got.dtype != want.dtype:
            way = f"{got.dtype}, not {want.dtype}".replace("torch.", "")
        elif got.is_floating_point() and bool((got.isnan() & ~want.isnan()).any()):
            way = "it holds NaN"
    elif isinstance(want, torch.Tensor) and want.ndim:
        way = "it is no tensor"
    elif isinstance(want, list | tuple) and isinstance(got, list | tuple) and len(got) != len(want):
        way = "its length"
    return f" ({way})" if way else ""
