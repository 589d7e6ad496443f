"""How many boxes of one size something fills: GPUs and what must lie in them, each box as full as it is.

Bars on a logarithmic axis have lengths that mean nothing; boxes can be counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, MEASURED, blank, new_figure, styled

ROW = 1.5  # height of a row, in boxes


def boxes_filled(
    need: Mapping[str, float], box: float, *, unit: str = "GB", what: str = "GPU", title: str = ""
) -> Figure:
    """A row of boxes for each entry, filled from the left, with its number.

    Args:
        need: {name: how much}, drawn from the top in this order.
        box: how much one box holds.
        unit: of both.
        what: a box is.
        title: above the picture.

    Raises:
        ConfigError: nothing to draw, or a box that holds nothing.
    """
    if not need or box <= 0:
        raise ConfigError(f"{len(need)} rows of boxes of {box} {unit}", fix="give at least one row and a positive size")
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
            boxes = f"{full:.{2 if full < 1 else 3}g} {what}" + ("s" if full > 1 else "")
            axes.text(math.ceil(full) + 0.4, y + 0.5, f"{amount:g} {unit}: {boxes}", va="center", fontsize=9)
        axes.text(0, ROW * len(need) + 0.1, f"one box: one {what} of {box:g} {unit}", va="center", fontsize=8)
        axes.set_xlim(-5, most + 7)
        axes.set_ylim(ROW * len(need) + 0.6, -0.2)
        blank(axes)
    return figure
