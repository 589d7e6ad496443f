"""One rank's step with sharded weights: computation above, gathers and reduce-scatters below, and who waited for whom.

A gather begins while the unit before is computed and must have arrived when its own unit runs. What of it lies behind
computation is pale; dark is the end that nothing hides, during which the rank waits. The first gather of a step is
always dark, the others are where the network is slower than a unit.

    compute    | embedding |  unit 0   |  unit 1   |####wait###|  unit 2   |
    gathers  ##| [-- 0 ----]  [-- 1 ---]  [---- 2 ----########]
                                                       ^ exposed

Events come from `trace`: collectives, and the spans of kind `unit` (`parallel/data/units`)::

    with trace.record(rank) as log, units_in_trace(ddp):
        one step
    gather_timeline(log.events)
    gather_timelines({"with prefetch": log.events, "without": other.events})   # on one axis

A reduce-scatter's wait may lie inside of a unit's backward pass, where the trace cannot tell it from computation: only
of gathers is the dark part exact.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minimegatron.errors import ConfigError
from minimegatron.trace import Event
from minimegatron.viz.lanes import lay_out, times
from minimegatron.viz.picture import COMM, INK, PALETTE, PAPER, WORK, box, new_figure, scaled, styled

AXES = ("dp_cp", "edp")  # of the mesh: where weights and gradients are cut
PALE, SUMS, PALE_SUMS = "#d3dae6", PALETTE[4], "#f3dde5"
PASSES = {"forward": WORK["F"], "backward": WORK["B"]}
BETWEEN = 0.35  # rows


@dataclasses.dataclass(frozen=True)
class Gather:
    """The weights of a unit on their way.

    Attributes:
        unit: the first that ran after it had come; "" if none did.
        start, end: from its beginning to the moment when the rank had it, in seconds as the events have them.
        exposed: seconds at its end during which the rank computed nothing.
    """

    unit: str
    start: float
    end: float
    exposed: float


def gathers_of(events: Sequence[Event], axes: Sequence[str] = AXES) -> list[Gather]:
    """The gathers of weights of one rank, in the order in which they were waited for.

    Args:
        events: of one rank, with spans of kind `unit`.
        axes: of the mesh, over which weights are cut.
    """
    units = sorted((e for e in events if e.kind == "unit"), key=lambda e: e.start)
    found = []
    for event in sorted(_on(events, "all_gather", axes), key=lambda e: e.end):
        after = next((unit.note for unit in units if unit.start >= event.end), "")
        found.append(Gather(after, event.start, event.end, _tail(event, units)))
    return found


def gather_timeline(events: Sequence[Event], *, rank: int = 0, axes: Sequence[str] = AXES, title: str = "") -> Figure:
    """The lanes of one rank: of `events`, see `gather_timelines`."""
    return gather_timelines({"": events}, rank=rank, axes=axes, title=title)


def gather_timelines(
    runs: Mapping[str, Sequence[Event]], *, rank: int = 0, axes: Sequence[str] = AXES, title: str = ""
) -> Figure:
    """The lanes of one rank in several runs, one above the other on one axis, each from its own beginning.

    Args:
        runs: {name: events of any ranks}.
        rank: whose are drawn.
        axes: of the mesh, over which weights and gradients are cut.
        title: above the picture.

    Raises:
        ConfigError: in one of the runs this rank has no spans of units, or nothing was gathered.
    """
    drawn = {name: _lanes(events, rank, axes) for name, events in runs.items()}
    horizon = max(_seconds(lanes) for lanes in drawn.values())
    divisor, unit = scaled(horizon * 1e6, ("µs", "ms", "s"), 1000)
    rows = {name: {lane: _rows(of) for lane, of in lanes.items() if of} for name, lanes in drawn.items()}
    heights = [sum(len(of) + BETWEEN for of in lanes.values()) for lanes in rows.values()]
    with styled():
        figure = new_figure(9.6, 0.7 + sum(0.6 + 0.36 * height for height in heights), title)
        panels = figure.subplots(len(runs), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
        for panel, (name, lanes) in zip(panels, drawn.items(), strict=True):
            clock = _Clock(min(e.start for of in lanes.values() for e in of), 1e6 / divisor, 118 / horizon)
            _panel(panel, clock, lanes, rows[name])
            gathers = gathers_of([*lanes["compute"], *lanes["gathers"]], axes)
            waited, spent = (1e6 / divisor * s for s in (sum(g.exposed for g in gathers), _length(gathers)))
            said = f"{waited:.3g} {unit} in waits for gathers, which are {spent:.3g} {unit} under way"
            if name:
                panel.set_title(
                    f"{name}: {_seconds(lanes) * 1e6 / divisor:.3g} {unit}, of it {said}", fontsize=9, loc="left"
                )
            panel.set_xlim(-0.005 * horizon * clock.scale, 1.005 * horizon * clock.scale)
        panels[-1].set_xlabel(f"time in {unit}" + (f"; {said}" if not name else ""))
        looks = [("forward", WORK["F"]), ("backward", WORK["B"]), ("hidden gather", PALE), ("exposed gather", COMM)]
        sums = any(lanes["reduce-scatters"] for lanes in drawn.values())
        looks += [("hidden sum", PALE_SUMS), ("exposed sum", SUMS)] * sums
        handles = [Patch(facecolor=colour, edgecolor=INK, linewidth=0.6, label=text) for text, colour in looks]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    return figure


def _lanes(events: Sequence[Event], rank: int, axes: Sequence[str]) -> dict[str, list[Event]]:
    """What one rank's lanes hold; a gather bears the name of its unit."""
    mine = [e for e in events if e.rank == rank]
    units, gathered = [e for e in mine if e.kind == "unit"], gathers_of(mine, axes)
    if not units or not gathered:
        raise ConfigError(
            f"{len(units)} spans of units and {len(gathered)} gathers on rank {rank}",
            fix="with trace.record(rank) as log, units_in_trace(ddp): one step of ZeRO-3; then pass log.events",
        )
    gathers = [Event("all_gather", "comm", rank, g.start, g.end, axes[0], note=g.unit) for g in gathered]
    return {"compute": units, "gathers": gathers, "reduce-scatters": _on(mine, "reduce_scatter", axes)}


