"""The pictures of lab 03 beside schedules: placements, a deadlock, a plan beside a run, memory against bubble."""

from __future__ import annotations

import dataclasses

import pytest
from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError
from minimegatron.trace import Event
from minimegatron.viz.deadlock import draw_deadlock
from minimegatron.viz.paired import planned_and_done
from minimegatron.viz.picture import WORK
from minimegatron.viz.placement import placements
from minimegatron.viz.trade_off import trade_off
from tests.viz.reading import boxes, overlaps, words

STRAIGHT, ROUND, V = [[0], [1], [2]], [[0, 3], [1, 4], [2, 5]], [[0, 5], [1, 4], [2, 3]]


def named(figure) -> list[str]:
    return [word for word in words(figure) if word.isdigit()]


def test_a_stage_stands_in_the_row_of_its_rank_and_later_chunks_are_darker() -> None:
    figure = placements({"straight": STRAIGHT, "round robin": ROUND, "V": V})
    assert {"straight", "round robin", "V"} <= set(words(figure)) and not overlaps(figure)
    for axes, placement in zip(figure.axes, (STRAIGHT, ROUND, V), strict=True):
        found = {int(b.get_x()): b for b in axes.patches if isinstance(b, Rectangle)}
        assert {s: round(b.get_y() + 0.34) for s, b in found.items()} == {
            s: rank for rank, row in enumerate(placement) for s in row
        }
        first, last = found[placement[0][0]].get_facecolor(), found[placement[0][-1]].get_facecolor()
        assert len(placement[0]) == 1 or sum(last[:3]) < sum(first[:3]) - 0.5


def test_a_line_leads_from_each_stage_to_the_next() -> None:
    (axes,) = placements({"V": V}).axes
    lines = [t for t in axes.texts if getattr(t, "arrow_patch", None) is not None]
    ends = sorted((t.xyann[0], *(round(y) for y in (t.xyann[1], t.xy[1]))) for t in lines)
    assert ends == [(0.5, 0, 1), (1.5, 1, 2), (2.5, 2, 2), (3.5, 2, 1), (4.5, 1, 0)]


def test_a_placement_without_a_stage_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[0, 2\]"):
        placements({"torn": [[0], [2]]})
    with pytest.raises(ConfigError, match="no placement"):
        placements({})


CIRCLE = [["F0", "B0", "F1"], ["F0", "F1", "B0"]], [1, 1], [(0, 1, 1, 2), (1, 1, 0, 2)]


def test_what_a_deadlock_never_reaches_is_hatched_and_arrows_close_the_circle() -> None:
    figure = draw_deadlock(*CIRCLE, title="a circle")
    assert [b.get_hatch() or "" for b in boxes(figure)] == ["", "///", "///"] * 2
    assert {"done", "never reached", "waits for", "the rank stands here", "a circle"} <= set(words(figure))
    frames = [p for p in figure.axes[0].patches if isinstance(p, Rectangle) and not p.get_fill()]
    stands = [(p.get_x() + p.get_width() / 2, p.get_y() + p.get_height() / 2) for p in frames]
    hatched = [b for b in boxes(figure) if b.get_hatch()]
    assert stands == [
        pytest.approx((b.get_x() + b.get_width() / 2, b.get_y() + b.get_height() / 2)) for b in (hatched[0], hatched[2])
    ]
    arrows = [t for t in figure.axes[0].texts if getattr(t, "arrow_patch", None) is not None]
    assert [(int(a.xyann[0]), int(a.xy[0])) for a in arrows] == [(1, 2), (1, 2)]
    assert arrows[0].xyann[1] < arrows[0].xy[1] and arrows[1].xyann[1] > arrows[1].xy[1], "one down, one up"
    assert not overlaps(figure)
    with pytest.raises(ConfigError, match="no rank waits"):
        draw_deadlock([["F0"]], [1], [])


def events(shift: float = 0.0, stretch: float = 1.0, chunk: str = "") -> list[Event]:
    plan = (("F", 0, 0, 1), ("B", 0, 4, 6), ("F", 1, 1, 2), ("B", 1, 2, 4))
    return [
        Event(name, "compute", rank, shift + stretch * a, shift + stretch * b, note=f"0{chunk}")
        for name, rank, a, b in plan
    ]


