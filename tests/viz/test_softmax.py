from fractions import Fraction
from math import exp, log

import pytest

from minimegatron.errors import ConfigError
from minimegatron.viz.softmax import running_softmax, steps_of
from tests.viz.reading import overlaps, words

WEIGHTS, VALUES = [2, 1, 8, 4], [3, 6, 1, 2]


@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_blocks_of_any_size_end_in_the_softmax_of_the_row(block):
    last = steps_of(WEIGHTS, VALUES, block)[-1]
    assert last.out / last.total == Fraction(28, 15)  # (2*3 + 1*6 + 8*1 + 4*2) / (2 + 1 + 8 + 4)
    assert last.top * last.total == 15


def test_a_new_maximum_shrinks_what_was_summed_before():
    first, second = steps_of(WEIGHTS, VALUES, 2)
    assert (first.shrink, first.p, first.total, first.out) == (0, (1, Fraction(1, 2)), Fraction(3, 2), 6)
    assert (second.shrink, second.total, second.out) == (Fraction(1, 4), Fraction(15, 8), Fraction(7, 2))
    assert second.shrink == pytest.approx(exp(log(2) - log(8)))
    assert [step.shrink for step in steps_of([8, 4, 2, 1], VALUES, 2)] == [0, 1]


def test_the_table_shows_each_sum():
    figure = running_softmax(WEIGHTS, VALUES, 2)
    seen = words(figure)
    for text in ("ln 2", "ln 8", "1/4", "0 · 0  +  3/2  =  3/2", "3/2 · 1/4  +  3/2  =  15/8", "6 · 1/4  +  2  =  7/2"):
        assert text in seen
    assert "out = O / l\n= 28/15" in seen and "lse = m + ln l\n= ln 15" in seen
    assert not overlaps(figure)


def test_rows_that_are_none_are_refused():
    for weights, values, block in (([], [], 1), ([1, 2], [1], 1), ([0, 1], [1, 2], 1), ([1], [1], 0)):
        with pytest.raises(ConfigError, match="weights"):
            running_softmax(weights, values, block)
