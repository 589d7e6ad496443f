"""Who did what when: one row of bars a rank, computation above communication, predicted above measured.

A bar is a `trace.Event`. Events of one kind that overlap (two buckets under way at once) get rows of their own, so
nothing hides behind anything. What matters on such a picture is how much communication is covered by computation,
so that share is measured (`hidden_share`) and written beside each rank.

`chrome_trace` writes the same events for Perfetto or chrome://tracing, where one can zoom.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minimegatron.errors import ConfigError
from minimegatron.trace import Event
from minimegatron.viz.picture import INK, PALETTE, box, colours, hatch, new_figure, scaled, styled

KINDS = ("compute", "comm", "wait", "memory", "mark")
UNITS = ("µs", "ms", "s")
Look = tuple[str, str]  # colour, hatch
_LOOKS: dict[str, Look] = {
    "compute": (PALETTE[0], ""),
    "comm": (PALETTE[7], ""),
    "wait": ("#ffffff", "///"),
    "memory": (PALETTE[4], "..."),
    "mark": (INK, ""),
}


def gantt(
    measured: Sequence[Event],
    predicted: Sequence[Event] = (),
    *,
    by: str = "kind",
    labels: bool = True,
    title: str = "",
) -> Figure:
    """The events of one or several ranks on one time axis.

    Args:
        measured: events of any ranks; the clock starts at the first.
        predicted: what was expected, drawn above on the same scale, its clock starting at its own first event.
        by: "kind" colours computation, communication and waiting; "name" every name (F, B, W of a pipeline).
        labels: write an event's name (and its note) into its bar where there is room.
        title: above the picture.

    Raises:
        ConfigError: there is no event at all, or `by` is neither of the two.
    """
    panels = [(name, _shifted(events)) for name, events in (("predicted", predicted), ("measured", measured)) if events]
    if not panels:
        fix = "record some: with trace.record(rank) as log: ...; then pass log.events"
        raise ConfigError("a timeline without events", fix=fix)
    if by not in ("kind", "name"):
        raise ConfigError(f"by={by!r}", fix="colour by kind or by name")
    everything = [e for _, events in panels for e in events]
    horizon = max(e.end for e in everything) or 1e-6
    styles = _styles(everything, by)
    lanes = [_lanes(events) for _, events in panels]
    heights = [sum(map(len, table.values())) + 0.4 * len(table) for table in lanes]
    with styled():
        figure = new_figure(9.0, 0.9 + 0.3 * sum(heights) + 0.45 * len(panels), title)
        grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
        for axes, (name, events), table in zip(grid, panels, lanes, strict=True):
            _draw_panel(axes, events, table, horizon, lambda e: styles[e.kind if by == "kind" else e.name], labels)
            if len(panels) > 1:
                axes.set_title(name, loc="left")
        grid[-1].set_xlabel(f"time in {scaled(horizon * 1e6, UNITS, 1000)[1]}")
        handles = [
            Patch(facecolor=c, hatch=h, edgecolor=INK, linewidth=0.5, label=key) for key, (c, h) in styles.items()
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(8, len(handles)))
    return figure


def hidden_share(events: Sequence[Event]) -> float:
    """The share of one rank's communication time during which it also computed, 0 to 1; 0 without communication."""
    compute = _union([e for e in events if e.kind == "compute"])
    comm = _union([e for e in events if e.kind == "comm"])
    total = sum(stop - start for start, stop in comm)
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in comm for c, d in compute)
    return both / total if total > 0 else 0.0