def test_a_plan_and_a_run_stand_rank_by_rank_on_one_axis() -> None:
    figure = planned_and_done(events(), events(shift=7.0, stretch=1.5), "mine")
    found = boxes(figure)
    planned, done = found[:4], found[4:]
    assert [b.get_x() for b in planned] == [0, 4000, 1000, 2000] and [b.get_x() for b in done] == [0, 6000, 1500, 3000]
    assert all(p.get_y() + p.get_height() == pytest.approx(d.get_y()) for p, d in zip(planned, done, strict=True))
    assert {line.get_xdata()[0] for line in figure.axes[0].lines} == {6000, 9000}
    assert max(line.zorder for line in figure.axes[0].lines) < min(b.zorder for b in found), (
        "no label is struck through"
    )
    assert {"planned: all done", "measured: all done", "F: forward", "B: backward"} <= set(words(figure))
    assert not overlaps(figure)
    dark = boxes(planned_and_done(events(chunk=".1"), events(chunk=".1")))
    assert sum(dark[0].get_facecolor()[:3]) < sum(planned[0].get_facecolor()[:3]) - 0.5
    with pytest.raises(ConfigError, match="0 events planned, 4 done"):
        planned_and_done([], events())


def test_each_schedule_is_a_point_and_equal_points_share_a_label() -> None:
    predicted = {"gpipe": (8, 0.375), "1f1b": (4, 0.375), "zb_v": (4, 0.0625), "dualpipe_v": (4.5, 0.0625),
                 "again": (8, 0.375)}  # fmt: skip
    figure = trade_off(predicted, {"1f1b": (4, 0.45)}, "p=4")
    said = words(figure)
    assert {"gpipe, again", "1f1b", "zb_v", "dualpipe_v", "predicted", "measured", "p=4"} <= set(said)
    assert not overlaps(figure)
    places = {(*line.get_xdata(), *line.get_ydata()) for line in figure.axes[0].lines if len(line.get_xdata()) == 1}
    assert places == {(8, 37.5), (4, 37.5), (4, 6.25), (4.5, 6.25), (4, 45.0)}
    with pytest.raises(ConfigError, match="zb_v"):
        trade_off({"gpipe": (8, 0.375)}, {"zb_v": (4, 0.1)})


KEEP: dict[str, float] = {"gpipe": 16, "1f1b": 4, "zb_h1": 4, "interleaved": 5.5, "zb_v": 4, "dualpipe_v": 4.5}
BUBBLE: dict[str, float] = {"gpipe": 3, "1f1b": 3, "zb_h1": 1, "interleaved": 1.5, "zb_v": 0.5, "dualpipe_v": 0.5}


@pytest.mark.parametrize("m", [4, 8, 16, 32])
def test_labels_stay_inside_of_the_axes_and_off_each_other(m: int) -> None:
    points = {name: (min(m, kept), BUBBLE[name] / m) for name, kept in KEEP.items()}
    for before in ({}, {name: (min(m / 2, kept), 2 * BUBBLE[name] / m) for name, kept in KEEP.items()}):
        figure = trade_off(points, title=f"m={m}", before=before)
        assert not overlaps(figure)
        (axes,) = figure.axes
        inside = axes.get_window_extent()
        labels = [t for t in axes.texts if t.get_text() and "better" not in t.get_text()]
        assert labels and all(t.get_window_extent().x1 <= inside.x1 for t in labels)
        assert all(t.get_window_extent().x0 >= inside.x0 for t in labels)


def test_points_that_stood_elsewhere_are_pale_with_an_arrow_to_where_they_stand() -> None:
    figure = trade_off({"gpipe": (16, 0.1875), "1f1b": (4, 0.1875)}, before={"gpipe": (8, 0.375), "gone": (99, 9.0)})
    arrows = [t for t in figure.axes[0].texts if getattr(t, "arrow_patch", None) is not None]
    assert [(t.xyann, t.xy) for t in arrows] == [((8, 37.5), (16, 18.75))]
    assert "before" in words(figure) and "before" not in words(trade_off({"gpipe": (8, 0.375)}))
    (axes,) = figure.axes
    assert 37.5 < axes.get_ylim()[1] < 900 and axes.get_xlim()[1] < 99, "axes for both, not for `gone`"


def test_beside_what_stood_elsewhere_each_halving_has_one_length_and_no_point_is_hidden() -> None:
    """ZB-H1 comes to stand where ZB-V stood: the pale point is larger than the one on it."""
    figure = trade_off({"zb_h1": (4, 0.0625), "zb_v": (4, 0.03125)}, before={"zb_h1": (4, 0.125), "zb_v": (4, 0.0625)})
    (axes,) = figure.axes
    high = [axes.transData.transform((4, bubble))[1] for bubble in (12.5, 6.25, 3.125)]
    assert high[0] - high[1] == pytest.approx(high[1] - high[2])
    sizes = [line.get_markersize() for line in axes.lines if line.get_ydata().tolist() == [6.25]]
    assert len(sizes) == 2 and sizes[0] > 1.5 * sizes[1]


def test_colours_are_those_of_f_and_b() -> None:
    found = boxes(planned_and_done(events(), [dataclasses.replace(e) for e in events()]))
    assert len({b.get_facecolor() for b in found}) == 2 == len({WORK[name] for name in "FB"})
