import dataclasses

import pytest

from minimegatron.errors import ConfigError
from minimegatron.trace import Event
from minimegatron.viz.gathers import gather_timeline, gather_timelines, gathers_of
from tests.viz.reading import boxes, overlaps, words


def unit(name, note, start, end, rank=0):
    return Event(name, "unit", rank, start, end, note=note)


def comm(name, start, end, axis="dp_cp", rank=0):
    return Event(name, "comm", rank, start, end, axis=axis, size=2)


# The gather of unit 0 has nothing to hide behind; that of unit 1 ends while the rank waits for it.
STEP = [
    comm("all_gather", 0.0, 2.0),
    unit("forward", "unit 0", 2.0, 6.0),
    comm("all_gather", 2.0, 7.0),
    comm("all_gather", 2.0, 3.0, axis="tp"),
    unit("forward", "unit 1", 7.0, 11.0),
    comm("all_gather", 7.0, 11.0),
    unit("backward", "unit 1", 11.0, 19.0),
    comm("reduce_scatter", 15.0, 18.0),
    comm("reduce_scatter", 19.0, 21.0),
]


def test_a_gather_is_exposed_for_as_long_as_nothing_is_computed_at_its_end():
    found = [(g.unit, g.end, g.exposed) for g in gathers_of(STEP)]
    assert found == [("unit 0", 2.0, 2.0), ("unit 1", 7.0, 1.0), ("unit 1", 11.0, 0.0)]


def test_dark_is_what_is_exposed():
    figure = gather_timeline(STEP)
    bars = [(b.get_x(), b.get_width(), b.get_facecolor()) for b in boxes(figure)]
    assert len(bars) == 3 + (3 + 2) + (2 + 1), "computation, gathers with two dark ends, sums with one"
    dark = {colour for x, width, colour in bars if (x, width) in ((0.0, 2.0), (6.0, 1.0))}
    assert (6.0, 1.0) in [(x, width) for x, width, _ in bars]
    assert len({colour for x, width, colour in bars if (x, width) == (6.0, 1.0)} & dark) == 1
    assert "time in s; 3 s in waits for gathers, which are 11 s under way" in words(figure)
    assert not overlaps(figure)


def test_gathers_that_overlap_stand_in_rows_of_their_own():
    late = [*STEP, comm("all_gather", 3.0, 12.0)]
    heights = {b.get_y() for b in boxes(gather_timeline(late))}
    assert len(heights) == len({b.get_y() for b in boxes(gather_timeline(STEP))}) + 1


def test_two_runs_share_one_axis_and_each_begins_at_0():
    late = [dataclasses.replace(e, start=2 * e.start + 40, end=2 * e.end + 40) for e in STEP]
    figure = gather_timelines({"fast": STEP, "slow": late}, title="Two ways")
    assert len(figure.axes) == 2 and figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
    ends = [max(b.get_x() + b.get_width() for b in boxes_of(axes)) for axes in figure.axes]
    starts = [min(b.get_x() for b in boxes_of(axes)) for axes in figure.axes]
    assert starts == [0, 0] and ends == [21, 42]
    seen = words(figure)
    assert "slow: 42 s, of it 6 s in waits for gathers, which are 22 s under way" in seen and "time in s" in seen
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(set(legend)) == len(legend)
    assert not overlaps(figure)


def boxes_of(axes):
    return [p for p in axes.patches if p.get_width() > 0]


def test_one_rank_is_drawn():
    other = [unit("forward", "unit 0", 0.0, 1.0, rank=1), comm("all_gather", 0.0, 1.0, rank=1)]
    assert len(boxes(gather_timeline([*STEP, *other]))) == len(boxes(gather_timeline(STEP)))
    with pytest.raises(ConfigError, match="1 gathers on rank 2"):
        gather_timeline([*STEP, comm("all_gather", 0.0, 1.0, rank=2)], rank=2)
    with pytest.raises(ConfigError, match="0 gathers on rank 0"):
        gather_timeline(STEP, axes=("pp",))
