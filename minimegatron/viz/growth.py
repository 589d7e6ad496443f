"""How a cost grows with the number of ranks: formulas as dashed curves, counts as dots on them.

One pair of bars can only show that a formula is right once. Over several sizes the same comparison shows what a formula
is for: which way of doing something still works on many ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, MEASURED, PREDICTED_LINE, new_figure, styled

MARKERS = "osD^v"


def against_ranks(
    formulas: Mapping[str, Callable[[int], float]],
    counted: Mapping[str, Mapping[int, float]],
    *,
    ranks: Sequence[int] = (2, 3, 4, 6, 8, 12, 16),
    ylabel: str = "",
    title: str = "",
) -> Figure:
    """A curve for each formula, named at its right end, and a dot for each number that was counted.

    Args:
        formulas: {name: cost of so many ranks}.
        counted: {name: {ranks: cost}}; names are those of `formulas`, or some of them.
        ranks: where the curves are computed.
        ylabel: what is counted.
        title: above the picture.

    Raises:
        ConfigError: no formula, or something was counted that has none.
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
