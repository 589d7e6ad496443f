import pytest

from minimegatron.errors import ConfigError
from minimegatron.viz.timeline import LOOKS
from minimegatron.viz.waterfall import waterfall
from tests.viz.reading import overlaps, words

PARTS = {
    "at the peak": (0.04, "compute"),
    "tp, not hidden": (0.01, "comm"),
    "bubble": (0.03, "wait"),
    "norms": (0.02, "memory"),
}


def bars(figure):
    return [(round(p.get_x(), 9), round(p.get_width(), 9)) for p in figure.axes[0].patches]


def test_each_bar_begins_where_the_one_above_ends_and_the_last_is_the_sum():
    figure = waterfall(PARTS, total="all of it", title="A step")
    assert bars(figure) == [(0, 40), (40, 10), (50, 30), (80, 20), (0, 100)]  # ms
    labels = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert labels == [*PARTS, "all of it"]
    colours = [p.get_facecolor() for p in figure.axes[0].patches]
    assert len(set(colours[:4])) == 4 and "A step" in words(figure) and not overlaps(figure)


def test_what_takes_less_than_no_time_goes_back():
    figure = waterfall({"a": (3e-3, "compute"), "b": (-1e-3, "compute"), "c": (2e-3, "comm")})
    assert bars(figure) == [(0, 3), (2, 1), (2, 2), (0, 4)]
    assert "-25.0%" in words(figure)


def test_shares_and_the_rate_down_to_each_bar():
    seen = words(waterfall(PARTS, work=40e12))
    assert {"40.0%", "10.0%", "30.0%", "20.0%", "100.0%", "40.0", "100.0", "ms"} <= set(seen)
    assert {"1,000", "800", "500", "400"} <= set(seen)  # 40 TFLOP in 40, 50, 80 and 100 ms
    assert "TFLOP/s" in seen and "TFLOP/s" not in words(waterfall(PARTS))


def test_seconds_have_as_many_decimals_as_the_sum_needs():
    assert {"12.34", "0.06", "12.40"} <= set(words(waterfall({"a": (12.34, "compute"), "b": (0.06, "comm")})))
    assert {"1.020", "0.500", "1.520"} <= set(words(waterfall({"a": (1.02, "compute"), "b": (0.5, "comm")})))


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="waterfall of nothing"):
        waterfall({})
    with pytest.raises(ConfigError, match="kind 'idle'") as caught:
        waterfall({"a": (1.0, "idle")})
    assert all(kind in caught.value.fix for kind in LOOKS)
