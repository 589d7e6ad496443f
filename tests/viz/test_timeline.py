import json
import random

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from minimegatron import trace
from minimegatron.errors import ConfigError
from minimegatron.trace import Event
from minimegatron.viz.timeline import (
    KINDS,
    PIXELS,
    at_pixels,
    beside,
    chrome_trace,
    gantt,
    hidden_share,
    lay_out,
    times,
)
from tests.viz.reading import boxes, overlaps, words


def compute(start, end, rank=0, note=""):
    return Event("backward", "compute", rank, start, end, note=note)


def comm(start, end, rank=0, note=""):
    return Event("all_reduce", "comm", rank, start, end, axis="dp", nbytes=4096, size=2, note=note)


def test_hidden_share_counts_covered_time_once():
    assert hidden_share([compute(0, 10), comm(2, 4), comm(8, 12)]) == pytest.approx(4 / 6)
    assert hidden_share([compute(0, 1), comm(1, 3)]) == 0
    assert hidden_share([compute(0, 9), compute(2, 3), comm(1, 3), comm(2, 4)]) == 1, "nested and parallel"
    assert hidden_share([compute(0, 1)]) == 0


def test_predicted_stands_above_measured_on_one_scale():
    measured = [compute(100.0, 100.004, r, "layer 1") for r in (0, 1)] + [comm(100.002, 100.006, r) for r in (0, 1)]
    predicted = [compute(0, 0.003), comm(0.001, 0.004)]
    figure = beside({"predicted": predicted, "measured": measured}, title="step")
    assert [a.get_title(loc="left") for a in figure.axes] == ["predicted", "measured"]
    assert figure.axes[0].get_xlim() == figure.axes[1].get_xlim() == pytest.approx((0, 6 * 1.02))
    assert figure.axes[1].get_xlabel() == "time in ms"
    widths = [(round(b.get_x(), 6), round(b.get_width(), 6)) for b in boxes(figure)]
    assert widths == [(0, 3), (1, 3), (0, 4), (2, 4), (0, 4), (2, 4)]
    assert "50% of communication\nhidden" in words(figure)
    assert "backward layer 1" in words(figure)
    assert not overlaps(figure)


def test_an_instant_is_a_line_not_a_bar():
    figure = gantt([compute(0, 2), Event("step", "mark", 0, 1, 1)])
    assert len(boxes(figure)) == 1
    assert [line.get_xdata()[0] for line in figure.axes[0].lines] == [1]


def test_chrome_trace_keeps_every_event(tmp_path):
    with trace.record(3) as log:
        with trace.span("forward", note="layer 0"):
            trace.emit("all_reduce", "comm", 5.0, 5.5, axis="tp", nbytes=1024, size=4)
        trace.emit("step", "mark", 6.0, 6.0)
    file = chrome_trace(log.events, tmp_path / "trace.json")
    records = json.loads(file.read_text())["traceEvents"]
    assert [r["args"]["name"] for r in records if r["ph"] == "M"] == ["rank 3", "compute", "comm", "mark"]
    bars = {r["name"]: r for r in records if r["ph"] != "M"}
    assert bars["all_reduce"]["dur"] == pytest.approx(5e5)
    assert bars["all_reduce"]["args"] == {"axis": "tp", "nbytes": 1024, "size": 4, "note": ""}
    assert bars["step"]["ph"] == "i" and min(r["ts"] for r in bars.values()) == 0
    assert {r["pid"] for r in records} == {3}


def test_mistakes_are_named():
    with pytest.raises(ConfigError, match="without events"):
        gantt([])
    with pytest.raises(ConfigError, match="by='rank'"):
        gantt([compute(0, 1)], by="rank")


def test_predicted_and_measured_go_into_one_chrome_trace(tmp_path):
    measured = [compute(100.0, 100.5, rank) for rank in (0, 1)]
    predicted = [compute(0.0, 0.4, rank) for rank in (0, 1)]
    records = json.loads(chrome_trace(measured, tmp_path / "t.json", predicted).read_text())["traceEvents"]
    names = {r["pid"]: r["args"]["name"] for r in records if r["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 0, predicted", 3: "rank 1, predicted"}
    bars = {r["pid"]: (r["ts"], r["dur"]) for r in records if r["ph"] == "X"}
    assert bars[0] == bars[1] == pytest.approx((0, 5e5))
    assert bars[2] == bars[3] == pytest.approx((0, 4e5)), "both clocks start at zero"


def test_two_runs_share_one_axis_and_show_where_each_was_expected_to_end():
    slow = [compute(10, 12), comm(12, 14)]
    fast = [compute(50, 52), comm(51, 53)]
    figure = beside({"one after the other": slow, "overlapped": fast}, expected={"overlapped": 2.5})
    upper, lower = figure.axes
    assert [a.get_title(loc="left") for a in figure.axes] == ["one after the other", "overlapped"]
    assert upper.get_xlim() == lower.get_xlim() == pytest.approx((0, 4 * 1.02))
    assert [line.get_xdata()[0] for line in lower.lines] == [2.5] and not upper.lines
    assert "predicted end" in words(figure) and not overlaps(figure)
    assert [w for w in words(figure) if "hidden" in w] == [
        "0% of communication\nhidden",
        "50% of communication\nhidden",
    ]


def test_an_expected_end_of_no_run_is_refused():
    with pytest.raises(ConfigError, match="'fast', which has no events"):
        beside({"slow": [compute(0, 1)]}, expected={"fast": 1.0})


# ----------------------------------------------------------------------------------------------- many events


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


@pytest.mark.parametrize("density", [1.0, 20.0])
def test_rows_are_those_of_the_rule(density):
    events = some(300, seed=int(density * 10), density=density)
    got = lay_out(events, *times(events), KINDS)
    assert {rank: [[events[i] for i in row] for row in rows] for rank, rows in got.items()} == first_fit(events)


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
