"""Drawings of lab 03: placements of stages, a deadlock, crossed messages, a plan and its run, memory against bubble."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError
from minimegatron.trace import Event
from minimegatron.viz.picture import (
    INK,
    MEASURED,
    REFERENCE,
    WORK,
    arrow,
    blank,
    box,
    legend,
    new_figure,
    panels,
    rows_of_bars,
    sample,
    styled,
    text_on,
)
from minimegatron.viz.schedule import DEEP, shade

# ------------------------------------------------------------------------------------------------- placements of stages
# The stages from left to right, a row of boxes for each rank, and a line that follows a microbatch.
#
#     straight       a stage a rank                       one way down
#     round robin    stages r, r+p, r+2p, ... on rank r   down, and back to rank 0 with the next chunk
#     V              stages r and 2p-1-r on rank r        down and up again: the last stage is where the first one is
#
# A box is a stage; light is a rank's first chunk, dark its last, as in the pictures of schedules.


def placements(titled: Mapping[str, Sequence[Sequence[int]]]) -> Figure:
    """Draw a panel for each placement.

    Args:
        titled: {title: `[rank][chunk]` -> stage}, as `actions.round_robin` and `actions.v_shaped` return it.

    Raises:
        ConfigError: nothing to draw, or a placement that does not hold every stage once.
    """
    if not titled:
        raise ConfigError("no placement to draw", fix="give at least one")
    for title, placement in titled.items():
        stages = sorted(stage for row in placement for stage in row)
        if not stages or stages != list(range(len(stages))):
            raise ConfigError(f"the stages of {title!r} are {stages}", fix="hold every stage from 0 on exactly once")
    with styled():
        figure = new_figure(3.3 * len(titled), 2.6)
        for axes, placement in panels(figure, titled):
            _panel(axes, placement)
        samples = [sample("a rank's first chunk", WORK["F"], linewidth=0.5)]
        if any(len(row) > 1 for placement in titled.values() for row in placement):
            samples.append(sample("its last chunk", DEEP["F"], linewidth=0.5))
        way = Line2D([], [], color=INK, linewidth=1.2, label="the way of a microbatch, forward")
        legend(figure, [*samples, way], fontsize=None)
    return figure


def _panel(axes: Axes, placement: Sequence[Sequence[int]]) -> None:
    """Draw stages from left to right at the height of their rank, and a line from each to the next."""
    place = {stage: (rank, chunk) for rank, row in enumerate(placement) for chunk, stage in enumerate(row)}
    chunks = max(1, len(placement[0]) - 1)
    for stage in range(len(place) - 1):
        (a, _), (b, _) = place[stage], place[stage + 1]
        arrow(axes, (stage + 0.5, a), (stage + 1.5, b), arrowstyle="-", linewidth=1.2, shrinkA=0, shrinkB=0, zorder=0)
    for stage, (rank, chunk) in place.items():
        colour = shade(WORK["F"], DEEP["F"], chunk / chunks)
        box(axes, (stage + 0.04, rank - 0.34), (0.92, 0.68), colour, str(stage), edge=INK)
    axes.set_xlim(0, len(place))
    axes.set_ylim(len(placement) - 0.4, -0.6)
    axes.set_yticks(range(len(placement)), [f"rank {rank}" for rank in range(len(placement))])
    axes.set_xticks([])
    axes.set_xlabel("stages, from the first layers to the last", fontsize=9)
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


# --------------------------------------------------------------------------------------- lists that wait for each other
# A row of boxes for each rank, in the order of its list of actions. Actions that the rank can do have their colour,
# those that it never reaches are hatched, and a thick frame marks the one at which it stands. An arrow leads from
# there to the action of another rank that it waits for. That action stands behind the one at which its own rank
# waits, so the arrows form a circle.

WIDE, HIGH, ROW = 0.8, 0.62, 1.45  # of a box; from rank to rank
AROUND = 0.06  # from a box to the frame around it
STANDS: dict[str, Any] = {"edgecolor": INK, "linewidth": 2.4}


def draw_deadlock(
    lists: Sequence[Sequence[str]],
    reached: Sequence[int],
    waits: Sequence[tuple[int, int, int, int]],
    title: str = "",
) -> Figure:
    """Draw the lists, and which action waits for which.

    Args:
        lists: each rank's words, such as F0 or B3.1.
        reached: how many of them each rank can do.
        waits: (rank, place in its list, other rank, place in that list): the first waits for the second.
        title: above the picture.

    Raises:
        ConfigError: no rank waits.
    """
    if not waits:
        raise ConfigError("no rank waits for another", fix="draw lists that run with draw_schedule")
    longest = max(map(len, lists))
    with styled():
        figure = new_figure(1.8 + 1.0 * longest, 0.8 + 0.95 * len(lists), title)
        axes = figure.subplots()
        for rank, words in enumerate(lists):
            axes.text(-0.25, ROW * rank + HIGH / 2, f"rank {rank}", ha="right", va="center")
            for i, word in enumerate(words):
                colour, pattern = (WORK.get(word[0], "white"), "") if i < reached[rank] else ("white", "///")
                box(axes, (i, ROW * rank), (WIDE, HIGH), colour, word, pattern=pattern, edge=INK)
            if reached[rank] < len(words):
                place = (reached[rank] - AROUND, ROW * rank - AROUND)
                axes.add_patch(Rectangle(place, WIDE + 2 * AROUND, HIGH + 2 * AROUND, fill=False, **STANDS))
        for rank, at, other, needs in waits:
            down, side = other > rank, 0.12 if other > rank else -0.12
            start = at + WIDE / 2 + side, ROW * rank + HIGH * down
            end = needs + WIDE / 2 + side, ROW * other + HIGH * (not down)
            arrow(axes, start, end, linewidth=1.6, mutation_scale=14)
        samples = [
            sample("done", WORK["F"], linewidth=0.5),
            sample("never reached", "white", "///", linewidth=0.5),
            sample("the rank stands here", "none", **STANDS),
        ]
        marks = axes.plot([], [], color=INK, linewidth=1.6, marker=">", markersize=6, label="waits for")
        legend(figure, [*samples, *marks], 4 if longest > 3 else 2, fontsize=None)
        axes.set_xlim(-1.2, longest)
        axes.set_ylim(ROW * (len(lists) - 1) + HIGH + 0.1, -0.1)
        blank(axes)
    return figure


# ------------------------------------------------------------------------------------------------ messages of two ranks
# Above what one rank sends, below what the other posts receives for, each in its order: the k-th message goes to the
# k-th receive. A thick frame marks a receive that got what was for another word.

MOST = 12  # messages in a picture


def draw_messages(
    sent: Sequence[str], posted: Sequence[str], wrong: Sequence[str], source: int, title: str = ""
) -> Figure:
    """Draw the first messages from one rank to the other.

    Args:
        sent: the sender's words.
        posted: the receiver's words.
        wrong: those of `posted` that got another's message.
        source: the sender, 0 or 1.
        title: above the picture.

    Raises:
        ConfigError: there are more sends than receives, or fewer.
    """
    if len(sent) != len(posted) or not sent:
        raise ConfigError(f"{len(sent)} sends for {len(posted)} receives", fix="give the log of one step")
    with styled():
        figure = new_figure(9.2, 1.9, title)
        axes = figure.subplots()
        for y, text in ((0.0, f"rank {source} sends"), (1.6, f"rank {1 - source} posts")):
            axes.text(-0.2, y + HIGH / 2, text, ha="right", va="center", fontsize=9)
        for k, (word, wanted) in enumerate(zip(sent[:MOST], posted[:MOST], strict=True)):
            box(axes, (k, 0.0), (WIDE, HIGH), WORK.get(word[0], "white"), word, edge=INK)
            box(axes, (k, 1.6), (WIDE, HIGH), WORK.get(wanted[0], "white"), wanted, edge=INK)
            arrow(axes, (k + WIDE / 2, HIGH), (k + WIDE / 2, 1.6), linewidth=1.0, mutation_scale=10)
            if wanted in wrong:
                place = (k - AROUND, 1.6 - AROUND)
                axes.add_patch(Rectangle(place, WIDE + 2 * AROUND, HIGH + 2 * AROUND, fill=False, **STANDS))
        samples = [
            sample("F: an activation", WORK["F"], linewidth=0.5),
            sample("B: a gradient", WORK["B"], linewidth=0.5),
            sample("got what was for another word", "none", **STANDS),
        ]
        legend(figure, samples, 3, fontsize=None)
        axes.set_xlim(-2.0, min(MOST, len(sent)))
        axes.set_ylim(1.6 + HIGH + 0.15, -0.1)
        blank(axes)
    return figure


# ----------------------------------------------------------------------------------------------------- planned and done
# A plan beside its run, rank by rank on one time axis: the thin row is planned, the thick one below it measured. Both
# clocks start at their own first event. (`timeline.gantt` draws all ranks of a plan above all ranks of a run; here the
# two rows of one rank lie together, so one sees *where* a run falls behind.)

THIN, THICK, BETWEEN = 0.34, 0.62, 0.30  # heights of a rank's two rows, and the room between ranks

SAID = {"F": "F: forward", "B": "B: backward", "W": "W: for the weights"}


def planned_and_done(planned: Sequence[Event], done: Sequence[Event], title: str = "") -> Figure:
    """Draw both as bars named F, B or W, with `3` or `3.1` as their note.

    Raises:
        ConfigError: one of the two has no events.
    """
    if not planned or not done:
        raise ConfigError(f"{len(planned)} events planned, {len(done)} done", fix="give some of both")
    planned, done = _from_zero(planned), _from_zero(done)
    ranks = 1 + max(e.rank for e in (*planned, *done))
    ends = {"planned": max(e.end for e in planned), "measured": max(e.end for e in done)}
    per_rank = THIN + THICK + BETWEEN
    chunks = 1 + max(_chunk(e) for e in (*planned, *done))
    with styled():
        figure = new_figure(9.2, 1.1 + 0.46 * per_rank * ranks, title)
        axes = figure.subplots()
        letters = 120 / max(ends.values())  # that fit into one unit of time
        for e in planned:
            _bar(axes, e, e.rank * per_rank, THIN, chunks, 0)
        for e in done:
            _bar(axes, e, e.rank * per_rank + THIN, THICK, chunks, letters)
        for (what, end), style in zip(ends.items(), ("--", "-"), strict=True):
            # behind the bars, so that it strikes through no label
            axes.axvline(1e3 * end, color=INK, linewidth=1.0, linestyle=style, label=f"{what}: all done", zorder=0.5)
        middles = [(rank * per_rank + at) for rank in range(ranks) for at in (THIN / 2, THIN + THICK / 2)]
        rows_of_bars(axes, [text for rank in range(ranks) for text in ("planned", f"rank {rank}")], middles)
        for label in axes.get_yticklabels()[::2]:
            label.set_fontsize(7)
        axes.set_ylim(ranks * per_rank - BETWEEN + 0.1, -0.1)
        axes.set_xlim(0, 1.02e3 * max(ends.values()))
        axes.set_xlabel("time in ms")
        names = [name for name in WORK if any(e.name == name for e in done)]
        samples = [sample(SAID[name], WORK[name], linewidth=0.5) for name in names]
        if chunks > 1:
            samples.append(sample("dark: last chunk", DEEP["F"], linewidth=0.5))
        legend(figure, [*samples, *axes.lines], fontsize=None)
    return figure


def _from_zero(events: Sequence[Event]) -> list[Event]:
    """The same events, in seconds since the first one."""
    origin = min(e.start for e in events)
    return [dataclasses.replace(e, start=e.start - origin, end=e.end - origin) for e in events]


def _chunk(event: Event) -> int:
    return int(event.note.partition(".")[2] or 0)


def _bar(axes: Axes, event: Event, y: float, height: float, chunks: int, letters: float) -> None:
    """Draw a bar in ms, with its label where `letters` a second leave room for it."""
    share = _chunk(event) / max(1, chunks - 1)
    colour = shade(WORK.get(event.name, "#ffffff"), DEEP.get(event.name, INK), share)
    digit = event.note.partition(".")[0]
    room = letters * (event.end - event.start)
    text = next((text for text in (event.name + digit, digit) if len(text) <= room), "")
    size = 1e3 * (event.end - event.start), height
    box(axes, (1e3 * event.start, y), size, colour, edge=INK)
    if text:
        axes.text(
            1e3 * (event.start + event.end) / 2, y + height / 2, text, ha="center", va="center", fontsize=7,
            color=text_on(colour), clip_on=True,
        )  # fmt: skip


# ------------------------------------------------------------------------------------------------ memory against bubble
# A schedule is a point: to the right the activations that the fullest rank keeps, in units of one microbatch's on a
# rank (a chunk counts 1/v of it); upwards the bubble, idle time over work. Lower left is better. Points in one place
# share a label. With `before`, a pale, larger point shows where a schedule stood with another number of microbatches,
# and an arrow leads to where it stands now; the bubble's axis is then logarithmic, so that each halving has one
# length.

Point = tuple[float, float]  # activations kept, bubble

SIZE = 6.8, 4.0  # inches
ROOM = 435.0, 205.0  # of the axes inside, about, in points
LETTER, HALF = 5.2, 5.0  # a label's letter and half a line, in points
ASIDE = 10  # from a point to its label
PALE = 15  # points wide: a point that stood here; one that stands here has 9


def trade_off(
    predicted: Mapping[str, Point],
    measured: Mapping[str, Point] | None = None,
    title: str = "",
    before: Mapping[str, Point] | None = None,
) -> Figure:
    """Draw schedules by memory and bubble.

    Args:
        predicted: {name: (activations kept, bubble)}, a bubble of 0.25 being a quarter of the work.
        measured: of the same names, drawn filled beside the hollow ones.
        title: above the picture.
        before: earlier points of these names, e.g. with half as many microbatches; other names are left out.

    Raises:
        ConfigError: no point at all, or a measured name that was not predicted.
    """
    measured = measured or {}
    if not predicted or not set(measured) <= set(predicted):
        raise ConfigError(
            f"points for {sorted(predicted)} and measured ones for {sorted(measured)}",
            fix="predict at least one, and each that is measured",
        )
    before = {name: point for name, point in (before or {}).items() if name in predicted}
    together: dict[Point, list[str]] = {}
    for name, (kept, bubble) in predicted.items():
        together.setdefault((round(kept, 3), round(bubble, 4)), []).append(name)
    points = [*predicted.values(), *measured.values(), *before.values()]
    high = 1.3 * max(kept for kept, _ in points), 1.15 * max(*(bubble for _, bubble in points), 0.01)
    least = min(bubble for _, bubble in points)
    low = least / 1.6 if before and least > 0 else 0.0  # of a logarithmic scale
    high = high if not low else (high[0], 1.3 * high[1])
    with styled():
        figure = new_figure(*SIZE, title)
        axes = figure.subplots()
        for name, point in before.items():
            _moved(axes, point, predicted[name])
        labels = [(point, ", ".join(names)) for point, names in together.items()]
        for (kept, bubble), text, (across, up) in _placed(labels, points, low, high):
            axes.plot([kept], [100 * bubble], "o", markersize=9, markerfacecolor="white", markeredgecolor=INK)
            side = "left" if across > 0 else "right" if across < 0 else "center"
            axes.annotate(
                text, (kept, 100 * bubble), (across, up), textcoords="offset points", va="center", ha=side, fontsize=9,
            )  # fmt: skip
        for name, (kept, bubble) in measured.items():
            (x, y) = predicted[name]
            axes.plot([x, kept], [100 * y, 100 * bubble], linewidth=0.8, linestyle=":", color=INK)
            axes.plot([kept], [100 * bubble], "o", markersize=6, color=MEASURED[0])
        if before:
            axes.plot([], [], "o", markersize=PALE, color=REFERENCE[0], label="before")
        axes.plot([], [], "o", markersize=9, markerfacecolor="white", markeredgecolor=INK, label="predicted")
        if measured:
            axes.plot([], [], "o", markersize=6, color=MEASURED[0], label="measured")
        axes.set_xlim(0, high[0])
        if low:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(100 * low, 100 * high[1])
        axes.set_xlabel("most activations kept (1: what a rank keeps of one microbatch)")
        axes.set_ylabel("bubble, % of the work")
        axes.text(0.01, 0.02, "↙ better", transform=axes.transAxes, fontsize=9)
        axes.grid(visible=True, axis="both")
        if measured or before:
            figure.legend(loc="outside lower center", ncols=3)
    return figure


def _moved(axes: Axes, old: Point, new: Point) -> None:
    """Draw a pale point where a schedule was, and an arrow from there to its new place."""
    axes.plot([old[0]], [100 * old[1]], "o", markersize=PALE, color=REFERENCE[0])
    if old != new:
        arrow(axes, (old[0], 100 * old[1]), (new[0], 100 * new[1]), color=REFERENCE[0], shrinkA=6, shrinkB=7)


def _placed(
    labels: list[tuple[Point, str]], points: Iterable[Point], low: float, high: Point
) -> Iterable[tuple[Point, str, tuple[int, int]]]:
    """Yield each label with its offset: the first place inside the axes that is free of points and of other labels."""

    def at_points(point: Point) -> Point:
        if low:
            return point[0] * ROOM[0] / high[0], math.log(point[1] / low) / math.log(high[1] / low) * ROOM[1]
        return point[0] * ROOM[0] / high[0], point[1] * ROOM[1] / high[1]

    dots = [at_points(point) for point in points]
    taken = [(0.0, 0.0, 52.0, 14.0), *((x - 7, y - 7, x + 7, y + 7) for x, y in dots)]  # "better", and points
    for point, text in labels:
        (x, y), wide = at_points(point), LETTER * len(text)
        at = {
            (ASIDE, 0): x + ASIDE, (-ASIDE, 0): x - ASIDE - wide, (0, 15): x - wide / 2, (0, -15): x - wide / 2,
            (ASIDE, 13): x + ASIDE, (ASIDE, -13): x + ASIDE, (-ASIDE, 13): x - ASIDE - wide,
            (-ASIDE, -13): x - ASIDE - wide,
        }  # fmt: skip
        boxes = {place: (left, y + place[1] - HALF, left + wide, y + place[1] + HALF) for place, left in at.items()}
        inside = {p: b for p, b in boxes.items() if b[0] > 0 and b[1] > 0 and b[2] < ROOM[0] and b[3] < ROOM[1]}
        free = [place for place, box in inside.items() if not any(_meet(box, other) for other in taken)]
        place = next(iter([*free, *inside, *boxes]))
        taken.append(boxes[place])
        yield point, text, place


def _meet(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return min(a[2], b[2]) > max(a[0], b[0]) and min(a[3], b[3]) > max(a[1], b[1])
