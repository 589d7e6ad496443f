"""Many events: rows as the first-fit rule says, and no more bars than pixels."""

import random

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from minimegatron.trace import Event
from minimegatron.viz.lanes import at_pixels, covered, lay_out, times
from minimegatron.viz.schedule import WIDTH, draw_schedule
from minimegatron.viz.timeline import KINDS, PIXELS, THIN, gantt, hidden_share
from tests.viz.reading import boxes


def some(n: int, seed: int, density: float = 1.0) -> list[Event]:
    draw = random.Random(seed)
    starts = [draw.uniform(0, n / density) for _ in range(n)]
    return [
        Event("F", draw.choice(("compute", "comm")), draw.randrange(2), t, t + draw.choice((0, draw.random())))
        for t in starts
    ]


def first_fit(events: list[Event]) -> dict[int, list[list[Event]]]:
    """The rule, event by event and row by row."""
    table: dict[int, list[list[Event]]] = {}
    for event in sorted(events, key=lambda e: (e.rank, KINDS.index(e.kind), e.start, -e.end)):
        rows = table.setdefault(event.rank, [])
        if event.seconds == 0:
            continue
        for row in rows:
            if row[-1].kind == event.kind and event.start >= row[-1].end - 1e-9:
                row.append(event)
                break
        else:
            rows.append([event])
    return table


@pytest.mark.parametrize("density", [0.3, 1.0, 20.0])
def test_rows_are_those_of_the_rule(density):
    events = some(300, seed=int(density * 10), density=density)
    got = lay_out(events, *times(events), KINDS)
    assert {rank: [[events[i] for i in row] for row in rows] for rank, rows in got.items()} == first_fit(events)


@pytest.mark.parametrize("density", [0.3, 1.0, 20.0])
def test_the_covered_time_is_that_of_a_fine_grid(density):
    start, end = times(some(200, seed=5, density=density))
    grid = np.linspace(0, end.max(), 200_001)
    inside = np.zeros(len(grid), bool)
    for a, b in zip(start, end, strict=True):
        inside |= (grid >= a) & (grid < b)
    assert covered(start, end) == pytest.approx(inside.mean() * end.max(), abs=300 * end.max() / 200_000)
    assert covered(start[:0], end[:0]) == 0


def test_what_is_hidden_is_that_of_a_fine_grid():
    events = [e for e in some(200, seed=6, density=2.0) if e.rank == 0]
    grid = np.linspace(0, max(e.end for e in events), 100_001)
    inside = {kind: np.zeros(len(grid), bool) for kind in ("comm", "compute")}
    for e in events:
        inside[e.kind] |= (grid >= e.start) & (grid < e.end)
    both = (inside["comm"] & inside["compute"]).sum() / inside["comm"].sum()
    assert hidden_share(events) == pytest.approx(both, abs=5e-3) and 0.05 < both < 0.95
    assert hidden_share([]) == 0


def test_narrow_bars_of_a_column_become_one_that_looks_like_the_longest():
    start = np.array([0.0, 0.1, 0.3, 1.0, 3.0, 3.2])
    end = np.array([0.1, 0.3, 0.35, 2.5, 3.1, 3.5])
    seen = at_pixels(start, end, 1.0)
    assert seen.start.tolist() == [0.0, 1.0, 3.0] and seen.end.tolist() == [0.35, 2.5, 3.5]
    assert seen.which.tolist() == [1, 3, 5] and seen.size.tolist() == [3, 1, 2] and seen.first.tolist() == [0, 3, 4]


def test_bars_of_a_pixel_and_more_stay_what_they_are():
    start = np.arange(50.0)
    seen = at_pixels(start, start + 1.0, 1.0)
    assert seen.which.tolist() == list(range(50)) and (seen.size == 1).all()


def drawn(figure) -> int:
    collections = [c for axes in figure.axes for c in axes.collections if isinstance(c, PolyCollection)]
    return len(boxes(figure)) + sum(len(c.get_paths()) for c in collections)


def test_a_picture_has_no_more_bars_than_pixels():
    n = 20_000
    events = [Event("FB"[i % 2], "compute", 0, float(i), i + 0.9) for i in range(n)]
    events += [Event("step", "mark", 0, float(i), float(i)) for i in range(n)]
    figure = gantt(events, by="name")
    assert PIXELS / 2 < drawn(figure) <= 2 * PIXELS
    (line,) = figure.axes[0].lines
    assert len(line.get_xdata()) <= 3 * (PIXELS + 2)
    share = [(e.start, e.end) for e in events if e.start < e.end]
    assert share[0][0] == 0 and figure.axes[0].get_xlim()[0] == 0


def test_thin_bars_lie_where_they_were():
    events = [Event("F", "compute", 0, 0.0, 1000.0), Event("B", "compute", 0, 1000.0, 1000.0 + THIN * 0.5)]
    figure = gantt(events)
    (thin,) = [c for c in figure.axes[0].collections if isinstance(c, PolyCollection)]
    corners = thin.get_paths()[0].vertices
    scale = boxes(figure)[0].get_width() / 1000.0
    assert corners[:, 0].min() == pytest.approx(1000.0 * scale) and corners[:, 0].max() == pytest.approx(1001.5 * scale)


def test_a_schedule_of_many_actions_has_no_more_bars_than_pixels():
    n = 20_000
    events = [Event("FB"[i % 2], "compute", r, 3 * i, 3 * i + 2, note=str(i)) for r in (0, 1) for i in range(n)]
    drawing = draw_schedule(events, [[i % 5 for i in range(n)]] * 2)
    assert drawing.svg.count("<rect") <= 2 * 2 * WIDTH + 1 and len(drawing.svg) < 1 << 20
    assert "actions</title>" in drawing.svg and "at most 4" in drawing.svg
    assert drawing.text.count("F0") == 2 and drawing.text.count(f"B{n - 1}") == 2, "the text names every action"
