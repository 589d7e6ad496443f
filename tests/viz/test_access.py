import pytest
from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.access import ASKED, CAME, access_map, sectors
from tests.viz.reading import boxes, overlaps, words

APART, TOGETHER = [thread * 16 for thread in range(4)], list(range(4))


def test_sectors_are_those_that_hold_an_asked_number():
    assert sectors((4, 16), APART) == {0, 2, 4, 6} and sectors((4, 16), TOGETHER) == {0}
    assert sectors((1, 16), [7, 8]) == {0, 1}


def test_what_was_asked_is_dark_and_what_came_along_is_light():
    figure = access_map((4, 16), {"apart": APART, "together": TOGETHER})
    from matplotlib.colors import to_hex

    colours = [to_hex(box.get_facecolor()) for box in boxes(figure)]
    assert (colours.count(ASKED), colours.count(CAME)) == (8, 4 * 7 + 4)
    assert [i for i, colour in enumerate(colours[:64]) if colour == ASKED] == APART
    seen = words(figure)
    assert "apart: 4 threads ask, 4 sectors (of 8 numbers) are fetched" in seen
    assert "together: 4 threads ask, 1 sector (of 8 numbers) is fetched" in seen
    assert not overlaps(figure)


def test_each_sector_has_a_border_and_the_columns_are_numbered():
    figure = access_map((4, 16), {"apart": APART})
    borders = [p for p in figure.axes[0].patches if isinstance(p, Rectangle) and not p.get_fill()]
    assert [(p.get_x(), p.get_y(), p.get_width()) for p in borders] == [(x, y, 8) for y in range(4) for x in (0, 8)]
    axes = figure.axes[0]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["0", "8"] and axes.get_xlabel() == "column"
    with pytest.raises(ConfigError, match="rows of 12 numbers"):
        access_map((4, 12), {"apart": [0]})


def test_a_place_outside_of_the_matrix_is_refused():
    with pytest.raises(ConfigError, match="no place 64"):
        access_map((4, 16), {"beyond": [64]})
    with pytest.raises(ConfigError, match="no access"):
        access_map((4, 16), {})
