import pytest
from matplotlib.colors import to_hex

from minimegatron.errors import ConfigError
from minimegatron.viz.bars import byte_bars, stacked, waterfall
from tests.viz.reading import boxes, overlaps, words

BARS = {"one rank": {"whole": 3.0, "cut": 4.0}, "tp 2": {"whole": 3.0, "cut": 2.0}, "tp 2 and sp": {"cut": 3.5}}
PARTS = {
    "at the peak": (0.04, "compute"),
    "tp, not hidden": (0.01, "comm"),
    "bubble": (0.03, "wait"),
    "norms": (0.02, "memory"),
}


def test_parts_stand_one_after_the_other_with_their_sum_and_the_predicted_one():
    figure = stacked(BARS, predicted={"one rank": 7.0, "tp 2": 6.0}, whole="whole")
    whole, cut = figure.axes[0].containers
    assert [p.get_width() for p in whole] == [3, 3, 0]
    assert [(p.get_x(), p.get_width()) for p in cut] == [(3, 4), (3, 2), (0, 3.5)]
    assert {p.get_hatch() for p in whole} == {"//"} and {p.get_hatch() for p in cut} <= {None, ""}
    assert [line.get_xdata()[0] for line in figure.axes[0].lines] == [7, 6]
    assert {"7", "5", "3.5", "predicted sum"} <= set(words(figure)) and not overlaps(figure)
    assert {"1,032", "13.7"} <= set(words(stacked({"a": {"whole": 1032.4}, "b": {"whole": 13.69}})))


def test_parts_with_colours_of_their_own_stand_in_that_order_below_a_limit():
    looks = {"first": "#111111", "absent": "#222222", "second": "#333333"}
    figure = stacked({"a": {"second": 2.0, "first": 1.0}, "b": {"second": 5.0}}, looks=looks, limit=8.0)
    first, second = figure.axes[0].containers
    assert [p.get_x() for p in second] == [1, 0] and [p.get_width() for p in first] == [1, 0]
    assert [to_hex(bar[0].get_facecolor()) for bar in (first, second)] == ["#111111", "#333333"]
    (line,) = figure.axes[0].lines
    assert set(line.get_xdata()) == {8.0} and "limit: 8" in words(figure) and not overlaps(figure)
    far = stacked({"a": {"second": 2.0}}, looks=looks, limit=80.0)
    assert far.axes[0].get_xlim()[1] < 3 and "limit: 80, beyond the axis" in words(far)


def test_bytes_predicted_and_measured_carry_numbers_and_ratio():
    figure = byte_bars({"all_reduce": 2048, "all_gather": 512}, {"all_reduce": 3072}, title="bytes")
    seen = {w.strip() for w in words(figure)}
    assert {"2 KiB", "3 KiB  (x 1.5)", "not measured", "KiB sent by one rank"} <= seen and not overlaps(figure)
    assert [round(p.get_width(), 3) for p in figure.axes[0].patches] == [2, 0.5, 3, 0]
    alone = byte_bars({}, {"mul": 3 * 2**20, "add": 2**20}, what="moved")
    assert [round(bar.get_width(), 3) for bar in alone.axes[0].patches] == [3, 1]
    assert "MiB moved" in words(alone) and not any("predicted" in text for text in words(alone))


def test_each_bar_of_a_waterfall_begins_where_the_one_above_ends_and_the_last_is_the_sum():
    figure = waterfall(PARTS, work=40e12)
    assert [(round(p.get_x(), 9), round(p.get_width(), 9)) for p in boxes(figure)] == [
        (0, 40),
        (40, 10),
        (50, 30),
        (80, 20),
        (0, 100),
    ]  # fmt: skip  ms
    assert {"40.0%", "10.0%", "30.0%", "20.0%", "100.0%", "ms"} <= set(words(figure))
    assert {"1,000", "800", "500", "400", "TFLOP/s"} <= set(words(figure)), "40 TFLOP in 40, 50, 80 and 100 ms"
    assert not overlaps(figure)
    back = waterfall({"a": (3e-3, "compute"), "b": (-1e-3, "compute"), "c": (2e-3, "comm")})
    assert [(round(p.get_x(), 9), round(p.get_width(), 9)) for p in boxes(back)] == [(0, 3), (2, 1), (2, 2), (0, 4)]
    assert "-25.0%" in words(back) and "TFLOP/s" not in words(back)


@pytest.mark.parametrize(("draw", "message"), [
    (lambda: stacked({"one rank": {}}), "bars of nothing"),
    (lambda: stacked({"one rank": dict.fromkeys("abcde", 1.0)}), "5 parts"),
    (lambda: stacked({"a": {"third": 1.0}}, looks={"first": "#111111"}), "third has no colour"),
    (lambda: byte_bars({}), "bars of nothing"),
    (lambda: waterfall({}), "waterfall of nothing"),
    (lambda: waterfall({"a": (1.0, "idle")}), "kind 'idle'"),
])  # fmt: skip
def test_mistakes_are_named(draw, message):
    with pytest.raises(ConfigError, match=message):
        draw()
