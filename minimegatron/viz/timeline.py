"""Timelines: rows of bars for each rank, computation above communication, predicted above measured.

A bar is a `trace.Event`. Events of one kind that overlap (two buckets in flight) get rows of their own. The share of
communication that computation hides (`hidden_share`) is written beside each rank.

A run of an hour has a million events and a picture a thousand columns of pixels, so bars that cover each other are
never drawn: `lay_out` gives every event a row (those of one kind that overlap get rows of their own, the first free row
takes the next), and `at_pixels` joins neighbours that are narrower than a pixel into one bar, which looks like the
longest of them. Both are numpy over whole columns: a million events take seconds.

`chrome_trace` writes the same events for Perfetto or chrome://tracing, where one can zoom.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from minimegatron.errors import ConfigError
from minimegatron.trace import Event
from minimegatron.viz.picture import (
    COMM,
    COMPUTE,
    INK,
    PALETTE,
    PREDICTED_LINE,
    SECONDS,
    WORK,
    box,
    colours,
    hatch,
    legend,
    new_figure,
    rows_of_bars,
    sample,
    scaled,
    styled,
)

KINDS = ("compute", "comm", "wait", "memory", "mark")
BAR = 0.92  # of a row's height
PIXELS, THIN = 1000, 3  # of the whole width of a picture; below how many of them a bar is drawn with others of its look
Look = tuple[str, str]  # colour, hatch
SAID = {"compute": "computation", "comm": "communication"}  # in the legend
LOOKS: dict[str, Look] = {
    "compute": (COMPUTE, ""),
    "comm": (COMM, ""),
    "wait": ("#ffffff", "///"),
    "memory": (PALETTE[4], "..."),
    "mark": (INK, ""),
}


def gantt(events: Sequence[Event], *, by: str = "kind", title: str = "") -> Figure:
    """The events of one or several ranks on one time axis; see `beside`."""
    return beside({"": events}, by=by, title=title)


def beside(
    runs: Mapping[str, Sequence[Event]],
    *,
    expected: Mapping[str, float] | None = None,
    by: str = "kind",
    labels: bool = True,
    title: str = "",
) -> Figure:
    """Several runs of the same program, or a plan and its run, one panel above the other on the time axis of the
    longest.

    Args:
        runs: {name: events of any ranks}; the clock of each starts at its first event.
        expected: {name: seconds}; a dashed line shows the predicted end of this run.
        by: "kind" colours computation, communication and waiting; "name" every name (F, B, W of a pipeline).
        labels: write an event's name (and its note) into its bar if there is room.
        title: above the picture.

    Raises:
        ConfigError: no event at all, an expected end of a run that is not there, or `by` is neither of the two.
    """
    panels = [(name, _Panel(events)) for name, events in runs.items() if events]
    if not panels:
        fix = "record some: with trace.record(rank) as log: ...; then pass log.events"
        raise ConfigError("a timeline without events", fix=fix)
    if by not in ("kind", "name"):
        raise ConfigError(f"by={by!r}", fix="colour by kind or by name")
    expected = expected or {}
    if strangers := sorted(set(expected) - {name for name, _ in panels}):
        raise ConfigError(f"an end is expected of {strangers[0]!r}, which has no events", fix="use the names of `runs`")
    horizon = max(*(float(panel.end.max()) for _, panel in panels), *expected.values(), 1e-6)
    styles = _styles([(e, t) for _, p in panels for e, t in zip(p.events, p.start.tolist(), strict=True)], by)
    heights = [sum(map(len, panel.rows.values())) + 0.4 * len(panel.rows) for _, panel in panels]
    with styled():
        figure = new_figure(9.0, 0.9 + 0.3 * sum(heights) + 0.45 * len(panels), title)
        grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
        for axes, (name, panel) in zip(grid, panels, strict=True):
            _draw_panel(axes, panel, horizon, lambda e: styles[e.kind if by == "kind" else e.name], labels)
            if len(panels) > 1:
                axes.set_title(name, loc="left")
            if name in expected:
                at = expected[name] * 1e6 / scaled(horizon * 1e6, SECONDS, 1000)[0]
                axes.axvline(at, label="predicted end", zorder=3, **PREDICTED_LINE)
        grid[-1].set_xlabel(f"time in {scaled(horizon * 1e6, SECONDS, 1000)[1]}")
        handles: list[Artist] = [sample(SAID.get(k, k), *look, linewidth=0.5) for k, look in styles.items()]
        if expected:
            handles.append(Line2D([], [], label="predicted end", **PREDICTED_LINE))
        legend(figure, handles, 8, fontsize=None)
    return figure


def hidden_share(events: Sequence[Event]) -> float:
    """The share of one rank's communication time during which it also computed, 0 to 1; 0 without communication."""
    return _hidden(*times(events), events) if events else 0.0


