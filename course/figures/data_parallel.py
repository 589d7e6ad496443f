"""Drawings of lab 06: the stages of ZeRO, a flat buffer with its buckets, gathers hidden and waited for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError
from minimegatron.trace import Event
from minimegatron.viz.memory import OWNERS
from minimegatron.viz.picture import (
    BYTES,
    COMM,
    FAINT,
    INK,
    PALETTE,
    PAPER,
    PREDICTED,
    SECONDS,
    WORK,
    Picture,
    box,
    hatch,
    legend,
    new_figure,
    rank_colours,
    rows_of_bars,
    sample,
    scaled,
    styled,
)
from minimegatron.viz.timeline import lay_out, times

if TYPE_CHECKING:
    from minimegatron.parallel.data.buckets import BufferLayout, Span

# --------------------------------------------------------------------------------------------------- the stages of ZeRO
# `stage_grid`: the memory of each rank in each stage. All parameters of the model lie from left to right, the bytes
# of one parameter from top to bottom, so areas are bytes. Hatched is what every rank holds whole. Where a stage
# shards a kind of state, a rank has its slice in its colour, and a dotted frame shows what other ranks hold.
#
# `stage_bars`: bytes of one rank by owner, predicted (hatched) beside measured, a pair of bars for each stage.
#
# Rajbhandari et al. 2020 (arXiv 1910.02054), figure 1.

# From which stage on a rank keeps 1/D of it; the bytes of a parameter with bf16 weights and gradients, and AdamW's
# fp32 weights and two moments.
SHARED_FROM = {"weights": 3, "gradients": 2, "optimizer state": 1}
ADAM = {"weights": 2, "gradients": 2, "optimizer state": 12}


def stage_grid(ranks: int = 4) -> Picture:
    """Draw stages 0 to 3 from the top, ranks, over which states are sharded, from the left.

    Raises:
        ConfigError: fewer than two ranks.
    """
    if ranks < 2:
        raise ConfigError(f"stages on {ranks} ranks", fix="two ranks or more")
    palette, height = rank_colours(ranks), sum(ADAM.values())
    with styled():
        figure = new_figure(1.7 * ranks + 2.3, 4 * 1.15 + 0.9)
        for stage, row in enumerate(figure.subplots(4, ranks, squeeze=False)):
            for rank, axes in enumerate(row):
                _cell(axes, stage, rank, ranks, palette[rank])
                if stage == 0:
                    axes.set_title(f"rank {rank}")
            row[0].text(-0.74, height / 2, f"stage {stage}", ha="right", va="center", weight="bold")
            _kinds(row[0])
        looks = [("whole on every rank", PAPER, "//"), *((f"slice of rank {r}", palette[r], "") for r in range(ranks))]
        handles = [sample(*look) for look in looks]
        legend(figure, handles, 5)
    return figure


def _cell(axes: Axes, stage: int, rank: int, ranks: int, colour: str) -> None:
    """Draw what one rank keeps in one stage."""
    top, most = 0.0, sum(ADAM.values())
    for kind, height in ADAM.items():
        if stage >= SHARED_FROM[kind]:
            frame = {"facecolor": "none", "edgecolor": FAINT, "linestyle": ":", "linewidth": 0.8}
            axes.add_patch(Rectangle((0, top), 1, height, **frame))  # type: ignore[arg-type]
            box(axes, (rank / ranks, top), (1 / ranks, height), colour, edge=INK, pattern=hatch(rank))
        else:
            box(axes, (0, top), (1, height), PAPER, edge=INK, pattern="//")
        top += height
    axes.set_xlim(-0.01, 1.01)
    axes.set_ylim(1.02 * most, -0.02 * most)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_axis_off()


def _kinds(axes: Axes) -> None:
    """Name the kinds of state from top to bottom, at the left of a row."""
    top = 0.0
    for kind, height in ADAM.items():
        axes.text(-0.04, top + height / 2, f"{kind}: {height}", ha="right", va="center", fontsize=7)
        top += height


def stage_bars(
    predicted: Mapping[str, Mapping[str, float]],
    measured: Mapping[str, Mapping[str, float]] | None = None,
    *,
    capacity: float | None = None,
    binary: bool = True,
    title: str = "",
) -> Picture:
    """Draw bytes of one rank, a pair of bars for each stage: predicted on the left, measured on the right.

    Args:
        predicted: {stage: {owner: bytes}}.
        measured: the same, counted; None draws the prediction alone.
        capacity: bytes of a GPU, as a dashed line.
        binary: MiB and GiB; else MB and GB.
        title: above the picture.

    Raises:
        ConfigError: nothing to draw, or other stages measured than predicted.
    """
    if not predicted or (measured is not None and measured.keys() != predicted.keys()):
        raise ConfigError(
            f"predicted {list(predicted)}, measured {list(measured or {})}", fix="the same stages in both, at least one"
        )
    sides = [predicted] if measured is None else [predicted, measured]
    most = max([capacity or 0.0, *(sum(bar.values()) for side in sides for bar in side.values())])
    units = BYTES if binary else ("B", "kB", "MB", "GB", "TB")
    divisor, unit = scaled(most, units, 1024 if binary else 1000)
    present = {owner for side in sides for bar in side.values() for owner in bar}
    owners = [owner for owner in OWNERS if owner in present] + sorted(present - OWNERS.keys())
    with styled():
        figure = new_figure(2.6 + 1.5 * len(predicted), 3.9, title)
        axes = figure.subplots()
        width = 0.4 if measured is not None else 0.55
        for i, stage in enumerate(predicted):
            for j, side in enumerate(sides):
                x = i + (j - (len(sides) - 1) / 2) * (width + 0.03)
                pattern = PREDICTED[1] if j == 0 else ""
                _bar(axes, x, width, {o: side[stage].get(o, 0.0) / divisor for o in owners}, pattern)
                total = sum(side[stage].values())
                axes.text(x, total / divisor + 0.025 * most / divisor, _short(total / divisor), ha="center", fontsize=8,
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8})  # fmt: skip
        if capacity is not None:
            axes.axhline(capacity / divisor, color=INK, linestyle="--", linewidth=1.2)
        axes.set_xticks(range(len(predicted)), list(predicted))
        axes.set_xlim(-0.6, len(predicted) - 0.4)
        axes.set_ylim(0, most / divisor * 1.12)
        axes.set_ylabel(f"{unit} on one rank")
        axes.grid(visible=False, axis="x")
        looks = [*((o, OWNERS.get(o, "white"), "") for o in owners), ("predicted", "white", PREDICTED[1])]
        looks += [("measured", "white", "")] * (measured is not None)
        handles: list[Artist] = [sample(*look, linewidth=0.5) for look in looks]
        if capacity is not None:
            text = f"a GPU has {_short(capacity / divisor)} {unit}"
            handles.append(Line2D([], [], color=INK, linestyle="--", linewidth=1.2, label=text))
        legend(figure, handles, 4)
    return figure


def _bar(axes: Axes, x: float, width: float, parts: Mapping[str, float], pattern: str) -> None:
    bottom = 0.0
    for owner, amount in parts.items():
        if amount:
            look = {"color": OWNERS.get(owner, "white"), "edgecolor": INK, "linewidth": 0.5, "hatch": pattern}
            axes.bar(x, amount, width, bottom=bottom, **look)  # type: ignore[arg-type]
            bottom += amount


def _short(amount: float) -> str:
    """A number with three digits, or with all digits from a thousand on."""
    return f"{amount:.3g}" if amount < 1000 else f"{amount:,.0f}"


# -------------------------------------------------------------------------------------------------------- a flat buffer
# The buffer as a strip, drawn to scale. The colour of a piece is that of the rank that owns it
# (`parallel/data/buckets`: an equal part of every bucket, wherever parameters begin and end); hatched is padding. The
# name of a parameter that a shard's border cuts is bold.
#
#     name          w2          b2      w1
#     strip     [aaaaaaabbbb][bb]//[aaaaaaaaaabbbbbb]//
#     shards     rank 0 |rank 1     rank 0   | rank 1
#     buckets    |--- bucket 0 ---||---- bucket 1 ----|

WIDTH, LETTER, LINE = 9.5, 0.075, 0.16  # inches: of the strip, of a letter, between names that stand side by side


def buffer_strip(layout: BufferLayout, names: Sequence[str] = (), *, title: str = "") -> Picture:
    """Draw the buffer from its first element to its last.

    Args:
        layout: the places of parameters, buckets and shards.
        names: of the parameters in the order of registration; default their numbers.
        title: above the picture.

    Raises:
        ConfigError: an empty buffer, or not one name for each parameter.
    """
    names = list(names) or [str(i) for i in range(len(layout.params))]
    if not layout.total or len(names) != len(layout.params):
        raise ConfigError(
            f"{len(names)} names for {len(layout.params)} parameters in {layout.total} elements",
            fix="give one name for each parameter of a buffer that has some",
        )
    longest = max(
        (len(name) for name, place in zip(names, layout.params, strict=True) if not _fits(name, place, layout)),
        default=0,
    )  # fmt: skip  of those above the strip
    with styled():
        figure = new_figure(WIDTH + 0.6, 1.9 + LETTER * longest, title)
        axes = figure.subplots()
        _strip(axes, layout)
        _names(axes, layout, names)
        _buckets(axes, layout)
        axes.set_xlim(-0.004 * layout.total, 1.004 * layout.total)
        axes.set_ylim(-1.0, 1.35 + 0.95 * LETTER * longest)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_axis_off()
        looks = [(f"owned by rank {r}", c, hatch(r)) for r, c in enumerate(rank_colours(layout.shards or 0))]
        looks += [("on every rank", PAPER, "")] * (layout.shards is None)
        looks += [("padding", "white", "////")] * bool(gaps(layout))
        handles = [sample(*look) for look in looks]
        if straddling(layout):
            handles.append(sample("bold: on several ranks", "none", edgecolor="none"))
        legend(figure, handles, 8)
    return figure


def gaps(layout: BufferLayout) -> list[tuple[int, int]]:
    """The elements that belong to no parameter, as [start, stop)."""
    places = sorted((span.start, span.stop) for span in layout.params)
    ends = [0, *(stop for _, stop in places)]
    starts = [*(start for start, _ in places), layout.total]
    return [(a, b) for a, b in zip(ends, starts, strict=True) if a < b]


def straddling(layout: BufferLayout) -> set[int]:
    """The parameters that no rank owns whole, by their place in the order of registration."""
    owners: dict[int, int] = {}
    for rank in range(layout.shards or 0):
        for piece in layout.pieces(rank):
            owners[piece.param] = owners.get(piece.param, 0) + 1
    return {param for param, count in owners.items() if count > 1}


def _strip(axes: Axes, layout: BufferLayout) -> None:
    """Draw pieces in the colours of their owners, frames of the parameters, padding."""
    if layout.shards is None:
        pieces = [(place, PAPER, "") for place in layout.params]
    else:
        palette = rank_colours(layout.shards)
        pieces = [(p.of_buffer, palette[r], hatch(r)) for r in range(layout.shards) for p in layout.pieces(r)]
    for place, colour, pattern in pieces:
        look = {"facecolor": colour, "hatch": pattern, "edgecolor": FAINT, "linewidth": 0.4}
        axes.add_patch(Rectangle((place.start, 0), place.size, 1, **look))  # type: ignore[arg-type]
    for start, stop in gaps(layout):
        look = {"facecolor": "white", "hatch": "////", "edgecolor": FAINT, "linewidth": 0.0}
        axes.add_patch(Rectangle((start, 0), stop - start, 1, **look))  # type: ignore[arg-type]
    for place in layout.params:
        axes.add_patch(Rectangle((place.start, 0), place.size, 1, fill=False, edgecolor=INK, linewidth=0.9))


def _fits(name: str, place: Span, layout: BufferLayout) -> bool:
    """Whether the name fits into its box."""
    return place.size * WIDTH / layout.total > LETTER * len(name) + 0.25


def _names(axes: Axes, layout: BufferLayout, names: Sequence[str]) -> None:
    """Write each name in its box where it fits, else above, upright, with a line to its box."""
    per_inch, cut = layout.total / WIDTH, straddling(layout)
    above = []
    for i, place in sorted(enumerate(layout.params), key=lambda item: item[1].start):
        weight = "bold" if i in cut else "normal"
        if _fits(names[i], place, layout):
            patch = {"facecolor": "white", "edgecolor": "none", "pad": 1.2, "alpha": 0.85}
            middle = (place.start + place.stop) / 2
            axes.text(middle, 0.5, names[i], ha="center", va="center", fontsize=8, weight=weight, bbox=patch)
        else:
            above.append(((place.start + place.stop) / 2, names[i], weight))
    places = _spread([middle for middle, _, _ in above], LINE * per_inch, layout.total)
    for at, (middle, text, weight) in zip(places, above, strict=True):
        axes.plot([middle, middle, at], [1.0, 1.08, 1.26], color=FAINT, linewidth=0.7, linestyle="-")
        axes.text(at, 1.3, text, ha="center", va="bottom", rotation=90, fontsize=8, weight=weight)


def _spread(wanted: Sequence[float], least: float, total: float) -> list[float]:
    """Move places apart to the least distance, in the same order, near the wanted places."""
    places: list[float] = []
    for at in wanted:
        places.append(max(at, places[-1] + least) if places else at)
    limit = total
    for i in reversed(range(len(places))):
        places[i] = min(places[i], limit)
        limit = places[i] - least
    return places


def _buckets(axes: Axes, layout: BufferLayout) -> None:
    """Name shards and buckets below the strip; the border of a bucket crosses the whole strip."""
    per_inch = layout.total / WIDTH
    for number, bucket in enumerate(layout.buckets):
        span = bucket.span
        for edge in (span.start, span.stop):
            axes.plot([edge, edge], [-0.95, 1.0], color=INK, linewidth=2.0, linestyle="-", solid_capstyle="butt")
        for rank in range(layout.shards or 0):
            shard = bucket.shard(rank, layout.shards or 1)
            if rank:
                axes.plot([shard.start] * 2, [-0.35, 1.0], color=INK, linewidth=1.2, linestyle="--")
            room = shard.size / per_inch
            text = next((text for text in (f"rank {rank}", str(rank)) if len(text) * LETTER + 0.06 < room), "")
            axes.text((shard.start + shard.stop) / 2, -0.2, text, ha="center", va="center", fontsize=8)
        for text in (f"bucket {number}: {span.size:,} elements", f"bucket {number}", str(number)):
            if len(text) * LETTER + 0.1 < span.size / per_inch:
                middle = (span.start + span.stop) / 2
                axes.text(middle, -0.68, text, ha="center", va="center", fontsize=8, style="italic")
                break


# ------------------------------------------------------------------------------------------------------- gathers on use
# One rank's step with sharded weights: computation above, all-gathers and reduce-scatters below. A gather begins while
# the unit before is computed and must have arrived when its own unit runs. The part that computation hides is pale; the
# dark end is exposed: the rank waits. The first gather of a step is always exposed, the others where the network is
# slower than a unit.
#
#     compute    | embedding |  unit 0   |  unit 1   |####wait###|  unit 2   |
#     gathers  ##| [-- 0 ----]  [-- 1 ---]  [---- 2 ----########]
#                                                        ^ exposed
#
# Events come from `trace`: collectives, and the spans of kind `unit` (`parallel/data/units`)::
#
#     with trace.record(rank) as log, units_in_trace(ddp):
#         one step
#     gather_timelines({"with prefetch": log.events, "without": other.events})   # on one axis
#
# The exposed part is exact for gathers only: a wait for a reduce-scatter may lie inside a unit's backward pass, where
# the trace cannot tell it from computation.

AXES = ("dp_cp", "edp")  # of the mesh: where weights and gradients are cut
PALE, SUMS, PALE_SUMS = "#d3dae6", PALETTE[4], "#f3dde5"
PASSES = {"forward": WORK["F"], "backward": WORK["B"]}
BETWEEN = 0.35  # rows


@dataclasses.dataclass(frozen=True)
class Gather:
    """An all-gather of the weights of a unit.

    Attributes:
        unit: the first that ran after the weights had arrived; "" if none did.
        start, end: from its beginning to the moment when the rank had the weights, in seconds as the events have them.
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
        axes: the axes of the mesh over which weights are cut.
    """
    units = sorted((e for e in events if e.kind == "unit"), key=lambda e: e.start)
    found = []
    for event in sorted(_on(events, "all_gather", axes), key=lambda e: e.end):
        after = next((unit.note for unit in units if unit.start >= event.end), "")
        found.append(Gather(after, event.start, event.end, _tail(event, units)))
    return found


def gather_timelines(
    runs: Mapping[str, Sequence[Event]], *, rank: int = 0, axes: Sequence[str] = AXES, title: str = ""
) -> Figure:
    """Draw the lanes of one rank in several runs below each other on one time axis; each run starts at 0.

    Args:
        runs: {name: events of any ranks}.
        rank: the rank that is drawn.
        axes: the axes of the mesh over which weights and gradients are cut.
        title: above the picture.

    Raises:
        ConfigError: in one of the runs this rank has no spans of units, or nothing was gathered.
    """
    drawn = {name: _lanes(events, rank, axes) for name, events in runs.items()}
    horizon = max(_seconds(lanes) for lanes in drawn.values())
    divisor, unit = scaled(horizon * 1e6, SECONDS, 1000)
    rows = {name: {lane: _rows(of) for lane, of in lanes.items() if of} for name, lanes in drawn.items()}
    heights = [sum(len(of) + BETWEEN for of in lanes.values()) for lanes in rows.values()]
    with styled():
        figure = new_figure(9.6, 0.7 + sum(0.6 + 0.36 * height for height in heights), title)
        panels = figure.subplots(len(runs), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
        for panel, (name, lanes) in zip(panels, drawn.items(), strict=True):
            clock = _Clock(min(e.start for of in lanes.values() for e in of), 1e6 / divisor, 118 / horizon)
            _panel(panel, clock, lanes, rows[name])
            gathers = gathers_of([*lanes["compute"], *lanes["gathers"]], axes)
            waited = sum(gather.exposed for gather in gathers) * 1e6 / divisor
            seconds = f"{_seconds(lanes) * 1e6 / divisor:.3g} {unit}"
            panel.set_title(
                f"{name}: {seconds}, of it {waited:.3g} {unit} in waits for gathers", fontsize=9, loc="left"
            )
            panel.set_xlim(-0.005 * horizon * clock.scale, 1.005 * horizon * clock.scale)
        panels[-1].set_xlabel(f"time in {unit}")
        looks = [("forward", WORK["F"]), ("backward", WORK["B"]), ("hidden gather", PALE), ("exposed gather", COMM)]
        sums = any(lanes["reduce-scatters"] for lanes in drawn.values())
        looks += [("hidden sum", PALE_SUMS), ("exposed sum", SUMS)] * sums
        handles = [sample(*look) for look in looks]
        legend(figure, handles)
    return figure


def _lanes(events: Sequence[Event], rank: int, axes: Sequence[str]) -> dict[str, list[Event]]:
    """The events of each lane of one rank; a gather has the name of its unit."""
    own = [e for e in events if e.rank == rank]
    units, gathered = [e for e in own if e.kind == "unit"], gathers_of(own, axes)
    if not units or not gathered:
        raise ConfigError(
            f"{len(units)} spans of units and {len(gathered)} gathers on rank {rank}",
            fix="with trace.record(rank) as log, units_in_trace(ddp): one step of ZeRO-3; then pass log.events",
        )
    gathers = [Event("all_gather", "comm", rank, g.start, g.end, axes[0], note=g.unit) for g in gathered]
    return {"compute": units, "gathers": gathers, "reduce-scatters": _on(own, "reduce_scatter", axes)}


def _seconds(lanes: Mapping[str, Sequence[Event]]) -> float:
    shown = [event for of in lanes.values() for event in of]
    return max(e.end for e in shown) - min(e.start for e in shown)


def _panel(
    panel: Axes, clock: _Clock, lanes: Mapping[str, Sequence[Event]], rows: Mapping[str, Sequence[Sequence[Event]]]
) -> None:
    """Draw the lanes of one run."""
    top, middles = 0.0, []
    for name, of in rows.items():
        for i, row in enumerate(of):
            for event in row:
                exposed = _tail(event, lanes["compute"]) if name != "compute" else 0.0
                _draw(panel, clock, name, event, top + i, exposed)
        middles.append(top + len(of) / 2 - 0.04)
        top += len(of) + BETWEEN
    rows_of_bars(panel, list(rows), middles)
    panel.set_ylim(top - BETWEEN + 0.1, -0.15)


@dataclasses.dataclass(frozen=True)
class _Clock:
    """Converts seconds to the unit of the axis.

    Attributes:
        origin: of the picture.
        scale: per second.
        letters: that fit into a second.
    """

    origin: float
    scale: float
    letters: float


def _draw(axes: Axes, clock: _Clock, lane: str, event: Event, y: float, exposed: float) -> None:
    """Draw a bar with the number of its unit; its end is dark where it was exposed."""
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
    """Distribute events to rows so that none overlap in a row."""
    same = [dataclasses.replace(e, kind="comm") for e in lane]
    start, end = times(same)
    return [[lane[i] for i in row.tolist()] for row in lay_out(same, start, end, ("comm",))[lane[0].rank]]


def _on(events: Sequence[Event], name: str, axes: Sequence[str]) -> list[Event]:
    return [e for e in events if e.kind == "comm" and e.name == name and e.axis in axes]


def _tail(event: Event, units: Sequence[Event]) -> float:
    """The seconds from the end of the last unit that ran, or from the event's own beginning, to the end of the
    event."""
    if any(unit.start < event.end < unit.end for unit in units):
        return 0.0
    return event.end - max([event.start, *(unit.end for unit in units if unit.end <= event.end)])
