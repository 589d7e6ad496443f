"""The mistakes: a line of the source, what it becomes, and the tests that must fail then."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """One mistake.

    Attributes:
        name: what is wrong.
        file: the source, from the project's root.
        before, after: text that occurs once, and what replaces it.
        tests: words for pytest; as few as notice it.
    """

    name: str
    file: str
    before: str
    after: str
    tests: str


_MASKS = "tests/models/test_dropout_masks.py"
