import pytest
from matplotlib.patches import Rectangle

from course.figures.pipelines import draw_deadlock, draw_messages, placements, planned_and_done, trade_off
from minimegatron.errors import ConfigError
from minimegatron.trace import Event
from tests.viz.reading import boxes, overlaps, words

STRAIGHT, ROUND, V = [[0], [1], [2]], [[0, 3], [1, 4], [2, 5]], [[0, 5], [1, 4], [2, 3]]


def arrows(axes):
    return [t for t in axes.texts if getattr(t, "arrow_patch", None) is not None]


def test_a_stage_stands_in_the_row_of_its_rank_and_a_line_leads_to_the_next():
    figure = placements({"straight": STRAIGHT, "round robin": ROUND, "V": V})
    for axes, placement in zip(figure.axes, (STRAIGHT, ROUND, V), strict=True):
        drawn = {int(b.get_x()): b for b in axes.patches if isinstance(b, Rectangle)}
        rank_of = {stage: rank for rank, row in enumerate(placement) for stage in row}
        assert {stage: round(b.get_y() + 0.34) for stage, b in drawn.items()} == rank_of
        lines = sorted((t.xyann[0], t.xyann[1], t.xy[1]) for t in arrows(axes))
        assert lines == [(s + 0.5, rank_of[s], rank_of[s + 1]) for s in range(len(rank_of) - 1)]
        first, last = drawn[placement[0][0]].get_facecolor(), drawn[placement[0][-1]].get_facecolor()
        assert len(placement[0]) == 1 or sum(last[:3]) < sum(first[:3]) - 0.5, "later chunks are darker"
    assert not overlaps(figure)


def test_what_a_deadlock_never_reaches_is_hatched_and_arrows_close_the_circle():
    figure = draw_deadlock([["F0", "B0", "F1"], ["F0", "F1", "B0"]], [1, 1], [(0, 1, 1, 2), (1, 1, 0, 2)])
    assert [b.get_hatch() or "" for b in boxes(figure)] == ["", "///", "///"] * 2
    down, up = arrows(figure.axes[0])
    assert [(int(a.xyann[0]), int(a.xy[0])) for a in (down, up)] == [(1, 2), (1, 2)]
    assert down.xyann[1] < down.xy[1] and up.xyann[1] > up.xy[1]
    assert {"done", "never reached", "waits for", "the rank stands here"} <= set(words(figure)) and not overlaps(figure)


def test_the_kth_message_goes_to_the_kth_receive_and_what_crossed_is_framed():
    figure = draw_messages(["F0.0", "B0.1", "F1.0"], ["F0.1", "F1.1", "B0.1"], ["F1.1", "B0.1"], 1, "crossed")
    assert [(a.xyann[0], a.xy[0]) for a in arrows(figure.axes[0])] == [(k + 0.4, k + 0.4) for k in range(3)]
    framed = [b for b in figure.axes[0].patches if isinstance(b, Rectangle) and not b.get_fill()]
    assert [round(b.get_x()) for b in framed] == [1, 2]
    assert {"rank 1 sends", "rank 0 posts", "B: a gradient", "crossed"} <= set(words(figure)) and not overlaps(figure)


def events(shift=0.0, stretch=1.0, chunk=""):
    plan = (("F", 0, 0, 1), ("B", 0, 4, 6), ("F", 1, 1, 2), ("B", 1, 2, 4))
    return [Event(n, "compute", r, shift + stretch * a, shift + stretch * b, note=f"0{chunk}") for n, r, a, b in plan]


def test_a_plan_and_a_run_stand_rank_by_rank_on_one_axis():
    figure = planned_and_done(events(), events(shift=7.0, stretch=1.5), "mine")
    planned, done = boxes(figure)[:4], boxes(figure)[4:]
    assert [b.get_x() for b in planned] == [0, 4000, 1000, 2000] and [b.get_x() for b in done] == [0, 6000, 1500, 3000]
    assert all(p.get_y() + p.get_height() == pytest.approx(d.get_y()) for p, d in zip(planned, done, strict=True))
    assert {line.get_xdata()[0] for line in figure.axes[0].lines} == {6000, 9000}
    assert {"planned: all done", "measured: all done", "F: forward", "B: backward"} <= set(words(figure))
    assert not overlaps(figure)
    dark = boxes(planned_and_done(events(chunk=".1"), events(chunk=".1")))
    assert sum(dark[0].get_facecolor()[:3]) < sum(planned[0].get_facecolor()[:3]) - 0.5


def test_each_schedule_is_a_point_and_equal_points_share_a_label():
    predicted = {"gpipe": (8, 0.375), "1f1b": (4, 0.375), "zb_v": (4, 0.0625), "again": (8, 0.375)}
    figure = trade_off(predicted, {"1f1b": (4, 0.45)}, "p=4")
    assert {"gpipe, again", "1f1b", "zb_v", "predicted", "measured", "p=4"} <= set(words(figure))
    places = {(*line.get_xdata(), *line.get_ydata()) for line in figure.axes[0].lines if len(line.get_xdata()) == 1}
    assert places == {(8, 37.5), (4, 37.5), (4, 6.25), (4, 45.0)} and not overlaps(figure)


def test_points_that_stood_elsewhere_are_pale_with_an_arrow_to_where_they_stand():
    before = {"gpipe": (8, 0.375), "1f1b": (4, 0.375), "zb_v": (4, 0.1875), "gone": (99, 9.0)}
    figure = trade_off({"gpipe": (16, 0.1875), "1f1b": (4, 0.1875), "zb_v": (4, 0.09375)}, before=before)
    (axes,) = figure.axes
    assert sorted((t.xyann, t.xy) for t in arrows(axes)) == [
        ((4, 18.75), (4, 9.375)), ((4, 37.5), (4, 18.75)), ((8, 37.5), (16, 18.75)),
    ]  # fmt: skip
    high = [axes.transData.transform((4, bubble))[1] for bubble in (37.5, 18.75, 9.375)]
    assert high[0] - high[1] == pytest.approx(high[1] - high[2]), "a halving is one length"
    assert axes.get_xlim()[1] < 99 and "before" in words(figure) and not overlaps(figure), "axes without `gone`"


@pytest.mark.parametrize(("draw", "message"), [
    (lambda: placements({"torn": [[0], [2]]}), r"\[0, 2\]"),
    (lambda: placements({}), "no placement"),
    (lambda: draw_deadlock([["F0"]], [1], []), "no rank waits"),
    (lambda: draw_messages(["F0.0"], [], [], 1), "1 sends for 0 receives"),
    (lambda: planned_and_done([], events()), "0 events planned, 4 done"),
    (lambda: trade_off({"gpipe": (8, 0.375)}, {"zb_v": (4, 0.1)}), "zb_v"),
])  # fmt: skip
def test_mistakes_are_named(draw, message):
    with pytest.raises(ConfigError, match=message):
        draw()
