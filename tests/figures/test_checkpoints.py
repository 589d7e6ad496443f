import pytest
from matplotlib.colors import to_hex

from course.figures.checkpoints import ROWS, crash_map, interval_curve, over_time, region_map, strips, turns
from minimegatron.errors import ConfigError
from minimegatron.viz.picture import PAPER, rank_colours
from tests.viz.reading import boxes, overlaps, words

STORED = [[[[0, 2], [0, 3]]], [[[0, 1], [3, 6]], [[1, 2], [3, 5]]], [[[1, 2], [5, 6]]]]
READ = [[[[0, 2], [0, 2]]], [[[0, 2], [2, 4]]], [[[0, 2], [4, 6]]]]
STEPS = [("mkdir", {"old"}, {"old"}), ("write manifest", {"broken"}, {"old", "broken"}), ("fsync", {"new"}, {"new"})]


def test_each_box_stands_where_its_numbers_are_and_what_is_wanted_lies_over_every_layout():
    figure = region_map((2, 6), {"stored": STORED, "read": READ}, ("rank 1 reads", READ[1]))
    colours = rank_colours(3)
    drawn = [(p.get_xy(), p.get_width(), p.get_height(), to_hex(p.get_facecolor())) for p in boxes(figure)[:4]]
    assert drawn == [
        ((0, 0), 3, 2, colours[0]), ((3, 0), 3, 1, colours[1]), ((3, 1), 2, 1, colours[1]), ((5, 1), 1, 1, colours[2]),
    ]  # fmt: skip
    for axes in figure.axes:
        [line] = [p for p in axes.patches if not p.get_fill()]
        assert (line.get_xy(), line.get_width(), line.get_height()) == ((2, 0), 2, 2)
    assert {"stored", "read", "rank 1 reads"} <= {*words(figure)} and not overlaps(figure)


def test_a_cell_is_filled_where_power_may_fail_and_a_ring_is_what_the_death_of_the_program_leaves():
    figure = crash_map({"in place": STEPS})
    filled = [p for p in boxes(figure) if to_hex(p.get_facecolor()) != to_hex(PAPER)]
    assert {(int(p.get_x()), ROWS[int(p.get_y())]) for p in filled} == {
        (0, "old"), (1, "old"), (1, "broken"), (2, "new"),
    }  # fmt: skip
    rings = {(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in figure.axes[0].lines}
    assert rings == {(0.5, 0.5), (1.5, 2.5), (2.5, 1.5)}
    assert {"mkdir", "write manifest", "fsync", *ROWS, "in place"} <= {*words(figure)} and not overlaps(figure)


def test_the_marked_interval_lies_where_saving_and_failures_cost_the_same():
    figure = interval_curve(4, 7200, [60, 240, 960], 240)
    together, saving, undone, mark = ([*map(float, line.get_ydata())] for line in figure.axes[0].lines)
    assert saving == pytest.approx([100 / 15, 100 / 60, 100 / 240])
    assert undone == pytest.approx([100 / 240, 100 / 60, 100 / 15])
    assert together == pytest.approx([a + b for a, b in zip(saving, undone, strict=True)])
    assert mark == pytest.approx([100 / 30]) and not overlaps(figure)


def test_each_change_is_a_box_in_its_turn_and_a_wait_is_a_line():
    events = [["", 0, 0.0, "mkdir", ".step-20"], ["", 1, 0.1, "write", ".step-20/shard-1"], ["", 1, 0.1, "died"],
              ["", 0, 60.1, "TimeoutError: missing: [1]"]]  # fmt: skip
    figure = turns({"rank 1 dies": events})
    assert [(int(p.get_x()), int(p.get_y())) for p in boxes(figure)] == [(0, 0), (1, 1), (2, 1), (3, 0)]
    assert {"mkdir\nfolder", "write\nshard-1", "dies", "raises\nmissing:\n[1]", "60 s pass"} <= {*words(figure)}
    assert not overlaps(figure)


def test_what_the_run_and_the_background_do_lies_on_one_axis():
    run, behind = [("step", 0.0, 1.0), ("copy", 1.0, 1.5), ("step", 1.5, 2.5)], [("write", 1.5, 4.0)]
    figure = over_time({"yours": (run, behind, [(1.5, 1.0)]), "the run writes": ([("write", 0.0, 2.0)], [], [])})
    drawn = [(p.get_x(), p.get_width(), int(p.get_y())) for p in boxes(figure)[:4]]
    assert drawn == [(0, 1, 0), (1, 0.5, 0), (1.5, 1, 0), (1.5, 2.5, 1)]
    assert {"the run", "background", "one copy", "step", "copy", "wait", "write"} <= {*words(figure)}
    assert not overlaps(figure)


def test_a_block_has_the_colour_and_the_number_of_the_rank_that_needs_it():
    figure = strips({"q and k": [("theirs", "q0 q1 k0 k1", [0, 1, 0, 1]), ("packed", "q0 k0 q1 k1", [0, 0, 1, 1])]})
    colours = rank_colours(2)
    assert [colours.index(to_hex(p.get_facecolor())) for p in boxes(figure)] == [0, 1, 0, 1, 0, 0, 1, 1]
    assert {"q0\nrank 0", "k1\nrank 1", "theirs", "packed"} <= {*words(figure)} and not overlaps(figure)


@pytest.mark.parametrize(("draw", "message"), [
    (lambda: region_map((2, 6), {}), "no layout"),
    (lambda: region_map((2, 6), {"too wide": [[[[0, 2], [4, 7]]]]}), "outside of"),
    (lambda: crash_map({"nothing": []}), "no save"),
    (lambda: crash_map({"staged": [("mkdir", {"lost"}, {"old"})]}), "'lost' is nothing"),
    (lambda: interval_curve(4, 7200, [0, 60], 240), "not above 0"),
    (lambda: turns({"nothing": []}), "no run"),
    (lambda: strips({}), "no matrix"),
    (lambda: strips({"q": [("theirs", "q0 q1", [0])]}), "2 blocks and 1 ranks"),
    (lambda: over_time({"nothing": ([], [], [])}), "no run"),
    (lambda: over_time({"other": ([("sleep", 0, 1)], [], [])}), "'sleep' is nothing"),
])  # fmt: skip
def test_mistakes_are_named(draw, message):
    with pytest.raises(ConfigError, match=message):
        draw()
