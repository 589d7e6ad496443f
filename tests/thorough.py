"""Which cases of a large family run each time, and which only when somebody asks (`--thorough`, `make thorough`).

The problem in a sentence: a matrix of 40 layouts finds a mistake that 6 of them would have found, and takes seven times
as long, at every commit.

An ordinary run takes the cases that differ in kind. What it leaves out is marked `thorough`, never deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

THOROUGH = pytest.mark.thorough


def mostly_thorough(cases: Iterable[Any], ordinary: Callable[[Any], bool] | Iterable[int]) -> list[Any]:
    """The cases for `parametrize`, all but the ordinary ones marked.

    Args:
        cases: values, or tuples of values where several names are parametrised.
        ordinary: which of them run each time: a predicate of the case, or places in the list.
    """
    cases = list(cases)
    if not callable(ordinary):
        places = {range(len(cases))[place] for place in ordinary}
        keep = [i in places for i in range(len(cases))]
    else:
        keep = [bool(ordinary(case)) for case in cases]
    assert any(keep), "something has to run each time"
    return [
        pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=() if kept else THOROUGH)
        for case, kept in zip(cases, keep, strict=True)
    ]
