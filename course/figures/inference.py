"""Drawings of lab 10: pages and tables, who is computed in a step, seats, shares of tokens, tokens a second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import (
    FAINT,
    INK,
    MEASURED,
    MEASURED_LINE,
    PAPER,
    PREDICTED,
    PREDICTED_LINE,
    REFERENCE,
    Picture,
    box,
    legend,
    new_figure,
    panels,
    rank_colours,
    sample,
    styled,
)

Owners = Mapping[str, Sequence[int]]  # name of a sequence -> its pages, in order
# (Name of a sequence, how many of its tokens a step computes, whether they are of its answer and not of its prompt.)
Chunks = Sequence[tuple[str, int, bool]]


def _looks(names: Sequence[str]) -> dict[str, str]:
    return dict(zip(names, rank_colours(len(names)), strict=True))


# ------------------------------------------------------------------------------------------------- one moment's pages
# Left a table for each sequence, right the memory. A cell is a row of a page, in it the sequence and the token's place.


def block_tables(tables: Owners, lengths: Mapping[str, int], pages: int, size: int) -> Picture:
    """The tables of some sequences, and what lies in every page.

    Args:
        tables: {sequence: its pages}.
        lengths: {sequence: how many tokens it has}.
        pages, size: of the memory.

    Raises:
        ConfigError: a page that is not there, or a sequence with too few.
    """
    if not tables or any(not 0 <= page < pages for table in tables.values() for page in table):
        raise ConfigError("no table, or one with a page that the memory does not have", fix=f"pages 0 to {pages - 1}")
    if short := [name for name in tables if len(tables[name]) * size < lengths[name]]:
        raise ConfigError(f"`{short[0]}` has {lengths[short[0]]} tokens and too few pages", fix="a longer table")
    colours = _looks(list(tables))
    with styled():
        figure = new_figure(8.0, 0.9 + 0.4 * pages)
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.4))
        left.set_title("block tables")
        for y, (name, table) in enumerate(tables.items()):
            left.text(-0.3, y + 0.5, name, ha="right", va="center", weight="bold")
            for x, page in enumerate(table):
                box(left, (x, y + 0.1), (1, 0.8), colours[name], f"{page}", edge=INK)
        left.set(xlim=(-1.2, max(map(len, tables.values())) + 0.1), ylim=(max(len(tables), pages), 0))
        left.set_axis_off()
        right.set_title("memory: pages of keys and values")
        for page in range(pages):
            right.text(-0.2, page + 0.5, f"page {page}", ha="right", va="center", fontsize=8.5)
            here = [(name, table.index(page)) for name, table in tables.items() if page in table]
            for row in range(size):
                held = [(name, at * size + row) for name, at in here if at * size + row < lengths[name]]
                colour = colours[held[0][0]] if held else PAPER
                text = " ".join(f"{name}{place}" for name, place in held)
                box(right, (row, page + 0.1), (1, 0.8), colour, text, edge=FAINT, fontsize=8)
        right.set(xlim=(-1.0, size + 0.1), ylim=(pages, 0))
        right.set_axis_off()
    return figure


# ---------------------------------------------------------------------------------------------------- pages over time
# A column is a step, a row is a page. A cell has the colour and the name of the sequence whose table has the page.


def pages_over_time(steps: Sequence[Owners], pages: int) -> Picture:
    """Who has which page in each step; a page in two tables has both names.

    Raises:
        ConfigError: nothing to draw.
    """
    names = sorted({name for step in steps for name in step})
    if not names:
        raise ConfigError("no step with a sequence to draw", fix="run some steps first")
    colours = _looks(names)
    with styled():
        figure = new_figure(1.4 + 0.33 * len(steps), 1.1 + 0.24 * pages)
        axes = figure.subplots()
        for x, step in enumerate(steps):
            for page in range(pages):
                mine = [name for name in sorted(step) if page in step[name]]
                colour = colours[mine[0]] if mine else PAPER
                box(axes, (x, page), (1, 1), colour, "".join(mine), fontsize=7.5)
        axes.set(xlim=(0, len(steps)), ylim=(pages, 0), xlabel="step", ylabel="page")
        _numbered(axes, len(steps), pages)
    return figure


def _numbered(axes: Axes, columns: int, rows: int, every: int = 4) -> None:
    axes.set_xticks([x + 0.5 for x in range(0, columns, 5)], [f"{x}" for x in range(0, columns, 5)])
    axes.set_yticks([y + 0.5 for y in range(0, rows, every)], [f"{y}" for y in range(0, rows, every)])
    axes.tick_params(length=0)
    axes.grid(visible=False)


# ------------------------------------------------------------------------------------------------ what a step computes
# A bar is a step, its parts are chunks in the order of the row: one token of a sequence that generates, or tokens of a
# prompt, which are hatched. So are tokens of an answer that are computed again.


def rows_of_steps(steps: Sequence[Chunks], budget: int) -> Picture:
    """How many tokens of which sequence each step computes.

    Raises:
        ConfigError: nothing to draw.
    """
    names = sorted({name for step in steps for name, *_ in step})
    if not names:
        raise ConfigError("no step with a token to draw", fix="run some steps first")
    colours = _looks(names)
    with styled():
        figure = new_figure(1.4 + 0.33 * len(steps), 2.8)
        axes = figure.subplots()
        for x, step in enumerate(steps):
            at = 0
            for name, count, of_answer in step:
                pattern = "" if of_answer and count == 1 else "//"
                box(axes, (x, at), (1, count), colours[name], name, pattern=pattern, fontsize=7.5)
                at += count
        axes.axhline(budget, color=INK, linestyle="--", linewidth=1.2)
        axes.set(xlim=(0, len(steps)), ylim=(0, 1.12 * budget), xlabel="step", ylabel="tokens of the step")
        axes.set_xticks([x + 0.5 for x in range(0, len(steps), 5)], [f"{x}" for x in range(0, len(steps), 5)])
        axes.grid(visible=False)
        kinds = [sample("one token of an answer", PAPER), sample("tokens of a prompt", PAPER, "//")]
        legend(figure, [*kinds, sample("budget", "none", edgecolor=INK, linestyle="--")])
    return figure


# ------------------------------------------------------------------------------------------------------ who has a seat
# A row is a seat, a column is a step. An empty seat is grey: a machine that waits.


def seats(runs: Mapping[str, Sequence[Sequence[str]]], count: int) -> Picture:
    """One panel for each way to fill the seats.

    Args:
        runs: {title: the names of those computed in each step}; a sequence keeps its seat until it is over.
        count: how many seats there are.

    Raises:
        ConfigError: nothing to draw, or more names in a step than seats.
    """
    if not runs or any(len(step) > count for steps in runs.values() for step in steps):
        raise ConfigError(f"no run, or a step with more than {count} sequences", fix="as many seats as sequences")
    names = sorted({name for steps in runs.values() for step in steps for name in step})
    colours, longest = _looks(names), max(map(len, runs.values()))
    with styled():
        figure = new_figure(1.2 + 0.33 * longest, 0.5 + (0.75 + 0.3 * count) * len(runs))
        for axes, steps in panels(figure, runs, down=True, sharex=True):
            seated: list[str] = [""] * count
            for x, step in enumerate(steps):
                seated = [name if name in step else "" for name in seated]
                for name in step:
                    if name not in seated:
                        seated[seated.index("")] = name
                for y, name in enumerate(seated):
                    box(axes, (x, y), (1, 1), colours[name] if name else REFERENCE[0], name, fontsize=8)
            axes.set(xlim=(0, longest), ylim=(count, 0), ylabel="seat")
            _numbered(axes, longest, count, 1)
        figure.axes[-1].set_xlabel("step")
    return figure


# ---------------------------------------------------------------------------------------------------- shares of tokens


def shares(rows: Mapping[str, Sequence[float]]) -> Picture:
    """How often each token comes, in some distributions of the same tokens side by side.

    Raises:
        ConfigError: nothing to draw, more than three rows, or rows of different lengths.
    """
    if not 0 < len(rows) <= 3 or len({len(values) for values in rows.values()}) != 1:
        raise ConfigError("one to three distributions of the same tokens can be drawn", fix="the same length for all")
    looks, width = (PREDICTED, REFERENCE, MEASURED), 0.8 / len(rows)
    with styled():
        figure = new_figure(7.0, 2.8)
        axes = figure.subplots()
        for i, ((name, values), (colour, pattern)) in enumerate(zip(rows.items(), looks, strict=False)):
            places = [place + (i - (len(rows) - 1) / 2) * width for place in range(len(values))]
            axes.bar(places, values, width, label=name, color=colour, hatch=pattern, edgecolor=INK, linewidth=0.6)
        axes.set(xlabel="token", ylabel="share of the draws", xticks=range(len(next(iter(rows.values())))))
        legend(figure, axes.get_legend_handles_labels()[0])
    return figure


# ---------------------------------------------------------------------------------------------------- tokens a second


def tokens_per_second(
    sequences: Sequence[int],
    predicted: Sequence[float],
    measured: Sequence[float] | None = None,
    *,
    limits: Mapping[str, Sequence[float]] | None = None,
    title: str = "",
) -> Picture:
    """Tokens a second of all sequences together, over their number; both axes are logarithmic.

    Args:
        sequences: how many there are, of each point.
        predicted, measured: tokens a second.
        limits: {what bounds it: tokens a second}, as pale lines behind the others.
        title: above the picture.

    Raises:
        ConfigError: nothing to draw, or lines of different lengths.
    """
    lines = [predicted, *([measured] if measured is not None else []), *(limits or {}).values()]
    if not sequences or any(len(line) != len(sequences) for line in lines):
        raise ConfigError("a point for each number of sequences is needed", fix="lines of the same length")
    with styled():
        figure = new_figure(6.6, 3.4, title)
        axes = figure.subplots()
        for (name, values), style in zip((limits or {}).items(), (":", "-."), strict=False):
            axes.plot(sequences, values, style, color=FAINT, linewidth=1.6, label=name)
        axes.plot(sequences, predicted, label="predicted", **PREDICTED_LINE)
        if measured is not None:
            axes.plot(sequences, measured, marker="o", markersize=5, label="measured", **MEASURED_LINE)
        axes.set(xscale="log", yscale="log", xlabel="sequences that generate together", ylabel="tokens a second")
        axes.set_xticks(list(sequences), [f"{n}" for n in sequences])
        axes.minorticks_off()
        axes.legend()
    return figure
