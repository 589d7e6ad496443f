import pytest

from minimegatron.errors import ConfigError
from minimegatron.viz.growth import against_ranks
from tests.viz.reading import overlaps, words

FORMULAS = {"flat": lambda n: 2.0, "linear": lambda n: n - 1.0}


def test_a_dashed_curve_for_each_formula_and_a_dot_for_each_count():
    figure = against_ranks(FORMULAS, {"linear": {8: 7.0, 4: 3.5}}, ranks=(2, 4, 8))
    lines = [line for line in figure.axes[0].lines if len(line.get_xdata())]
    curves = [line for line in lines if line.get_linestyle() == "--"]
    assert [list(line.get_ydata()) for line in curves] == [[2, 2, 2], [1, 3, 7]]
    dots = [line for line in lines if line not in curves]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in dots] == [([4, 8], [3.5, 7])]
    assert [w.strip() for w in words(figure) if w.strip() in FORMULAS] == ["flat", "linear"]
    assert {"predicted", "counted, linear"} <= set(words(figure)) and not overlaps(figure)


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="'log' was counted"):
        against_ranks(FORMULAS, {"log": {2: 1}})
    with pytest.raises(ConfigError, match="no formula"):
        against_ranks({}, {})


def test_each_count_has_its_own_marker_in_the_legend():
    figure = against_ranks(FORMULAS, {"linear": {4: 3.0}, "flat": {2: 2.0}})
    entries = dict(
        zip([t.get_text() for t in figure.legends[0].get_texts()], figure.legends[0].legend_handles, strict=True)
    )
    assert {name: entries[f"counted, {name}"].get_marker() for name in FORMULAS} == {"flat": "o", "linear": "s"}
