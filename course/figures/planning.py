"""Drawings of lab 12: the factor by which each axis divides an amount, and published runs beside predictions."""

from __future__ import annotations

import math
from collections.abc import Mapping

from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import (
    INK,
    PAPER,
    PREDICTED,
    REFERENCE,
    WORK,
    Picture,
    legend,
    new_figure,
    panels,
    rows_of_bars,
    styled,
    text_on,
)

# ---------------------------------------------------------------------------------------------------- what divides what
# A table of factors: what doubling an axis divides an amount by, as computed and as predicted.

NEAR = 1.25  # a factor of 1.9 is as good as one of 2


def factors(
    computed: Mapping[str, Mapping[str, float]],
    predicted: Mapping[str, Mapping[str, float]] | None = None,
    *,
    title: str = "",
    what: str = "",
) -> Picture:
    """Draw a square for each row and column, with the factor by which the amount is divided, and the predicted factor.

    Args:
        computed: {row: {column: factor}}; all rows have the same columns.
        predicted: the same, or some of it; where it is far from the computed factor, the square shows it.
        title: above the picture.
        what: the label of the columns, below them.

    Raises:
        ConfigError: nothing to draw, or rows with other columns.
    """
    columns = list(next(iter(computed.values()), {}))
    if not columns or any(list(row) != columns for row in computed.values()):
        raise ConfigError("factors of rows that have not the same columns", fix="give every row each column")
    with styled():
        figure = new_figure(2.6 + 1.35 * len(columns), 1.3 + 0.62 * len(computed), title)
        axes = figure.subplots()
        for y, (row, cells) in enumerate(computed.items()):
            for x, (column, factor) in enumerate(cells.items()):
                colour = WORK["B"] if factor > NEAR else WORK["F"] if factor < 1 / NEAR else PAPER
                axes.add_patch(_square(x, y, colour))
                guess = (predicted or {}).get(row, {}).get(column)
                middle = y if guess is None else y - 0.14
                axes.text(x, middle, factor_text(factor), ha="center", va="center", fontsize=11, color=text_on(colour))
                if guess is not None:
                    near = guess > 0 and abs(math.log(guess / factor)) < math.log(NEAR)
                    note = f"{'✔' if near else '✘'} predicted: {factor_text(guess)}"
                    axes.text(x, y + 0.26, note, ha="center", va="center", fontsize=7.5, color=text_on(colour))
        axes.set_xlim(-0.5, len(columns) - 0.5)
        axes.set_ylim(len(computed) - 0.5, -0.5)
        axes.set_xticks(range(len(columns)), columns)
        axes.set_yticks(range(len(computed)), list(computed))
        axes.tick_params(length=0)
        axes.grid(visible=False)
        axes.set_xlabel(what)
    return figure


def factor_text(factor: float) -> str:
    """The text of a factor: `÷ 2`, `same`, `× 2`; for other factors one digit more."""
    near = round(factor if factor >= 1 else 1 / factor, 1)
    return "same" if near == 1 else f"{'÷' if factor > 1 else '×'} {near:g}"


def _square(x: float, y: float, colour: str) -> Rectangle:
    return Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor=INK, linewidth=0.6)


# ------------------------------------------------------------------------------------------- published beside predicted
# A pair of bars for each published run, a panel for each table, with the ratio beside each pair.


def agreement(
    tables: Mapping[str, Mapping[str, tuple[float, float]]], *, what: str, beside: str = "published", title: str = ""
) -> Picture:
    """Draw published, or measured, and predicted numbers, run by run.

    Args:
        tables: {name of a table: {run: (published, predicted)}}.
        what: the axis of each panel: "TFLOP/s a GPU".
        beside: what the first number of a pair is.
        title: above the picture.

    Raises:
        ConfigError: nothing to draw.
    """
    if not tables or not all(tables.values()):
        raise ConfigError("no run to compare", fix="give each table one run at least")
    rows = max(len(runs) for runs in tables.values())
    with styled():
        figure = new_figure(1.0 + 3.3 * len(tables), 1.5 + 0.36 * rows, title)
        for axes, runs in panels(figure, tables):
            most = max(max(pair) for pair in runs.values())
            for side, label, (colour, pattern) in ((0, beside, REFERENCE), (1, "predicted", PREDICTED)):
                places = [row + 0.38 * side for row in range(len(runs))]
                lengths = [pair[side] for pair in runs.values()]
                axes.barh(places, lengths, 0.36, label=label, color=colour, hatch=pattern, edgecolor=INK, linewidth=0.6)
            for row, (published, predicted) in enumerate(runs.values()):
                at = max(published, predicted) + 0.02 * most
                axes.text(at, row + 0.19, f"x {predicted / published:.2f}", va="center", fontsize=8)
            rows_of_bars(axes, list(runs), [row + 0.19 for row in range(len(runs))])
            axes.set_ylim(rows - 0.4, -0.4)
            axes.set_xlim(0, 1.25 * most)
            axes.set_xlabel(what)
        legend(figure, figure.axes[0].get_legend_handles_labels()[0], fontsize=None)
    return figure
