"""Drawings of lab 09: a law through losses of small models, and what a run did beside what it should have done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import FAINT, INK, PALETTE, Picture, new_figure, panels, styled


def law_of_sizes(
    points: Sequence[tuple[int, float]], hit: tuple[int, float], law: Mapping[str, float], *, floor: float,
    runs: Sequence[tuple[int, float]] = (), others: Mapping[str, float] | None = None,
) -> Picture:  # fmt: skip
    """Losses over sizes, the law through them, and the model that it was to predict.

    Args:
        points: (parameters, loss) of the models that the law was fitted to.
        hit: that of the predicted one.
        law: E, A and alpha.
        floor: the entropy of the text.
        runs: (parameters, loss) of single runs, of which the others are means.
        others: what other ways predict for the size of `hit`.

    Raises:
        ConfigError: nothing to draw.
    """
    if not points:
        raise ConfigError("no model to draw", fix="give at least one (parameters, loss)")
    first, last = min(n for n, _ in points) / 1.3, hit[0] * 1.6
    sizes = [first * (last / first) ** (i / 99) for i in range(100)]
    with styled():
        figure = new_figure(6.4, 3.0)
        axes = figure.subplots()
        axes.plot(sizes, [law["E"] + law["A"] * n ** -law["alpha"] for n in sizes], "-", color=INK, label="your law")
        if runs:
            axes.plot(*zip(*runs, strict=True), ".", color=FAINT, label="single runs", zorder=1)
        axes.plot(*zip(*points, strict=True), "o", color=PALETTE[2], markeredgecolor=INK, label="fitted to")
        axes.plot(*hit, "D", color=PALETTE[1], markeredgecolor=INK, markersize=8, label="predicted, then trained")
        for (name, loss), mark in zip((others or {}).items(), ("v", "^"), strict=False):
            axes.plot(hit[0], loss, mark, color="none", markeredgecolor=INK, label=name)
        axes.axhline(law["E"], linestyle="--", color=FAINT, label="E of your law")
        axes.axhline(floor, linestyle=":", color=INK, label="entropy of the language")
        axes.set(xscale="log", xlabel="parameters", ylabel="loss, nats a token")
        axes.legend(fontsize=7.5)
    return figure


def panels_of_bars(shown: Mapping[str, Sequence[float]], names: Sequence[str]) -> Picture:
    """A panel for each quantity, with a bar for each name and a scale of its own.

    Args:
        shown: {quantity: a number for each name}.
        names: of the bars, from the top.

    Raises:
        ConfigError: nothing to draw, or not a number for each name.
    """
    if not shown or any(len(values) != len(names) for values in shown.values()):
        raise ConfigError(f"numbers of {len(names)} bars are needed", fix="one for each name, in every panel")
    with styled():
        figure = new_figure(1.8 + 2.0 * len(shown), 0.9 + 0.32 * len(names))
        for i, (axes, values) in enumerate(panels(figure, shown, sharey=True)):
            axes.barh(range(len(names)), values, 0.7, color=PALETTE[i % len(PALETTE)], edgecolor=INK, linewidth=0.6)
            axes.set_yticks(range(len(names)), names, fontsize=8)
            axes.set_ylim(len(names) - 0.5, -0.5)
            axes.grid(axis="y", visible=False)
    return figure
