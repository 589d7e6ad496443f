import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.cuda import ACTIVE, PASSIVE
from minimegatron.viz.tiles import kinds, scaled_tiles, score_tiles
from tests.viz.reading import boxes, overlaps, words


def test_a_tile_is_full_below_the_diagonal_half_on_it_and_hidden_above():
    assert kinds(8, 4, 4) == [["half", "hidden"], ["full", "half"]]
    assert kinds(8, 4, 2) == [["half", "half", "hidden", "hidden"], ["full", "full", "half", "half"]]
    assert kinds(4, 2, 4) == [["half"], ["half"]]
    with pytest.raises(ConfigError, match="do not divide 8"):
        kinds(8, 3, 2)


def test_scores_that_count_that_are_masked_and_that_are_never_computed():
    figure = score_tiles(8, 4, 2)
    colours = [to_hex(box.get_facecolor()) for box in boxes(figure)]
    computed = 4 * 4 + 4 * 8
    assert (colours.count(ACTIVE), colours.count(PASSIVE)) == (36, computed - 36)
    assert len(colours) == 64
    assert {"queries 0 to 3: loads 4 keys, 4 values", "queries 4 to 7: loads 8 keys, 8 values"} <= set(words(figure))
    assert not overlaps(figure)


BEFORE = [[0.5, 0.001, 2.0, 400.0], [0.25, -0.5, 0.0, -0.75]]
WHOLE = [[0.5, 0.0, 2.0, 400.0], [0.25, -0.5, 0.0, -0.75]]


def test_what_is_lost_is_marked_and_a_scale_stands_below_each_tile():
    tiles = ("tiles", (1, 2), [[512.0, 1.0], [512.0, 0.3]], BEFORE)
    figure = scaled_tiles(BEFORE, [("one scale", (2, 4), [[1.0]], WHOLE), tiles])
    marked = [box for box in boxes(figure) if box.get_hatch()]
    assert [(round(box.get_x()), round(box.get_y())) for box in marked] == [(1, 0)]
    seen = words(figure)
    assert (seen.count("scale 2^9"), seen.count("scale 2^0"), seen.count("scale 0.3")) == (2, 2, 1)
    borders = [p for p in figure.axes[2].patches if isinstance(p, Rectangle) and not p.get_fill()]
    assert [(p.get_x(), p.get_width()) for p in borders] == [(0, 2), (2, 2), (0, 2), (2, 2)]
    rows = [{round(box.get_y(), 2) for box in axes.patches if isinstance(box, Rectangle)} for axes in figure.axes[1:]]
    assert rows == [{0.0, 0.8}, {0.0, 1.35}]  # no gap inside of a tile
    assert "-0" not in seen and not overlaps(figure)


def test_matrices_of_other_shapes_are_refused():
    with pytest.raises(ConfigError, match="another shape"):
        scaled_tiles(BEFORE, [("short", (1, 2), [[1.0]], [[1.0]])])
    with pytest.raises(ConfigError, match="no tiles"):
        scaled_tiles(BEFORE, [])
