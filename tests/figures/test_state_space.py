from __future__ import annotations

from fractions import Fraction

import pytest

from course.figures.state_space import left_of, weights_map
from minimegatron.errors import ConfigError
from tests.viz.reading import words


def test_a_token_fades_at_those_after_it():
    assert left_of([1, 1, 2]) == [[1], [Fraction(1, 2), 1], [Fraction(1, 8), Fraction(1, 4), 1]]


def test_each_pair_is_a_number_and_each_chunk_a_frame():
    figure = weights_map([1, 1, 2, 1, 3], 2)
    seen = words(figure)
    assert [seen.count(text) for text in ("1", "1/8", "1/64", "j = 5\ndt 3", "i = 5")] == [5, 3, 1, 1, 1]
    frames = [patch for patch in figure.axes[0].patches if not patch.get_fill()]
    assert [frame.get_width() for frame in frames] == [2, 2, 1]
    assert len({patch.get_facecolor() for patch in figure.axes[0].patches if patch.get_fill()}) == 2


@pytest.mark.parametrize(("steps", "size"), [([], 2), ([1, -1], 2), ([1, 1], 0)])
def test_mistakes_are_named(steps, size):
    with pytest.raises(ConfigError, match="in chunks of"):
        weights_map(steps, size)
