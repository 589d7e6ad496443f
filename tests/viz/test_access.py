import pytest

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
    assert "apart: 4 numbers asked for, 4 sectors of 8 come" in seen
    assert "together: 4 numbers asked for, 1 sector of 8 come" in seen
    assert not overlaps(figure)


def test_a_place_outside_of_the_matrix_is_refused():
    with pytest.raises(ConfigError, match="no place 64"):
        access_map((4, 16), {"beyond": [64]})
    with pytest.raises(ConfigError, match="no access"):
        access_map((4, 16), {})
