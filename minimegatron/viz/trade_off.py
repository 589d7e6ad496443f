"""What a schedule costs in memory and in time, as a point in a plane: the nearer to the lower left, the better.

To the right: the activations that the fullest rank keeps, in units of what a rank keeps of one microbatch (a chunk
counts 1/v of it). Upwards: the bubble, idle time over work. Points that lie on each other share one label.
"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, MEASURED, new_figure, styled

Point = tuple[float, float]  # activations kept, bubble


def trade_off(predicted: Mapping[str, Point], measured: Mapping[str, Point] | None = None, title: str = "") -> Figure:
    """Schedules by memory and bubble.

    Args:
        predicted: {name: (activations kept, bubble)}, a bubble of 0.25 being a quarter of the work.
        measured: of the same names, drawn filled beside the hollow ones.
        title: above the picture.

    Raises:
        ConfigError: no point at all, or something is measured that was not predicted.
    """
    measured = measured or {}
    if not predicted or not set(measured) <= set(predicted):
        raise ConfigError(
            f"points for {sorted(predicted)} and measured ones for {sorted(measured)}",
            fix="predict at least one, and each that is measured",
        )
    together: dict[tuple[float, float], list[str]] = {}
    for name, (kept, bubble) in predicted.items():
        together.setdefault((round(kept, 3), round(bubble, 4)), []).append(name)
    with styled():
        figure = new_figure(6.8, 3.6, title)
        axes = figure.subplots()
        for (kept, bubble), names in together.items():
            axes.plot([kept], [100 * bubble], "o", markersize=9, markerfacecolor="white", markeredgecolor=INK)
            crowded = any(kept < x < 1.4 * kept and abs(y - bubble) < 0.02 for x, y in together)
            offset, side = ((-10, 0), "right") if crowded else ((10, 0), "left")
            axes.annotate(
                ", ".join(names), (kept, 100 * bubble), offset, textcoords="offset points", va="center", ha=side,
                fontsize=9,
            )  # fmt: skip
        for name, (kept, bubble) in measured.items():
            (x, y) = predicted[name]
            axes.plot([x, kept], [100 * y, 100 * bubble], linewidth=0.8, linestyle=":", color=INK)
            axes.plot([kept], [100 * bubble], "o", markersize=6, color=MEASURED[0])
        axes.plot([], [], "o", markersize=9, markerfacecolor="white", markeredgecolor=INK, label="predicted")
        if measured:
            axes.plot([], [], "o", markersize=6, color=MEASURED[0], label="measured")
        points = [*predicted.values(), *measured.values()]
        axes.set_xlim(0, 1.3 * max(kept for kept, _ in points))
        axes.set_ylim(0, 115 * max(*(bubble for _, bubble in points), 0.01))
        axes.set_xlabel("most activations kept (1: what a rank keeps of one microbatch)")
        axes.set_ylabel("bubble, % of the work")
        axes.text(0.01, 0.02, "↙ better", transform=axes.transAxes, fontsize=9)
        axes.grid(visible=True, axis="both")
        if measured:
            axes.legend(loc="upper left")
    return figure
