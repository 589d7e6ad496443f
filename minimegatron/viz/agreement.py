"""What was predicted beside what others have published: a pair of bars for each run, a panel for each table.

Each pair carries its ratio, since a difference of a few percent cannot be seen on bars.
"""

from __future__ import annotations

from collections.abc import Mapping

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, PREDICTED, REFERENCE, Picture, new_figure, styled


def agreement(tables: Mapping[str, Mapping[str, tuple[float, float]]], *, what: str, title: str = "") -> Picture:
    """Published and predicted, run by run.

    Args:
        tables: {name of a table: {run: (published, predicted)}}.
        what: the axis of each panel: "TFLOP/s a GPU".
        title: above the picture.

    Raises:
        ConfigError: nothing to draw.
    """
    if not tables or not all(tables.values()):
        raise ConfigError("no run to compare", fix="give each table one run at least")
    rows = max(len(runs) for runs in tables.values())
    with styled():
        figure = new_figure(1.0 + 3.3 * len(tables), 1.5 + 0.36 * rows, title)
        panels = figure.subplots(1, len(tables), squeeze=False)[0]
        for axes, (name, runs) in zip(panels, tables.items(), strict=True):
            most = max(max(pair) for pair in runs.values())
            for side, label, (colour, pattern) in ((0, "published", REFERENCE), (1, "predicted", PREDICTED)):
                places = [row + 0.38 * side for row in range(len(runs))]
                lengths = [pair[side] for pair in runs.values()]
                axes.barh(places, lengths, 0.36, label=label, color=colour, hatch=pattern, edgecolor=INK, linewidth=0.6)
            for row, (published, predicted) in enumerate(runs.values()):
                at = max(published, predicted) + 0.02 * most
                axes.text(at, row + 0.19, f"x {predicted / published:.2f}", va="center", fontsize=8)
            axes.set_yticks([row + 0.19 for row in range(len(runs))], list(runs))
            axes.set_ylim(rows - 0.4, -0.4)
            axes.set_xlim(0, 1.25 * most)
            axes.set_title(name)
            axes.set_xlabel(what)
            axes.grid(axis="x", visible=True)
            axes.grid(axis="y", visible=False)
            axes.tick_params(axis="y", length=0)
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure
