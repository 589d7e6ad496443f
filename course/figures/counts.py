"""Drawings of several labs that compare amounts: GPUs that something fills, costs that grow with the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, MEASURED, PREDICTED_LINE, blank, new_figure, styled

# --------------------------------------------------------------------------------------- how many boxes something fills
# Boxes of one size, each as full as it is: bars on a logarithmic axis have lengths that mean nothing, boxes can be
# counted.

ROW = 1.5  # height of a row, in boxes


def boxes_filled(need: Mapping[str, float], box: float, *, title: str = "") -> Figure:
    """Draw a row of GPUs for each entry, filled from the left, with their number.

    Args:
        need: {name: GB}, drawn from the top in this order.
        box: GB of one GPU.
        title: above the picture.

    Raises:
        ConfigError: nothing to draw, or a box that holds nothing.
    """
    if not need or box <= 0:
        raise ConfigError(f"{len(need)} rows of boxes of {box} GB", fix="give at least one row and a positive size")
    most = max(math.ceil(amount / box) for amount in need.values())
    colour, _ = MEASURED
    with styled():
        figure = new_figure(0.22 * (most + 12), 0.27 * (ROW * len(need) + 1.6), title)
        axes = figure.subplots()
        for row, (name, amount) in enumerate(need.items()):
            y, full = ROW * row, amount / box
            axes.text(-0.5, y + 0.5, name, ha="right", va="center", fontsize=9)
            for i in range(math.ceil(full)):
                axes.add_patch(Rectangle((i, y), 0.9 * min(1.0, full - i), 0.9, facecolor=colour))
                axes.add_patch(Rectangle((i, y), 0.9, 0.9, fill=False, edgecolor=INK, linewidth=0.8))
            boxes = f"{full:.{2 if full < 1 else 3}g} GPU" + ("s" if full > 1 else "")
            axes.text(math.ceil(full) + 0.4, y + 0.5, f"{amount:g} GB: {boxes}", va="center", fontsize=9)
        axes.text(0, ROW * len(need) + 0.1, f"one box: one GPU of {box:g} GB", va="center", fontsize=8)
        axes.set_xlim(-5, most + 7)
        axes.set_ylim(ROW * len(need) + 0.6, -0.2)
        blank(axes)
    return figure


# ---------------------------------------------------------------------------- how a cost grows with the number of ranks
# Formulas are dashed curves, counts are dots on them. One pair of bars shows that a formula is right once; over several
# sizes the same comparison shows which way of doing something still works on many ranks.

MARKERS = "osD^v"


def against_ranks(
    formulas: Mapping[str, Callable[[int], float]],
    counted: Mapping[str, Mapping[int, float]],
    *,
    ranks: Sequence[int] = (2, 3, 4, 6, 8, 12, 16),
    ylabel: str = "",
    title: str = "",
) -> Figure:
    """Draw a curve for each formula, named at its right end, and a dot for each counted number.

    Args:
        formulas: {name: the cost as a function of the number of ranks}.
        counted: {name: {ranks: cost}}; names are those of `formulas`, or some of them.
        ranks: where the curves are computed.
        ylabel: what is counted.
        title: above the picture.

    Raises:
        ConfigError: no formula, or counted numbers without a formula.
    """
    if not formulas:
        raise ConfigError("no formula to draw", fix="give at least one")
    if strangers := sorted(set(counted) - set(formulas)):
        raise ConfigError(f"{strangers[0]!r} was counted and has no formula", fix=f"one of {', '.join(formulas)}")
    dots: dict[str, Any] = {"color": MEASURED[0], "markeredgecolor": INK, "markersize": 7, "linestyle": "none"}
    with styled():
        figure = new_figure(7.6, 3.2)
        axes = figure.subplots()
        for (name, formula), marker in zip(formulas.items(), MARKERS, strict=False):
            at = [float(formula(n)) for n in ranks]
            axes.plot(list(ranks), at, **PREDICTED_LINE)
            axes.text(ranks[-1] + 0.2, at[-1], f" {name}", va="center", fontsize=9)
            points = sorted(counted.get(name, {}).items())
            axes.plot([n for n, _ in points], [cost for _, cost in points], marker, clip_on=False, zorder=3, **dots)
        axes.plot([], [], label="predicted", **PREDICTED_LINE)
        for name, marker in zip(formulas, MARKERS, strict=False):
            if counted.get(name):
                axes.plot([], [], marker, label=f"counted, {name}", **dots)
        axes.set(xlabel="ranks", ylabel=ylabel, xticks=list(ranks), xlim=(ranks[0] - 0.4, ranks[-1] * 1.36))
        axes.set_ylim(bottom=0)
        axes.set_title(title)
        figure.legend(loc="outside lower center", ncols=3)
    return figure
