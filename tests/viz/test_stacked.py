import pytest
from matplotlib.colors import to_hex

from minimegatron.errors import ConfigError
from minimegatron.viz.stacked import stacked
from tests.viz.reading import boxes, overlaps, words

BARS = {"one rank": {"whole": 3.0, "cut": 4.0}, "tp 2": {"whole": 3.0, "cut": 2.0}, "tp 2 and sp": {"cut": 3.5}}


def test_parts_stand_one_after_the_other():
    figure = stacked(BARS, title="kept", what="KiB")
    whole, cut = figure.axes[0].containers
    assert [p.get_width() for p in whole] == [3, 3, 0]
    assert [(p.get_x(), p.get_width()) for p in cut] == [(3, 4), (3, 2), (0, 3.5)]
    assert len({p.get_facecolor() for p in boxes(figure)}) == 2


def test_hatched_is_only_what_is_whole_on_every_rank():
    assert {p.get_hatch() for p in boxes(stacked(BARS))} <= {None, ""}
    whole, cut = stacked(BARS, whole="whole").axes[0].containers
    assert {p.get_hatch() for p in whole} == {"//"} and {p.get_hatch() for p in cut} <= {None, ""}


def test_the_sum_is_written_and_the_predicted_one_is_a_line():
    figure = stacked(BARS, predicted={"one rank": 7.0, "tp 2": 6.0})
    assert {"7", "5", "3.5", "predicted sum"} <= set(words(figure))
    assert [line.get_xdata()[0] for line in figure.axes[0].lines] == [7, 6]
    assert not overlaps(figure)


def test_thousands_are_written_out() -> None:
    assert {"1,032", "13.7"} <= set(words(stacked({"a": {"whole": 1032.4}, "b": {"whole": 13.69}})))


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="bars of nothing"):
        stacked({"one rank": {}})
    with pytest.raises(ConfigError, match="5 parts"):
        stacked({"one rank": dict.fromkeys("abcde", 1.0)})


def test_parts_with_colours_of_their_own_stand_in_that_order_below_a_limit() -> None:
    looks = {"first": "#111111", "absent": "#222222", "second": "#333333"}
    figure = stacked({"a": {"second": 2.0, "first": 1.0}, "b": {"second": 5.0}}, looks=looks, limit=8.0)
    first, second = figure.axes[0].containers
    assert [p.get_x() for p in second] == [1, 0] and [p.get_width() for p in first] == [1, 0]
    assert [to_hex(bar[0].get_facecolor()) for bar in (first, second)] == ["#111111", "#333333"]
    (line,) = figure.axes[0].lines
    assert set(line.get_xdata()) == {8.0} and figure.axes[0].get_xlim()[1] > 8
    assert "limit: 8" in words(figure) and not overlaps(figure)
    far = stacked({"a": {"second": 2.0}}, looks=looks, limit=80.0)
    assert far.axes[0].get_xlim()[1] < 3 and "limit: 80, beyond the axis" in words(far)
    with pytest.raises(ConfigError, match="third has no colour"):
        stacked({"a": {"third": 1.0}}, looks=looks)
