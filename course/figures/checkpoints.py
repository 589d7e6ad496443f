"""Drawings of lab 08: which rank holds which part of a tensor, what a crash leaves, what saves and failures cost, who
does what in a save by many ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

from matplotlib.axes import Axes
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.ticker import LogLocator, NullLocator

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import (
    FAINT,
    INK,
    PALETTE,
    PAPER,
    WORK,
    Picture,
    box,
    legend,
    new_figure,
    panels,
    rank_colours,
    sample,
    styled,
)

# --------------------------------------------------------------------------------------- which rank holds which numbers
# A panel for each layout of a tensor. A box is a range of rows and a range of columns that one rank holds, in the
# colour of the rank and with its number. A dashed line over all panels marks what one rank of another layout reads,
# so the picture shows which stored boxes it has to open.

Box = Sequence[Sequence[int]]  # [[first row, last row], [first column, last column]]; the last is not included


def region_map(
    shape: tuple[int, int],
    layouts: Mapping[str, Sequence[Sequence[Box]]],
    wanted: tuple[str, Sequence[Box]] | None = None,
) -> Picture:
    """Draw one panel for each layout.

    Args:
        shape: rows and columns of the tensor.
        layouts: {title: the boxes of each rank}.
        wanted: (text of the legend, boxes) of a dashed line over every panel.

    Raises:
        ConfigError: nothing to draw, or a box that is not inside the tensor.
    """
    if not layouts:
        raise ConfigError("no layout to draw", fix="give at least one")
    for title, ranks in layouts.items():
        for one in (one for boxes in ranks for one in boxes):
            if not all(0 <= start <= stop <= size for (start, stop), size in zip(one, shape, strict=True)):
                raise ConfigError(f"{title!r} has a box {list(map(list, one))} outside of {list(shape)}")
    with styled():
        figure = new_figure(3.4 * len(layouts), 0.9 + 2.6 * min(1.4, max(0.7, shape[0] / shape[1])))
        for axes, ranks in panels(figure, layouts):
            _tensor(axes, shape, ranks)
            for (top, bottom), (left, right) in wanted[1] if wanted else ():
                axes.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=INK,
                                         linestyle=(0, (3, 1.6)), linewidth=2.8, zorder=5))  # fmt: skip
        if wanted:
            handle = Line2D([], [], color=INK, linestyle=(0, (3, 1.6)), linewidth=2.8, label=wanted[0])
            figure.legend(handles=[handle], loc="outside lower center", fontsize=8.5, handlelength=4)
    return figure


def _tensor(axes: Axes, shape: tuple[int, int], ranks: Sequence[Sequence[Box]]) -> None:
    for rank, (boxes, colour) in enumerate(zip(ranks, rank_colours(len(ranks)), strict=True)):
        for (top, bottom), (left, right) in boxes:
            if top < bottom and left < right:
                box(axes, (left, top), (right - left, bottom - top), colour, f"{rank}", edge=INK)
    rows, columns = shape
    for row in range(1, rows):
        axes.axhline(row, color="white", linewidth=0.5, alpha=0.7)
    for column in range(1, columns):
        axes.axvline(column, color="white", linewidth=0.5, alpha=0.7)
    axes.set(xlim=(-0.1, columns + 0.1), ylim=(rows + 0.1, -0.1), xticks=[0, columns], yticks=[0, rows])
    axes.set(xlabel="column", ylabel="row", aspect="equal")
    axes.grid(False)


# -------------------------------------------------------------------------------------------------- what a crash leaves
# A panel for each way to save a checkpoint. A column is one change of the disk, a row is what a reader can find when
# the machine stops right after that change: the old checkpoint, the new one, or a broken one. A filled cell can
# happen when the power fails, a ring is what is found when only the program is killed. A save is safe if the row
# "broken" is empty.

ROWS = ("old", "new", "broken")
COLOURS = {"old": PALETTE[1], "new": PALETTE[3], "broken": PALETTE[7]}
Step = tuple[str, Set[str], Set[str]]  # what was done; what is found when the program dies; when the power fails


def crash_map(saves: Mapping[str, Sequence[Step]]) -> Picture:
    """Draw one panel for each way to save.

    Raises:
        ConfigError: nothing to draw, or an outcome that is no row.
    """
    if not saves or not all(saves.values()):
        raise ConfigError("no save to draw", fix="give at least one, with its changes")
    if unknown := {fate for steps in saves.values() for _, *both in steps for one in both for fate in one} - {*ROWS}:
        raise ConfigError(f"{min(unknown)!r} is nothing that can be found", fix=f"one of {', '.join(ROWS)}")
    with styled():
        figure = new_figure(0.62 * max(map(len, saves.values())) + 2.2, 3.0 * len(saves) + 0.4)
        for axes, steps in panels(figure, saves, down=True):
            _save(axes, steps, max(map(len, saves.values())))
        filled = tuple(sample("", COLOURS[row]) for row in ROWS)
        ring = Line2D([], [], marker="o", color="none", markerfacecolor=PAPER, markeredgecolor=INK, markersize=7)
        handles: list[Any] = [filled, ring]  # matplotlib takes tuples, its types do not say so
        figure.legend(handles, ["filled: can be found when the power fails", "is found when the program dies"],
                      handler_map={tuple: HandlerTuple(ndivide=None, pad=0)}, handlelength=3,
                      loc="outside lower center", fontsize=8.5)  # fmt: skip
    return figure


def _save(axes: Axes, steps: Sequence[Step], columns: int) -> None:
    for x, (_, killed, cut) in enumerate(steps):
        for y, fate in enumerate(ROWS):
            box(axes, (x, y), (1, 1), COLOURS[fate] if fate in cut else PAPER)
            if fate in killed:
                axes.plot([x + 0.5], [y + 0.5], marker="o", markersize=7, markerfacecolor=PAPER, markeredgecolor=INK)
    axes.set(xlim=(0, columns), ylim=(len(ROWS), 0), yticks=[y + 0.5 for y in range(len(ROWS))], yticklabels=ROWS)
    axes.set_xticks([x + 0.5 for x in range(len(steps))], [what for what, *_ in steps], rotation=40, ha="right",
                    rotation_mode="anchor", fontsize=8)  # fmt: skip
    axes.set_xlabel("the save stops after this change", fontsize=8.5)
    axes.set_ylabel("a reader finds", fontsize=8.5)
    axes.tick_params(length=0)
    axes.grid(False)


# -------------------------------------------------------------------------------------------------- how often to save
# Two losses over the interval between two saves, on logarithmic axes: what saving costs falls, what failures undo
# rises. Their sum is smallest where the two lines cross.


def interval_curve(save: float, between_failures: float, intervals: Sequence[float], best: float) -> Picture:
    """Draw the share of time that is lost over the interval, and mark one interval.

    Args:
        save: seconds of one save.
        between_failures: seconds between two failures of the run.
        intervals: seconds, increasing.
        best: the interval that is marked, in seconds.

    Raises:
        ConfigError: fewer than two intervals, or a number that is not above 0.
    """
    if len(intervals) < 2 or min(save, between_failures, best, *intervals) <= 0:
        raise ConfigError("an interval that is not above 0, or nothing to draw", fix="give two intervals, in seconds")
    minutes = [every / 60 for every in intervals]
    saving = [100 * save / every for every in intervals]
    undone = [50 * every / between_failures for every in intervals]
    with styled():
        figure = new_figure(7.4, 3.2)
        axes = figure.subplots()
        axes.plot(minutes, [sum(both) for both in zip(saving, undone, strict=True)], color=INK, linewidth=2.4,
                  linestyle="-", label="together")  # fmt: skip
        axes.plot(minutes, saving, color=PALETTE[3], linestyle="--", label="saving: S/T")
        axes.plot(minutes, undone, color=PALETTE[4], linestyle=":", linewidth=2.4, label="undone by failures: T/2F")
        lost = 100 * save / best + 50 * best / between_failures
        axes.plot([best / 60], [lost], marker="o", markersize=8, color="none", markerfacecolor=PAPER,
                  markeredgecolor=INK, label="the best interval")  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="minutes between two saves", ylabel="% of the time that is lost")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_locator(NullLocator())
        axes.legend(fontsize=8.5)
    return figure


# ------------------------------------------------------------------------------------------ a save by many ranks
# A panel for each run. A row is a rank, a box is one of its changes of the disk, in the order in which all of them
# happened. A dashed line is a time in which nothing happened: somebody waited for a rank that did not come. At the end
# of a row stands how the rank's function ended.


def turns(runs: Mapping[str, Sequence[Sequence[Any]]]) -> Picture:
    """Draw one panel for each run.

    Args:
        runs: {title: events}, each event [run, rank, time, what, path ...], as `course.lab08.together.Ranks` notes it.

    Raises:
        ConfigError: nothing to draw.
    """
    if not runs or not all(runs.values()):
        raise ConfigError("no run to draw", fix="give at least one, with its events")
    most = max(map(len, runs.values()))
    rows = [1 + max(event[1] for event in events) for events in runs.values()]
    with styled():
        figure = new_figure(min(9.6, 0.56 * most + 1.0), sum(0.82 * n + 0.5 for n in rows))
        for (axes, events), ranks in zip(panels(figure, runs, down=True), rows, strict=True):
            colours, before = rank_colours(ranks), events[0][2]
            for at, (_, rank, now, what, *paths) in enumerate(events):
                if now - before > 1:
                    axes.axvline(at, color=INK, linestyle=(0, (3, 1.6)), linewidth=1.4)
                    axes.text(at, -0.12, f"{now - before:.0f} s pass", ha="center", va="bottom", fontsize=8.5,
                              bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
                before = now
                if paths:
                    folder, _, name = paths[0].rpartition("/")
                    said, colour = f"{what}\n{name if folder else 'folder' if name else 'root'}", colours[rank]
                else:
                    said = {"returned": "returns", "died": "dies"}.get(what, "raises")
                    said = "\n".join([said, *re.findall(r"missing: \[.*\]", what)]).replace(": ", ":\n")
                    colour = PALETTE[7] if what == "died" else PAPER
                box(axes, (at + 0.04, rank + 0.04), (0.92, 0.92), colour, said, edge=INK, fontsize=8, upright=True)
            axes.set(xlim=(-0.05, most + 0.05), ylim=(ranks + 0.05, -0.45), xticks=[])
            axes.set_yticks([rank + 0.5 for rank in range(ranks)], [f"rank {rank}" for rank in range(ranks)])
            axes.tick_params(axis="y", length=0)
            axes.grid(False)
    return figure


# ------------------------------------------------------------------------------------------------ a save over the time
# A panel for each way to save. The first row is the run: it computes, copies its state, or waits. The second row is the
# background, which writes. The line below is the memory that the copies take.

WAYS = {
    "step": (WORK["F"], ""), "copy": (PALETTE[4], ""), "wait": ("white", "///"), "write": (PALETTE[7], ""),
}  # fmt: skip
Span = tuple[str, float, float]  # what, from, to: seconds


def over_time(runs: Mapping[str, tuple[Sequence[Span], Sequence[Span], Sequence[tuple[float, float]]]]) -> Picture:
    """Draw one panel for each way to save, all with one time axis.

    Args:
        runs: {title: (spans of the run, spans of the background, (seconds, copies of the state) over the time)}.

    Raises:
        ConfigError: nothing to draw, or a span that is none of the four.
    """
    if not runs or not all(run for run, _, _ in runs.values()):
        raise ConfigError("no run to draw", fix="give at least one, with its spans")
    spans = [span for run, behind, _ in runs.values() for span in (*run, *behind)]
    if unknown := {what for what, _, _ in spans} - {*WAYS}:
        raise ConfigError(f"{min(unknown)!r} is nothing that a run does", fix=f"one of {', '.join(WAYS)}")
    end = max(stop for _, _, stop in spans)
    with styled():
        figure = new_figure(8.6, 1.75 * len(runs) + 0.5)
        for axes, (run, behind, copies) in panels(figure, runs, down=True):
            for row, of_row in enumerate((run, behind)):
                for what, start, stop in of_row:
                    colour, pattern = WAYS[what]
                    box(axes, (start, row + 0.08), (stop - start, 0.84), colour, pattern=pattern, edge=INK)
            times = [0.0, *(now for now, _ in copies), max(stop for *_, stop in run)]
            much = [0.0, *(one for _, one in copies)]
            axes.stairs([3 - 0.85 * one / 2 for one in much], times, baseline=3, fill=True, color=FAINT)
            axes.axhline(3 - 0.85 / 2, color=INK, linewidth=0.8, linestyle=":")
            axes.set(xlim=(0, end * 1.01), ylim=(3.05, -0.05), xlabel="seconds" if axes is figure.axes[-1] else "")
            axes.set_yticks([0.5, 1.5, 3 - 0.85 / 2], ["the run", "background", "one copy"])
            axes.tick_params(axis="y", length=0)
            axes.grid(False)
        legend(figure, [sample(what, *WAYS[what]) for what in WAYS])
    return figure


# ----------------------------------------------------------------------------------------- which rank needs which rows
# A panel for each matrix. A strip is the matrix in one order of its rows, from left to right; a block is the rows of a
# head or of a part, in the colour of the rank that needs them and with its number below.


def strips(matrices: Mapping[str, Sequence[tuple[str, str, Sequence[int]]]]) -> Picture:
    """Draw one panel for each matrix.

    Args:
        matrices: {title: (name of the order, blocks with spaces between them, the rank of each block) of each strip}.

    Raises:
        ConfigError: nothing to draw, or a block without a rank.
    """
    if not matrices or not all(matrices.values()):
        raise ConfigError("no matrix to draw", fix="give at least one, with its strips")
    lengths = [len(rows) for rows in matrices.values()]
    for name, blocks, ranks in (strip for rows in matrices.values() for strip in rows):
        if len(blocks.split()) != len(ranks):
            raise ConfigError(f"{name!r} has {len(blocks.split())} blocks and {len(ranks)} ranks", fix="one for each")
    with styled():
        figure = new_figure(8.4, 0.62 * sum(lengths) + 0.55 * len(matrices))
        grid = figure.subplots(len(matrices), 1, squeeze=False, height_ratios=lengths)
        for axes, (title, rows) in zip(grid.flat, matrices.items(), strict=True):
            axes.set_title(title)
            most = max(len(ranks) for *_, ranks in rows)
            for row, (_, blocks, ranks) in enumerate(rows):
                colours = rank_colours(max(ranks) + 1)
                for at, (block, rank) in enumerate(zip(blocks.split(), ranks, strict=True)):
                    box(
                        axes,
                        (at, row + 0.06),
                        (0.97, 0.88),
                        colours[rank],
                        f"{block}\nrank {rank}",
                        edge=INK,
                        fontsize=8.5,
                    )
            axes.set(xlim=(-0.05, most + 0.05), ylim=(len(rows) + 0.02, -0.02), xticks=[])
            axes.set_yticks([row + 0.5 for row in range(len(rows))], [name for name, *_ in rows])
            axes.tick_params(axis="y", length=0)
            axes.grid(False)
    return figure
