import pytest
from matplotlib.colors import to_hex

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import rank_colours
from minimegatron.viz.region_map import region_map
from tests.viz.reading import boxes, overlaps, words

STORED = [[[[0, 2], [0, 3]]], [[[0, 1], [3, 6]], [[1, 2], [3, 5]]], [[[1, 2], [5, 6]]]]
READ = [[[[0, 2], [0, 2]]], [[[0, 2], [2, 4]]], [[[0, 2], [4, 6]]]]


def test_each_box_stands_where_its_numbers_are_in_the_colour_of_its_rank():
    picture = region_map((2, 6), {"stored": STORED})
    found = [(p.get_xy(), p.get_width(), p.get_height(), to_hex(p.get_facecolor())) for p in boxes(picture)]
    colours = rank_colours(3)
    assert found == [
        ((0, 0), 3, 2, colours[0]), ((3, 0), 3, 1, colours[1]), ((3, 1), 2, 1, colours[1]), ((5, 1), 1, 1, colours[2]),
    ]  # fmt: skip
    assert sorted(t.get_text() for t in picture.axes[0].texts) == ["0", "1", "1", "2"]


def test_what_is_wanted_lies_over_every_layout():
    picture = region_map((2, 6), {"stored": STORED, "read": READ}, ("rank 1 reads", READ[1]))
    for axes in picture.axes:
        [line] = [p for p in axes.patches if not p.get_fill()]
        assert (line.get_xy(), line.get_width(), line.get_height()) == ((2, 0), 2, 2)
    assert {"stored", "read", "rank 1 reads"} <= {*words(picture)} and not overlaps(picture)


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="no layout"):
        region_map((2, 6), {})
    with pytest.raises(ConfigError, match="outside of"):
        region_map((2, 6), {"too wide": [[[[0, 2], [4, 7]]]]})
