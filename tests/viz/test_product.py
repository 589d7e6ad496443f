import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import rank_colours
from minimegatron.viz.product import columns_of, cut_product, product, rows_of
from tests.viz.reading import boxes, overlaps, words

X, A = [[1, 2], [3, 4]], [[5, 6], [7, 8]]


def matrices(rows, columns):
    return st.lists(st.lists(st.integers(-9, 9), min_size=columns, max_size=columns), min_size=rows, max_size=rows)


@given(matrices(3, 4), matrices(4, 6))
def test_columns_side_by_side_and_rows_added_are_the_product(x, a):
    y = product(x, a)
    for ranks in (1, 2):
        columns, rows = columns_of(x, a, ranks), rows_of(x, a, ranks)
        assert [sum((s.y[i] for s in columns), []) for i in range(3)] == y
        assert [[sum(s.y[i][j] for s in rows) for j in range(6)] for i in range(3)] == y


def test_the_numbers_of_the_lab():
    assert product(X, A) == [[19, 22], [43, 50]]
    assert [s.y for s in columns_of(X, A, 2)] == [[[19], [43]], [[22], [50]]]
    assert [s.y for s in rows_of(X, A, 2)] == [[[5, 6], [15, 18]], [[14, 16], [28, 32]]]


def test_the_picture_shows_every_factor_and_every_result():
    figure = cut_product(X, A)
    for axes, shares in zip(figure.axes, (columns_of(X, A, 2), rows_of(X, A, 2)), strict=True):
        shown = sorted(int(t.get_text()) for t in axes.texts if t.get_text().isdigit())
        want = [n for s in shares for m in (s.x, s.a, s.y) for row in m for n in row]
        assert shown == sorted(want + [19, 22, 43, 50])
    assert {"add", "join", "y = x A"} <= set(words(figure))
    assert {"only on rank 0", "only on rank 1", "whole on every rank", "partial sum"} <= set(words(figure)), "a legend"
    assert not overlaps(figure)


def test_a_sum_carries_a_stripe_of_every_rank():
    stripes = [b for b in boxes(cut_product(X, A)) if b.get_height() < 0.5]
    assert len(stripes) == 4 * 2
    assert len({b.get_facecolor() for b in stripes}) == len(rank_colours(2))


def test_what_cannot_be_cut_is_refused():
    with pytest.raises(ConfigError, match="do not fit"):
        cut_product([[1, 2, 3]], A)
    with pytest.raises(ConfigError, match="2 x 2, on 3 ranks"):
        cut_product(X, A, ranks=3)


def test_hatched_is_what_every_rank_has_and_dashed_what_is_a_part_of_a_sum():
    columns, rows = cut_product(X, A).axes
    assert [sum(p.get_hatch() == "//" for p in axes.patches) for axes in (columns, rows)] == [2 * 4, 0]
    assert [sum(p.get_linestyle() == "--" for p in axes.patches) for axes in (columns, rows)] == [0, 2 * 4]
