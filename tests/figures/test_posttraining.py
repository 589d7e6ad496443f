"""Drawings of lab 11."""

import pytest
from matplotlib.colors import to_hex

from course.figures.posttraining import COUNTS, LOOP, bars_of_rows, curves, loop, tokens_that_count
from minimegatron.errors import ConfigError
from tests.viz.reading import boxes, overlaps, words


def test_a_line_each_turn_and_what_counts_has_another_look():
    figure = tokens_that_count(["<", "u", "2", ">", "<", "a", "4", ">"], [False] * 6 + [True] * 2, begins="<")
    marked = [(box.get_y(), to_hex(box.get_facecolor()) == COUNTS) for box in boxes(figure)]
    assert marked == [(0.1, False)] * 4 + [(1.1, False)] * 2 + [(1.1, True)] * 2
    assert [text.get_weight() for text in figure.axes[0].texts] == ["normal"] * 6 + ["bold"] * 2
    assert not overlaps(figure)


def test_all_ways_have_one_scale():
    figure = bars_of_rows({"a": [1.0, 2.0], "b": [0.5, 4.0]}, ["x", "y"], what="weight", rows="row")
    assert [[bar.get_height() for bar in axes.patches] for axes in figure.axes] == [[1.0, 2.0], [0.5, 4.0]]
    assert len({axes.get_ylim() for axes in figure.axes}) == 1


def test_each_panel_has_its_lines_over_the_same_places():
    figure = curves({"a": {"": [1.0, 2.0]}, "b": {"x": [3.0, 4.0], "y": [5.0, 6.0]}}, xs=[10.0, 20.0], log=True)
    lines = [[(list(line.get_xdata()), list(line.get_ydata())) for line in axes.lines] for axes in figure.axes]
    assert lines == [[([10.0, 20.0], [1.0, 2.0])], [([10.0, 20.0], [3.0, 4.0]), ([10.0, 20.0], [5.0, 6.0])]]
    assert {axes.get_yscale() for axes in figure.axes} == {"log"}
    assert list(curves({"a": {"": [1.0, 2.0]}}).axes[0].lines[0].get_xdata()) == [0, 1]


def test_the_loop_has_each_station_once():
    figure = loop()
    assert sorted(text for text in words(figure) if text) == sorted(LOOP) and not overlaps(figure)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: tokens_that_count([], [], begins="<"),
        lambda: tokens_that_count(["a"], [], begins="<"),
        lambda: bars_of_rows({}, ["a"], what="", rows=""),
        lambda: bars_of_rows({"a": [1.0]}, [], what="", rows=""),
        lambda: curves({}),
        lambda: curves({"a": {"": [1.0]}}, xs=[1.0, 2.0]),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw):
    with pytest.raises(ConfigError):
        draw()
