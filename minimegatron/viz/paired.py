"""A plan beside what was done, rank by rank on one time axis: the thin row is planned, the thick one below it measured.

`timeline.gantt` puts all ranks of a plan above all ranks of a run; to see *where* a run falls behind, the two rows of
one rank must lie on each other. Both clocks start at their own first event.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from minimegatron.errors import ConfigError
from minimegatron.trace import Event
from minimegatron.viz.picture import INK, WORK, box, new_figure, styled, text_on
from minimegatron.viz.schedule import DEEP, shade

THIN, THICK, BETWEEN = 0.34, 0.62, 0.30  # heights of a rank's two rows, and the room between ranks

SAID = {"F": "F: forward", "B": "B: backward", "W": "W: for the weights"}


def planned_and_done(planned: Sequence[Event], done: Sequence[Event], title: str = "") -> Figure:
    """Both as bars that are named F, B or W, with `3` or `3.1` as their note.

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
        axes.set_yticks(
            [(rank * per_rank + at) for rank in range(ranks) for at in (THIN / 2, THIN + THICK / 2)],
            [text for rank in range(ranks) for text in ("planned", f"rank {rank}")],
        )
        for label in axes.get_yticklabels()[::2]:
            label.set_fontsize(7)
        axes.set_ylim(ranks * per_rank - BETWEEN + 0.1, -0.1)
        axes.set_xlim(0, 1.02e3 * max(ends.values()))
        axes.set_xlabel("time in ms")
        axes.grid(visible=True, axis="x")
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        names = [name for name in WORK if any(e.name == name for e in done)]
        samples = [Patch(facecolor=WORK[name], edgecolor=INK, linewidth=0.5, label=SAID[name]) for name in names]
        if chunks > 1:
            samples.append(Patch(facecolor=DEEP["F"], edgecolor=INK, linewidth=0.5, label="dark: last chunk"))
        figure.legend(handles=[*samples, *axes.lines], loc="outside lower center", ncols=len(samples) + 2)
    return figure


def _from_zero(events: Sequence[Event]) -> list[Event]:
    """The same events, the clock starting at the first."""
    origin = min(e.start for e in events)
    return [dataclasses.replace(e, start=e.start - origin, end=e.end - origin) for e in events]


def _chunk(event: Event) -> int:
    return int(event.note.partition(".")[2] or 0)


def _bar(axes: Axes, event: Event, y: float, height: float, chunks: int, letters: float) -> None:
    """A bar in ms; its label where `letters` a second give it room."""
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
