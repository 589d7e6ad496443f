import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.patches import Patch

from minimegatron.errors import ConfigError
from minimegatron.viz.crashes import COLOURS, ROWS, crash_map
from minimegatron.viz.picture import PAPER
from tests.viz.reading import boxes, overlaps, words

STEPS = [("mkdir", {"old"}, {"old"}), ("write manifest", {"broken"}, {"old", "broken"}), ("fsync", {"new"}, {"new"})]


def test_a_cell_is_filled_where_its_fate_can_be_met():
    picture = crash_map({"in place": STEPS})
    filled = {
        (int(p.get_x()), ROWS[int(p.get_y())]) for p in boxes(picture) if to_hex(p.get_facecolor()) != to_hex(PAPER)
    }
    assert filled == {(0, "old"), (1, "old"), (1, "broken"), (2, "new")}
    assert len({*COLOURS.values()}) == len(ROWS)


def test_a_ring_says_what_the_death_of_the_program_leaves():
    lines = crash_map({"in place": STEPS}).axes[0].lines
    rings = {(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in lines}
    assert rings == {(0.5, 0.5), (1.5, 2.5), (2.5, 1.5)}


def test_every_change_is_named_and_nothing_lies_on_anything():
    picture = crash_map({"in place": STEPS, "staged": STEPS * 4})
    assert {"mkdir", "write manifest", "fsync", "old", "new", "broken", "in place", "staged"} <= {*words(picture)}
    assert not overlaps(crash_map({"in place": STEPS}))


def test_the_axes_and_the_legend_say_what_a_cell_is():
    picture = crash_map({"in place": STEPS})
    assert {"the save stops after this change", "a reader finds"} <= {*words(picture)}
    FigureCanvasAgg(picture).draw()
    legend = picture.legends[0].get_window_extent()
    assert picture.bbox.x0 <= legend.x0 and legend.x1 <= picture.bbox.x1
    patches = picture.legends[0].findobj(Patch)
    assert {to_hex(colour) for colour in COLOURS.values()} <= {to_hex(one.get_facecolor()) for one in patches}


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="no save"):
        crash_map({})
    with pytest.raises(ConfigError, match="no save"):
        crash_map({"nothing": []})
    with pytest.raises(ConfigError, match="'lost' is nothing"):
        crash_map({"staged": [("mkdir", {"lost"}, {"old"})]})