def chrome_trace(events: Sequence[Event], path: str | Path, predicted: Sequence[Event] = ()) -> Path:
    """Write the events in Chrome's trace format (JSON) for Perfetto: a process a rank, a thread a kind, times in µs.

    Args:
        predicted: predicted events, as further processes, `rank 0, predicted` and so on; their clock starts with the
            measured one.
    """
    records: list[dict[str, object]] = []
    first_process = 1 + max((e.rank for e in events), default=-1)
    for panel, offset, suffix in ((events, 0, ""), (predicted, first_process, ", predicted")):
        origin = min((e.start for e in panel), default=0.0)
        for rank in sorted({e.rank for e in panel}):
            records += _processes([e for e in panel if e.rank == rank], rank + offset, f"rank {rank}{suffix}")
        records += [_record(e, origin, e.rank + offset) for e in panel]
    path = Path(path)
    path.write_text(json.dumps({"traceEvents": records, "displayTimeUnit": "ms"}))
    return path


# ------------------------------------------------------------------------------------------------------------


def _processes(events: Sequence[Event], process: int, name: str) -> list[dict[str, object]]:
    """The names of one rank's process and of its threads, one per kind of event that occurs."""
    kinds = [k for k in KINDS if any(e.kind == k for e in events)]
    threads = [
        {"name": "thread_name", "ph": "M", "pid": process, "tid": KINDS.index(k), "args": {"name": k}} for k in kinds
    ]
    return [{"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}, *threads]


def _record(e: Event, origin: float, process: int) -> dict[str, object]:
    """A bar, or an instant if the event has no length."""
    args = {"axis": e.axis, "nbytes": e.nbytes, "size": e.size, "note": e.note}
    where = {"name": e.name, "cat": e.kind, "pid": process, "tid": _kind(e), "ts": (e.start - origin) * 1e6}
    shape = {"ph": "X", "dur": e.seconds * 1e6} if e.end > e.start else {"ph": "i", "s": "t"}
    return {**where, **shape, "args": args}


def _kind(event: Event) -> int:
    return KINDS.index(event.kind) if event.kind in KINDS else len(KINDS)


class _Panel:
    """Events with a clock that starts at the first of them, and their rows."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events
        self.start, self.end = times(events)
        self.rows = lay_out(events, self.start, self.end, KINDS)

    def instants(self) -> dict[int, list[float]]:
        """For each rank the times of events without length."""
        found: dict[int, list[float]] = {}
        for i in np.flatnonzero(self.end == self.start).tolist():
            found.setdefault(self.events[i].rank, []).append(float(self.start[i]))
        return found


def _hidden(start: np.ndarray, end: np.ndarray, events: Sequence[Event]) -> float:
    """`hidden_share` of events with these times: |A and B| = |A| + |B| - |A or B|."""
    comm, compute = (np.fromiter((e.kind == k for e in events), bool, len(events)) for k in ("comm", "compute"))
    total, either = covered(start[comm], end[comm]), comm | compute
    both = total + covered(start[compute], end[compute]) - covered(start[either], end[either])
    return min(1.0, max(0.0, both / total)) if total > 0 else 0.0


def _styles(events: Sequence[tuple[Event, float]], by: str) -> dict[str, Look]:
    """Colour and hatch of each kind or name that occurs; events come with their time on the picture's clock."""
    if by == "kind":
        kinds = {e.kind: _kind(e) for e, _ in events}
        return {kind: LOOKS.get(kind, (PALETTE[2], "")) for kind in sorted(kinds, key=kinds.__getitem__)}
    names = list(dict.fromkeys(e.name for e, _ in sorted(events, key=lambda pair: pair[1])))
    other = [name for name in names if name not in WORK]
    found = {name: (colour, hatch(i)) for i, (name, colour) in enumerate(zip(other, colours(len(other)), strict=True))}
    return {name: found.get(name) or (WORK[name], "") for name in names}


def _draw_panel(axes: Axes, panel: _Panel, horizon: float, look: Callable[[Event], Look], labels: bool) -> None:
    """All ranks of one panel, `horizon` seconds long; the time axis counts the unit that suits it."""
    per_second, pixel = 1e6 / scaled(horizon * 1e6, SECONDS, 1000)[0], horizon / PIXELS
    top, middles, instants = 0.0, [], panel.instants()
    thin: dict[tuple[str, str, str], list[list[tuple[float, float]]]] = {}  # colour, hatch, edge -> corners
    for rank, rows in panel.rows.items():
        height = max(1, len(rows))
        for i, row in enumerate(rows):
            seen = at_pixels(panel.start[row], panel.end[row], pixel)
            columns = (row[seen.which], seen.start, seen.end, seen.size)
            for which, start, end, size in zip(*(column.tolist() for column in columns), strict=True):
                event = panel.events[which]
                x, width, y = start * per_second, (end - start) * per_second, top + i
                colour, pattern = look(event)
                if size > 1:  # a frame would be all one sees of it, and of its neighbours
                    one = _corners(x, y, max(width, pixel * per_second))
                    thin.setdefault((colour, pattern, "none"), []).append(one)
                    continue
                if end - start < THIN * pixel:
                    thin.setdefault((colour, pattern, INK), []).append(_corners(x, y, width))
                    continue
                text = _fitting(event, horizon) if labels else ""
                box(axes, (x, y), (width, BAR), colour, text, pattern=pattern, edge=INK, fontsize=7)
        _draw_instants(axes, instants.get(rank, []), (top - 0.1, top + height + 0.05), per_second, pixel)
        shown = np.concatenate(rows) if rows else np.array([], np.int64)
        events = [panel.events[i] for i in shown.tolist()]
        if {"comm", "compute"} <= {event.kind for event in events}:
            share = f"{_hidden(panel.start[shown], panel.end[shown], events):.0%} of communication\nhidden"
            axes.text(horizon * per_second * 1.03, top + height / 2, share, ha="left", va="center", fontsize=8)
        middles.append(top + height / 2)
        top += height + 0.4
    for (colour, pattern, edge), corners in thin.items():
        bars = PolyCollection(corners, facecolor=colour, edgecolor=edge, hatch=pattern, linewidth=0.6)
        axes.add_collection(bars, autolim=False)
    rows_of_bars(axes, [f"rank {rank}" for rank in panel.rows], middles)
    axes.set_ylim(top - 0.3, -0.1)
    axes.set_xlim(0, 1.02 * horizon * per_second)  # the last bar ends before the frame


def _draw_instants(
    axes: Axes, moments: list[float], span: tuple[float, float], per_second: float, pixel: float
) -> None:
    """Draw lines through a rank's rows for events without length, at most one a pixel."""
    if moments:
        at = np.array(moments) if len(moments) <= PIXELS else np.round(np.array(moments) / pixel) * pixel
        x = np.repeat(np.unique(at) * per_second, 3)
        y = np.tile([*span, np.nan], len(x) // 3)
        axes.plot(x, y, color=INK, linewidth=2, linestyle="-", clip_on=False)


def _corners(x: float, y: float, width: float) -> list[tuple[float, float]]:
    return [(x, y), (x + width, y), (x + width, y + BAR), (x, y + BAR)]


def _fitting(event: Event, horizon: float) -> str:
    """The longest text that fits into the event's bar: its name with its note, one of the two, or ""."""
    letters = int(137 * event.seconds / horizon)
    candidates = (f"{event.name} {event.note}".strip(), event.name, event.note)
    return next((text for text in candidates if len(text) <= letters), "")


# -------------------------------------------------------------------------------------------------- rows and pixels


TOUCH = 1e-9  # seconds by which an event may begin before the one before it in its row has ended


class Seen(NamedTuple):
    """Bars of a row that can be told apart.

    Attributes:
        start, end: of each bar.
        which: the event that each looks like, as a position in the row.
        first, size: the events behind a bar: `size` of the row's, from position `first` on.
    """

    start: np.ndarray
    end: np.ndarray
    which: np.ndarray
    first: np.ndarray
    size: np.ndarray


def times(events: Sequence[Event]) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends, the clock starting at the first event."""
    start = np.fromiter((e.start for e in events), float, len(events))
    end = np.fromiter((e.end for e in events), float, len(events))
    origin = start.min()
    return start - origin, end - origin


def lay_out(
    events: Sequence[Event], start: np.ndarray, end: np.ndarray, kinds: Sequence[str]
) -> dict[int, list[np.ndarray]]:
    """For each rank its rows, as indices of `events`: one kind a row, and events of a row do not overlap.

    Args:
        start, end: times of the events; those without length get no row.
        kinds: order of kinds; others follow.
    """
    ranks = np.fromiter((e.rank for e in events), np.int64, len(events))
    codes = {kind: i for i, kind in enumerate(kinds)}
    kind = np.fromiter((codes.setdefault(e.kind, len(codes)) for e in events), np.int64, len(events))
    table: dict[int, list[np.ndarray]] = {int(rank): [] for rank in np.unique(ranks)}
    order = np.lexsort((-end, start, kind, ranks))
    order = order[end[order] > start[order]]
    if order.size:
        new = np.diff(ranks[order]).astype(bool) | np.diff(kind[order]).astype(bool)
        for group in np.split(order, np.flatnonzero(new) + 1):
            table[int(ranks[group[0]])] += _rows(group, start[group], end[group])
    return table


def _rows(group: np.ndarray, start: np.ndarray, end: np.ndarray) -> list[np.ndarray]:
    """Distribute events, in the order of their starts, over rows: the first free row takes the next."""
    if (start[1:] >= end[:-1] - TOUCH).all():
        return [group]
    busy: list[tuple[float, int]] = []  # (end of its last bar, row)
    free: list[int] = []
    row = np.empty(len(group), np.int64)
    rows = 0
    for i, (begin, stop) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while busy and begin >= busy[0][0] - TOUCH:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            taken = heapq.heappop(free)
        else:
            taken, rows = rows, rows + 1
        row[i] = taken
        heapq.heappush(busy, (stop, taken))
    order = np.argsort(row, kind="stable")
    return np.split(group[order], np.flatnonzero(np.diff(row[order])) + 1)


def at_pixels(start: np.ndarray, end: np.ndarray, pixel: float) -> Seen:
    """The bars of one row, in the order of their starts, as far as pixels of this width distinguish them."""
    length = end - start
    narrow, column = length < pixel, np.floor(start / pixel)
    joins = narrow[1:] & narrow[:-1] & (column[1:] == column[:-1])
    first = np.concatenate(([0], np.flatnonzero(~joins) + 1))
    group = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(start))))
    longest_last = np.lexsort((-np.arange(len(start)), length, group))
    size = np.diff(np.append(first, len(start)))
    return Seen(start[first], np.maximum.reduceat(end, first), longest_last[first + size - 1], first, size)


def covered(start: np.ndarray, end: np.ndarray) -> float:
    """The time during which at least one of these events is under way."""
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    start, latest = start[order], np.maximum.accumulate(end[order])
    new = np.flatnonzero(start[1:] > latest[:-1]) + 1  # a gap before these
    firsts, lasts = np.concatenate(([0], new)), np.append(new - 1, len(start) - 1)
    return float((latest[lasts] - start[firsts]).sum())
