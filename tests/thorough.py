"""Which cases of a large family run each time, and which only when somebody asks.

The problem in a sentence: a matrix of 40 layouts finds a mistake that 6 of them would have found, and takes seven times
as long, at every commit.

| command         | runs                                                                | leaves out         |
|-----------------|---------------------------------------------------------------------|--------------------|
| `make unit`     | after every change: of each family a case or two that take little   | `slow`, `thorough` |
| `make test`     | before a commit: the cases that differ in kind                      | `thorough`         |
| `make thorough` | every case                                                          |                    |

What a run leaves out is marked, never deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

THOROUGH = pytest.mark.thorough
SLOW = pytest.mark.slow

Chosen = Callable[[Any], bool] | Iterable[int]


def mostly_thorough(cases: Iterable[Any], ordinary: Chosen, quick: Chosen | None = None) -> list[Any]:
    """The cases for `parametrize`, all but the ordinary ones marked `thorough`.

    Args:
        cases: values, or tuples of values where several names are parametrised.
        ordinary: which of them `make test` runs: a predicate of the case, or places in the list.
        quick: which of the ordinary ones `make unit` runs, too: the others are marked `slow`. All, unless it is given.
    """
    cases = list(cases)
    kept = _chosen(cases, ordinary)
    fast = kept if quick is None else _chosen(cases, quick)
    assert fast and fast <= kept, "something has to run each time, and what `make unit` runs `make test` runs, too"
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=THOROUGH if i not in kept else SLOW if i not in fast else (),
        )
        for i, case in enumerate(cases)
    ]


def mostly_slow(cases: Iterable[Any], quick: Chosen) -> list[Any]:
    """The cases for `parametrize`, of which `make unit` runs the quick ones and `make test` runs all."""
    cases = list(cases)
    return mostly_thorough(cases, range(len(cases)), quick)


def _chosen(cases: list[Any], which: Chosen) -> set[int]:
    """Places in the list."""
    if callable(which):
        return {i for i, case in enumerate(cases) if which(case)}
    return {range(len(cases))[place] for place in which}
