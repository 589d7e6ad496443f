"""Words that many messages share."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from minimegatron.errors import named, ranges


@given(st.sets(st.integers(0, 30)))
def test_ranges_read_back(numbers: set[int]) -> None:
    back: set[int] = set()
    for part in filter(None, ranges(numbers).split(", ")):
        first, _, last = part.partition("-")
        back.update(range(int(first), int(last or first) + 1))
    assert back == numbers
    assert ranges([0, 1, 2, 5]) == "0-2, 5"


def test_ranks_are_named_in_the_singular_and_the_plural() -> None:
    assert (named([3]), named([0, 1, 2, 5])) == ("rank 3", "ranks 0-2, 5")
