import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.errors import ConfigError
from minimegatron.viz.collective import COLLECTIVES, LEGEND, before_after, moved, sheet, start_of
from tests.viz.reading import overlaps, words

sizes = st.integers(1, 6)


def values(state):
    return [[block and block.value for block in row] for row in state]


@given(sizes)
def test_all_reduce_is_reduce_scatter_then_all_gather(n):
    start = start_of("all_reduce", n)
    assert moved("all_reduce", start) == moved("all_gather", moved("reduce_scatter", start))


@given(sizes, st.data())
def test_all_reduce_is_reduce_then_broadcast(n, data):
    src = data.draw(st.integers(0, n - 1))
    start = start_of("all_reduce", n)
    assert moved("all_reduce", start) == moved("broadcast", moved("reduce", start, src), src)


@given(sizes)
def test_all_to_all_twice_changes_nothing(n):
    start = start_of("all_to_all", n)
    assert moved("all_to_all", moved("all_to_all", start)) == start


@given(sizes, st.data())
def test_gather_undoes_scatter(n, data):
    src = data.draw(st.integers(0, n - 1))
    start = start_of("scatter", n, src)
    assert moved("gather", moved("scatter", start, src), src) == start


def test_the_numbers_of_two_ranks():
    assert values(moved("all_reduce", start_of("all_reduce", 2))) == [[30, 32], [30, 32]]
    assert values(moved("reduce", start_of("reduce", 2), 1)) == [[None, None], [30, 32]]
    assert values(moved("reduce_scatter", start_of("reduce_scatter", 2))) == [[30, None], [None, 32]]
    assert values(moved("all_gather", start_of("all_gather", 2))) == [[10, 21], [10, 21]]
    assert values(moved("all_to_all", start_of("all_to_all", 2))) == [[10, 20], [11, 21]]
    assert values(moved("broadcast", start_of("broadcast", 2, 1), 1)) == [[20, 21], [20, 21]]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_the_picture_shows_the_numbers_of_both_sides(name):
    figure = before_after(name, 3)
    shown = sorted(int(w) for w in words(figure) if w.isdigit())
    start = start_of(name, 3)
    assert shown == sorted(
        v for state in (start, moved(name, start)) for row in values(state) for v in row if v is not None
    )
    assert not overlaps(figure)


def test_the_sheet_shows_all():
    figure = sheet()
    assert [a.get_title(loc="left") for a in figure.axes if a.get_visible()] == list(COLLECTIVES)
    assert words(figure).count(LEGEND) == 1
    assert not overlaps(figure)


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="did you mean `all_gather`"):
        before_after("allgather")
    with pytest.raises(ConfigError, match="source 4 in a group of 4"):
        before_after("broadcast", src=4)
    with pytest.raises(ConfigError, match="3 blocks"):
        moved("all_reduce", [[None], [None], [None]])
