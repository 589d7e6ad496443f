import pytest

from course.figures.planning import agreement, factor_text, factors
from minimegatron.errors import ConfigError
from tests.viz.reading import overlaps, words

COMPUTED = {"parameters": {"tp": 2.0, "pp": 1.87}, "state": {"tp": 1.0, "pp": 1.02}, "copies": {"tp": 0.5, "pp": 1.0}}


def test_every_square_says_its_factor_and_what_was_predicted():
    assert [factor_text(n) for n in (2.0, 1.87, 1.02, 1.0, 0.99, 0.5, 4.0)] == [
        "÷ 2",
        "÷ 1.9",
        *["same"] * 3,
        "× 2",
        "÷ 4",
    ]
    figure = factors(COMPUTED, {"parameters": {"tp": 2, "pp": 2}, "state": {"tp": 2}}, what="the axis")
    seen = words(figure)
    assert [seen.count(text) for text in ("same", "÷ 2", "× 2")] == [3, 1, 1]
    assert [seen.count(f"{sign} predicted: ÷ 2") for sign in "✔✘"] == [2, 1]
    assert {"parameters", "state", "copies", "tp", "pp", "the axis"} <= set(seen) and not overlaps(figure)
    assert len({patch.get_facecolor() for patch in figure.axes[0].patches}) == 3  # divided, the same, more


def test_each_run_has_a_pair_of_bars_and_its_ratio():
    tables = {"first": {"1.7B": (100.0, 95.0), "7.5B": (120.0, 132.0)}, "second": {"70B": (400.0, 400.0)}}
    figure = agreement(tables, what="TFLOP/s a GPU")
    widths = [[bar.get_width() for bar in axes.patches] for axes in figure.axes]
    assert widths == [[100.0, 120.0, 95.0, 132.0], [400.0, 400.0]]
    assert {"x 0.95", "x 1.10", "x 1.00", "1.7B", "70B", "first", "second"} <= set(words(figure))
    assert not overlaps(figure)


@pytest.mark.parametrize(("draw", "message"), [
    (lambda: factors({}), "columns"),
    (lambda: factors({"a": {"tp": 1.0}, "b": {"pp": 1.0}}), "columns"),
    (lambda: agreement({}, what=""), "no run"),
    (lambda: agreement({"first": {}}, what=""), "no run"),
])  # fmt: skip
def test_mistakes_are_named(draw, message):
    with pytest.raises(ConfigError, match=message):
        draw()
