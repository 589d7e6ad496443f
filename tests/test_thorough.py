"""Which tests `make unit`, `make test` and `make thorough` leave out."""

from __future__ import annotations

import types
from typing import Any

import pytest

from tests import conftest
from tests.thorough import mostly_slow, mostly_thorough

CASES = mostly_thorough("abcd", "abc".__contains__, "a".__contains__)


class Item:
    """What is asked of a collected test."""

    def __init__(self, case: Any) -> None:
        self.id, self.marks = case.values[0], [mark.name for mark in case.marks]

    def get_closest_marker(self, name: str) -> bool:
        return name in self.marks


@pytest.mark.parametrize(
    ("options", "arguments", "left"),
    [
        ("", [], "abc"),
        ("--quick", ["tests"], "a"),
        ("--thorough", ["tests"], "abcd"),
        ("--quick --thorough", ["tests"], "abcd"),
        ("--quick", ["tests/test_x.py"], "abc"),
        ("--quick", ["tests/test_x.py::test_y"], "abcd"),
    ],
)
def test_what_a_command_leaves_out(options: str, arguments: list[str], left: str) -> None:
    deselected: list[Any] = []
    items = [Item(case) for case in CASES]
    config: Any = types.SimpleNamespace(
        args=arguments,
        getoption=lambda name: name in options.split(),
        hook=types.SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items)),
    )
    conftest.pytest_collection_modifyitems(config, items)  # type: ignore[arg-type]
    assert "".join(item.id for item in items) == left
    assert sorted(item.id for item in [*items, *deselected]) == list("abcd")


def test_every_command_runs_something() -> None:
    assert [[mark.name for mark in case.marks] for case in mostly_slow("ab", [-1])] == [["slow"], []]
    for ordinary, quick in ([], None), ([0], []), ([0], [1]):
        with pytest.raises(AssertionError, match="something has to run each time"):
            mostly_thorough("ab", ordinary, quick)
