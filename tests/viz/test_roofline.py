import pytest

from minimegatron.errors import ConfigError
from minimegatron.viz.roofline import roof, roofline
from tests.viz.reading import overlaps, words

H100, H200 = (989e12, 3.35e12), (989e12, 4.8e12)


def lines(figure):
    return {line.get_label(): line for line in figure.axes[0].lines}


def test_the_roof_is_the_slope_below_the_ridge_and_flat_above():
    assert roof(1.0, *H100) == 3.35e12 and roof(1e4, *H100) == 989e12
    assert roof(989 / 3.35, *H100) == pytest.approx(989e12)


def test_each_machine_has_its_ridge_and_each_point_its_place():
    figure = roofline({"H100": H100, "H200": H200}, {"norm": (1.25, None), "measured": (2.0, 1e12)}, "At best")
    drawn = lines(figure)
    xs, ys = drawn["H100: ridge at 295 FLOP/byte"].get_data()
    assert xs[1] == pytest.approx(989e12 / 3.35e12) and list(ys[1:]) == [989e12] * 2
    assert ys[0] == pytest.approx(xs[0] * 3.35e12)
    assert [list(drawn["norm"].get_data()[i]) for i in (0, 1)] == [[1.25], [1.25 * 3.35e12]]
    assert list(drawn["measured"].get_data()[1]) == [1e12]
    assert {"norm", "measured", "At best"} <= set(words(figure)) and not overlaps(figure)


def test_the_first_ridge_parts_memory_from_arithmetic():
    figure = roofline({"H100": H100, "H200": H200}, {"norm": (1.25, None)}, "At best")
    boxes = {text.get_text(): text for text in figure.axes[0].texts}
    ridge = H100[0] / H100[1]
    assert boxes["memory is the bound"].xy[0] == boxes["arithmetic is the bound"].xy[0] == pytest.approx(ridge)
    assert (boxes["memory is the bound"].get_ha(), boxes["arithmetic is the bound"].get_ha()) == ("right", "left")
    assert not overlaps(figure)
    ceiling = figure.axes[0].transData.transform((ridge, H100[0]))[1]
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    assert all(text.get_window_extent(renderer).y0 > ceiling for text in boxes.values()), "no point can stand there"


def test_what_has_no_place_on_logarithmic_axes_is_refused():
    with pytest.raises(ConfigError, match="needs a machine"):
        roofline({}, {})
    with pytest.raises(ConfigError, match="has no place"):
        roofline({"H100": H100}, {"nothing": (0.0, 1.0)})
