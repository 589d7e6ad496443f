import pytest

from minimegatron.errors import ConfigError
from minimegatron.viz.curves import beside, losses, over_degrees
from tests.viz.reading import overlaps, words


def test_the_reference_is_thick_and_the_distance_a_curve_of_its_own():
    upper, lower = beside([3.0, 2.0, 1.5], [3.0, 2.5, 1.0], "yours", "serial twin", "loss").axes
    reference, measured = upper.lines
    assert reference.get_linewidth() > 2 * measured.get_linewidth()
    assert list(lower.lines[0].get_ydata()) == [0.0, 0.5, 0.5]


def test_curves_of_different_lengths_are_refused():
    with pytest.raises(ConfigError, match="curves of 1 and 2 steps"):
        beside([1.0], [1.0, 2.0], "yours", "twin", "loss")
    with pytest.raises(ConfigError, match="over 2 degrees"):
        over_degrees([1, 2], {"tp": [1.0]}, title="", what="GB")
    with pytest.raises(ConfigError, match="no curve"):
        losses({})


def test_one_loss_has_no_legend_and_two_have():
    assert "tp 2" not in words(losses({"tp 2": [3.0, 2.0]}))
    figure = losses({"wrong": [3.0, 2.0], "repaired": [3.0, 2.5]})
    assert {"wrong", "repaired"} <= set(words(figure))
    one, other = figure.axes[0].lines
    assert one.get_linestyle() != other.get_linestyle()


def test_halving_is_a_straight_line_whose_ticks_can_be_read():
    figure = over_degrees([1, 2, 4, 8, 16], {"cut": [2.0 / t for t in (1, 2, 4, 8, 16)]}, title="", what="GB")
    axes = figure.axes[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert not overlaps(figure)
    assert {"1", "16", "0.2", "0.5"} <= set(words(figure))


def test_a_short_axis_has_more_ticks():
    figure = over_degrees([1, 2, 4], {"error": [1.0, 1.5, 4.3]}, title="", what="times")
    assert not overlaps(figure)
    assert {"1", "1.5", "2", "3", "4"} <= set(words(figure))
