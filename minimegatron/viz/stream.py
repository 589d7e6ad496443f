"""Who reads which sample: the stream of a run from left to right, a row a stretch of the run, coloured by rank.

A box is one place of the stream, and the number in it is the sample that stands there. A thick line is the end of an
epoch, a gap the end of a step. What is drawn are the ids that the ranks ask for, so a sample that two ranks read, or
none, is seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, blank, box, new_figure, rank_colours, styled

Steps = Sequence[Sequence[Sequence[int]]]  # [step][rank]: the ids that this rank reads
STEP, ROW = 0.35, 2.0  # gap between two steps; height of a row; both in boxes


def who_reads(runs: Sequence[tuple[str, Steps]], num_samples: int, *, title: str = "") -> Figure:
    """One row for each run; the second goes on where the first has ended.

    Args:
        runs: (what to write before the row, its steps).
        num_samples: of an epoch, whose ends are marked.
        title: above the picture.

    Raises:
        ConfigError: nothing to draw.
    """
    if not any(ids for _, steps in runs for step in steps for ids in step):
        raise ConfigError("no rank reads a sample", fix="give at least one step with one id")
    ranks = max(len(step) for _, steps in runs for step in steps)
    palette, place = rank_colours(ranks), 0
    widest = max(3.2 * ranks, *(sum(map(len, itertools.chain(*steps))) + STEP * len(steps) for _, steps in runs))
    margin = 0.8 + 0.3 * max(len(name) for name, _ in runs)
    with styled():
        figure = new_figure(0.34 * (widest + margin), 0.36 * (ROW * len(runs) + 2.1) + 0.3 * bool(title), title)
        axes = figure.subplots()
        for row, (name, steps) in enumerate(runs):
            x, y = 0.0, ROW * row
            axes.text(-0.4, y + 0.5, name, ha="right", va="center", fontsize=9)
            first = sum(len(earlier) for _, earlier in runs[:row])  # steps are numbered through all rows
            for number, step in enumerate(steps):
                begin = x
                for rank, ids in enumerate(step):
                    for i in ids:
                        box(axes, (x, y), (1, 1), palette[rank], str(i))
                        x, place = x + 1, place + 1
                        if place % num_samples == 0:
                            axes.plot([x, x], [y - 0.22, y + 1.08], color=INK, linestyle="-", linewidth=3, zorder=3)
                axes.text((begin + x) / 2, y + 1.42, f"step {first + number}", ha="center", va="center", fontsize=8)
                x += STEP
        for rank in range(ranks):
            at, y = 3.2 * rank, ROW * len(runs) + 0.25
            axes.add_patch(Rectangle((at, y), 0.6, 0.6, facecolor=palette[rank]))
            axes.text(at + 0.8, y + 0.3, f"rank {rank}", va="center", fontsize=8)
        axes.text(
            0, ROW * len(runs) + 1.3, "number: id of a sample; thick line: end of an epoch", va="center", fontsize=8
        )
        axes.set_xlim(-margin, widest)
        axes.set_ylim(ROW * len(runs) + 1.7, -0.4)
        blank(axes)
    return figure