def chrome_trace(events: Sequence[Event], path: str | Path, predicted: Sequence[Event] = ()) -> Path:
    """Write the events in Chrome's trace format (JSON) for Perfetto: a process a rank, a thread a kind, times in µs.

    Args:
        predicted: what was expected: more processes, `rank 0, predicted` and so on, their clock starting with the
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
    """A bar, or an instant where the event has no length."""
    args = {"axis": e.axis, "nbytes": e.nbytes, "size": e.size, "note": e.note}
    where = {"name": e.name, "cat": e.kind, "pid": process, "tid": _kind(e), "ts": (e.start - origin) * 1e6}
    shape = {"ph": "X", "dur": e.seconds * 1e6} if e.end > e.start else {"ph": "i", "s": "t"}
    return {**where, **shape, "args": args}


def _kind(event: Event) -> int:
    return KINDS.index(event.kind) if event.kind in KINDS else len(KINDS)


def _shifted(events: Sequence[Event]) -> list[Event]:
    """The same events with a clock that starts at the first of them."""
    origin = min(e.start for e in events)
    return [dataclasses.replace(e, start=e.start - origin, end=e.end - origin) for e in events]


def _lanes(events: Sequence[Event]) -> dict[int, list[list[Event]]]:
    """For each rank its rows of events of one kind that do not overlap: the first free row takes the next event."""
    table: dict[int, list[list[Event]]] = {}
    for event in sorted(events, key=lambda e: (e.rank, _kind(e), e.start, -e.end)):
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


def _union(events: Sequence[Event]) -> list[tuple[float, float]]:
    """The intervals covered by at least one event."""
    merged: list[tuple[float, float]] = []
    for e in sorted(events, key=lambda e: e.start):
        if merged and e.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], e.end))
        else:
            merged.append((e.start, e.end))
    return merged


def _styles(events: Sequence[Event], by: str) -> dict[str, Look]:
    """Colour and hatch of each kind or name that occurs."""
    if by == "kind":
        kinds = {e.kind: _kind(e) for e in events}
        return {kind: _LOOKS.get(kind, (PALETTE[2], "")) for kind in sorted(kinds, key=kinds.__getitem__)}
    names = list(dict.fromkeys(e.name for e in sorted(events, key=lambda e: e.start)))
    return {name: (colour, hatch(i)) for i, (name, colour) in enumerate(zip(names, colours(len(names)), strict=True))}


def _draw_panel(
    axes: Axes,
    events: Sequence[Event],
    lanes: dict[int, list[list[Event]]],
    horizon: float,
    look: Callable[[Event], Look],
    labels: bool,
) -> None:
    """All ranks of one panel, `horizon` seconds long; the time axis counts the unit that suits it."""
    per_second = 1e6 / scaled(horizon * 1e6, UNITS, 1000)[0]
    top, middles = 0.0, []
    for rank, rows in lanes.items():
        height = max(1, len(rows))
        for i, row in enumerate(rows):
            for event in row:
                colour, pattern = look(event)
                corner, size = (event.start * per_second, top + i), (event.seconds * per_second, 0.92)
                text = _fitting(event, horizon) if labels else ""
                box(axes, corner, size, colour, text, pattern=pattern, edge=INK, fontsize=7)
        for event in events:
            if event.rank == rank and event.seconds == 0:
                at = event.start * per_second
                axes.plot(
                    [at, at], [top - 0.1, top + height + 0.05], color=INK, linewidth=2, linestyle="-", clip_on=False
                )
        mine = [event for row in rows for event in row]
        if {"comm", "compute"} <= {event.kind for event in mine}:
            share = f"{hidden_share(mine):.0%} of comm.\nhidden"
            axes.text(horizon * per_second * 1.01, top + height / 2, share, ha="left", va="center", fontsize=8)
        middles.append(top + height / 2)
        top += height + 0.4
    axes.set_yticks(middles, [f"rank {rank}" for rank in lanes])
    axes.set_ylim(top - 0.3, -0.1)
    axes.set_xlim(0, horizon * per_second)
    axes.grid(axis="x", visible=True)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def _fitting(event: Event, horizon: float) -> str:
    """The event's name with its note, or one of the two: the first that its bar can hold at this size and font."""
    letters = int(137 * event.seconds / horizon)
    candidates = (f"{event.name} {event.note}".strip(), event.name, event.note)
    return next((text for text in candidates if len(text) <= letters), "")
