import dataclasses

import pytest

from course.figures.data_parallel import (
    buffer_strip,
    gather_timelines,
    gathers_of,
    stage_bars,
    stage_grid,
)
from minimegatron.errors import ConfigError
from minimegatron.parallel.data.buckets import bucket_layout
from minimegatron.trace import Event
from tests.viz.reading import boxes, overlaps, words


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_areas_of_the_stages_are_the_bytes_of_a_rank(ranks):
    figure = stage_grid(ranks)
    want = [16, 4 + 12 / ranks, 2 + 14 / ranks, 16 / ranks]
    for stage, row in enumerate(figure.axes[i * ranks : (i + 1) * ranks] for i in range(4)):
        for cell in row:
            filled = [p for p in cell.patches if p.get_facecolor()[3] > 0]
            assert sum(p.get_width() * p.get_height() for p in filled) == pytest.approx(want[stage])
    assert not overlaps(figure)


def test_bars_are_the_bytes_by_owner():
    predicted = {"stage 0": {"parameters": 2e9, "moments": 6e9}, "stage 1": {"parameters": 2e9, "moments": 3e9}}
    measured = {"stage 0": {"parameters": 2e9, "moments": 6.5e9}, "stage 1": {"parameters": 2e9, "moments": 3e9}}
    figure = stage_bars(predicted, measured, capacity=8e9, binary=False)
    drawn = [(b.get_hatch() or "", round(b.get_height(), 6)) for b in boxes(figure)]
    assert drawn == [("///", 2), ("///", 6), ("", 2), ("", 6.5), ("///", 2), ("///", 3), ("", 2), ("", 3)]
    assert {"8", "8.5", "5", "GB on one rank", "a GPU has 8 GB"} <= set(words(figure)) and not overlaps(figure)


# Megatron's: parameter 0 lies at 384-394 in bucket 1, 1 at 256-356, 2 at 64-134, 3 at 0-5.
LAYOUT = bucket_layout([10, 100, 70, 5], 120, 2)


def spans(rectangles):
    return [(round(b.get_x()), round(b.get_x() + b.get_width())) for b in rectangles]


def test_a_buffer_is_drawn_to_scale_and_a_parameter_on_a_border_has_two_colours():
    figure = buffer_strip(LAYOUT, ["a", "b", "c", "d"])
    assert spans(b for b in boxes(figure) if b.get_hatch() == "////") == [(5, 64), (134, 256), (356, 384), (394, 512)]
    pieces = [b for b in boxes(figure) if not b.get_hatch()]
    colour = dict(zip(spans(pieces), (b.get_facecolor() for b in pieces), strict=True))
    assert set(colour) == {(0, 5), (64, 128), (128, 134), (256, 356), (384, 394)}
    assert colour[64, 128] == colour[0, 5] == colour[256, 356] != colour[128, 134] == colour[384, 394]
    assert [t.get_text() for t in figure.axes[0].texts if t.get_weight() == "bold"] == ["c"]
    assert not overlaps(figure)
    names = [f"layers.0.{i}.weight" for i in range(11)]
    many = buffer_strip(bucket_layout([8192, 64, 12288, 192, 4096, 64, 64, 16384, 256, 16384, 64], 16000, 4), names)
    assert {*names, "bucket 0: 16,512 elements", "rank 3"} <= set(words(many)) and not overlaps(many)
    assert "on every rank" in words(buffer_strip(bucket_layout([10, 100], 50))), "no shards, no owners"


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
    figure = gather_timelines({"run": STEP})
    bars = [(b.get_x(), b.get_width()) for b in boxes(figure)]
    assert len(bars) == 3 + (3 + 2) + (2 + 1), "computation, gathers with two dark ends, sums with one"
    assert (6.0, 1.0) in bars and "run: 21 s, of it 3 s in waits for gathers" in words(figure)
    rows = {b.get_y() for b in boxes(gather_timelines({"run": [*STEP, comm("all_gather", 3.0, 12.0)]}))}
    assert len(rows) == len({b.get_y() for b in boxes(figure)}) + 1, "gathers that overlap have rows of their own"
    assert not overlaps(figure)


def test_two_runs_share_one_axis_and_each_begins_at_0():
    late = [dataclasses.replace(e, start=2 * e.start + 40, end=2 * e.end + 40) for e in STEP]
    figure = gather_timelines({"fast": STEP, "slow": late}, title="Two ways")
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim()
    bars = [[b for b in axes.patches if b.get_width() > 0] for axes in figure.axes]
    assert [max(b.get_x() + b.get_width() for b in of) for of in bars] == [21, 42]
    assert [min(b.get_x() for b in of) for of in bars] == [0, 0]
    assert "slow: 42 s, of it 6 s in waits for gathers" in words(figure)
    assert not overlaps(figure)


@pytest.mark.parametrize(("draw", "message"), [
    (lambda: stage_grid(1), "on 1 ranks"),
    (lambda: stage_bars({"0": {"parameters": 1.0}}, {"1": {"parameters": 1.0}}), "predicted"),
    (lambda: buffer_strip(LAYOUT, ["a", "b", "c"]), "3 names for 4 parameters"),
    (lambda: buffer_strip(bucket_layout([], None)), "in 0 elements"),
    (lambda: gather_timelines({"run": [*STEP, comm("all_gather", 0.0, 1.0, rank=2)]}, rank=2), "1 gathers on rank 2"),
    (lambda: gather_timelines({"run": STEP}, axes=("pp",)), "0 gathers on rank 0"),
])  # fmt: skip
def test_mistakes_are_named(draw, message):
    with pytest.raises(ConfigError, match=message):
        draw()
