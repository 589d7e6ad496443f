"""Lists that wait for each other: how far each rank comes, and the circle that stops them.

A row of boxes a rank, in the order of its list. What it can do has its colour, what it never reaches is hatched; the
box at which it stands, the first of these, has a thick frame. An arrow goes from the box at which a rank stands to the
box that it waits for, on another rank. That box stands behind the one at which its own rank waits, so it is not reached
either: follow the arrows, and you are back where you began.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, WORK, blank, box, new_figure, styled

WIDE, HIGH, ROW = 0.8, 0.62, 1.45  # of a box; from rank to rank
AROUND = 0.06  # from a box to the frame around it
STANDS: dict[str, Any] = {"edgecolor": INK, "linewidth": 2.4}


def draw_deadlock(
    lists: Sequence[Sequence[str]],
    reached: Sequence[int],
    waits: Sequence[tuple[int, int, int, int]],
    title: str = "",
) -> Figure:
    """The lists, and who waits for whom.

    Args:
        lists: each rank's words, such as F0 or B3.1.
        reached: how many of them each rank can do.
        waits: (rank, place in its list, other rank, place in that list): what stands before which.
        title: above the picture.

    Raises:
        ConfigError: no rank waits.
    """
    if not waits:
        raise ConfigError("no rank waits for another", fix="draw lists that run with draw_schedule")
    longest = max(map(len, lists))
    with styled():
        figure = new_figure(1.8 + 1.0 * longest, 0.8 + 0.95 * len(lists), title)
        axes = figure.subplots()
        for rank, words in enumerate(lists):
            axes.text(-0.25, ROW * rank + HIGH / 2, f"rank {rank}", ha="right", va="center")
            for i, word in enumerate(words):
                colour, pattern = (WORK.get(word[0], "white"), "") if i < reached[rank] else ("white", "///")
                box(axes, (i, ROW * rank), (WIDE, HIGH), colour, word, pattern=pattern, edge=INK)
            if reached[rank] < len(words):
                place = (reached[rank] - AROUND, ROW * rank - AROUND)
                axes.add_patch(Rectangle(place, WIDE + 2 * AROUND, HIGH + 2 * AROUND, fill=False, **STANDS))
        for rank, at, other, needs in waits:
            down, side = other > rank, 0.12 if other > rank else -0.12
            start = at + WIDE / 2 + side, ROW * rank + HIGH * down
            end = needs + WIDE / 2 + side, ROW * other + HIGH * (not down)
            shape = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.6, "mutation_scale": 14}
            axes.annotate("", end, start, arrowprops=shape)
        samples = [
            Patch(facecolor=WORK["F"], edgecolor=INK, linewidth=0.5, label="done"),
            Patch(facecolor="white", edgecolor=INK, linewidth=0.5, hatch="///", label="never reached"),
            Patch(label="the rank stands here", fill=False, **STANDS),
        ]
        marks = axes.plot([], [], color=INK, linewidth=1.6, marker=">", markersize=6, label="waits for")
        figure.legend(handles=[*samples, *marks], loc="outside lower center", ncols=4 if longest > 3 else 2)
        axes.set_xlim(-1.2, longest)
        axes.set_ylim(ROW * (len(lists) - 1) + HIGH + 0.1, -0.1)
        blank(axes)
    return figure
