import pytest

from minimegatron.errors import ConfigError
from minimegatron.trace import Event
from minimegatron.viz.volume import bars, wire_bytes
from tests.viz.reading import overlaps, words


def test_wire_bytes_follow_the_ring():
    events = [
        Event(name, "comm", 0, 0, 1, axis="tp", nbytes=800, size=4)
        for name in ("all_reduce", "all_gather", "all_reduce")
    ]
    assert wire_bytes([*events, Event("forward", "compute", 0, 0, 1)]) == {
        "all_gather over tp": 600.0,
        "all_reduce over tp": 2400.0,
    }


def test_bars_carry_numbers_and_ratio():
    figure = bars({"all_reduce": 2048, "all_gather": 512}, {"all_reduce": 3072}, title="bytes")
    seen = [w.strip() for w in words(figure)]
    assert "2 KiB" in seen and "3 KiB  (x 1.5)" in seen and "not measured" in seen
    assert "KiB sent by one rank" in seen and "measured (x: times what was predicted)" in seen
    assert not overlaps(figure)
    assert [round(p.get_width(), 3) for p in figure.axes[0].patches] == [2, 0.5, 3, 0]


def test_the_axis_says_what_happens_to_the_bytes():
    assert "KiB kept by one rank" in [w.strip() for w in words(bars({"one rank": 2048}, what="kept by one rank"))]


def test_nothing_to_draw_is_refused():
    with pytest.raises(ConfigError, match="bars of nothing"):
        bars({})


def test_what_was_not_predicted_has_no_bars_of_a_prediction():
    figure = bars({}, {"mul": 3 * 2**20, "add": 2**20}, title="Measured alone")
    assert [round(bar.get_width(), 3) for bar in figure.axes[0].patches] == [3, 1]
    assert not figure.legends and not any("predicted" in text for text in words(figure))