def _seconds(lanes: Mapping[str, Sequence[Event]]) -> float:
    shown = [event for of in lanes.values() for event in of]
    return max(e.end for e in shown) - min(e.start for e in shown)


def _panel(
    panel: Axes, clock: _Clock, lanes: Mapping[str, Sequence[Event]], rows: Mapping[str, Sequence[Sequence[Event]]]
) -> None:
    """One run's lanes."""
    top, middles = 0.0, []
    for name, of in rows.items():
        for i, row in enumerate(of):
            for event in row:
                exposed = _tail(event, lanes["compute"]) if name != "compute" else 0.0
                _draw(panel, clock, name, event, top + i, exposed)
        middles.append(top + len(of) / 2 - 0.04)
        top += len(of) + BETWEEN
    panel.set_yticks(middles, list(rows))
    panel.set_ylim(top - BETWEEN + 0.1, -0.15)
    panel.grid(axis="x", visible=True)
    panel.grid(axis="y", visible=False)
    panel.tick_params(axis="y", length=0)


@dataclasses.dataclass(frozen=True)
class _Clock:
    """Seconds to what the axis counts.

    Attributes:
        origin: of the picture.
        scale: per second.
        letters: that fit into a second.
    """

    origin: float
    scale: float
    letters: float


def _draw(axes: Axes, clock: _Clock, lane: str, event: Event, y: float, exposed: float) -> None:
    """A bar, its end dark if that was exposed, with the number of its unit."""
    x, width = (event.start - clock.origin) * clock.scale, event.seconds * clock.scale
    dark, pale = (COMM, PALE) if lane == "gathers" else (SUMS, PALE_SUMS)
    box(axes, (x, y), (width, 0.92), PASSES.get(event.name, PAPER) if lane == "compute" else pale, edge=INK)
    if exposed > 0:
        box(axes, (x + width - exposed * clock.scale, y), (exposed * clock.scale, 0.92), dark, edge=INK)
    shown = event.seconds - exposed
    words = (event.note, event.note.removeprefix("unit ")) if lane != "reduce-scatters" else ()
    text = next((w for w in words if w and len(w) + 0.5 < shown * clock.letters), "")
    axes.text(x + shown * clock.scale / 2, y + 0.46, text, ha="center", va="center", fontsize=7, clip_on=True)


def _rows(lane: Sequence[Event]) -> list[list[Event]]:
    """Those that overlap stand in rows of their own."""
    same = [dataclasses.replace(e, kind="comm") for e in lane]
    start, end = times(same)
    return [[lane[i] for i in row.tolist()] for row in lay_out(same, start, end, ("comm",))[lane[0].rank]]


def _on(events: Sequence[Event], name: str, axes: Sequence[str]) -> list[Event]:
    return [e for e in events if e.kind == "comm" and e.name == name and e.axis in axes]


def _tail(event: Event, units: Sequence[Event]) -> float:
    """Seconds from the end of the last unit that ran, or the event's own beginning, to the end of the event."""
    if any(unit.start < event.end < unit.end for unit in units):
        return 0.0
    return event.end - max([event.start, *(unit.end for unit in units if unit.end <= event.end)])


def _length(gathered: Sequence[Gather]) -> float:
    return sum(g.end - g.start for g in gathered)
