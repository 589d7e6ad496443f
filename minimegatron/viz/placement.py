"""Which rank holds which stages: the layers from left to right, a row of boxes a rank, and the way of a microbatch.

    straight       a stage a rank                       one way down
    round robin    stages r, r+p, r+2p, ... on rank r   down, and back to rank 0 with the next chunk
    V              stages r and 2p-1-r on rank r        down and up again: the last stage is where the first one is

A box is a stage; light is a rank's first chunk, dark its last, as in the pictures of schedules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, WORK, box, new_figure, styled
from minimegatron.viz.schedule import DEEP, shade


def placements(panels: Mapping[str, Sequence[Sequence[int]]]) -> Figure:
    """A panel for each placement.

    Args:
        panels: {title: `[rank][chunk]` -> stage}, as `actions.round_robin` and `actions.v_shaped` give it.

    Raises:
        ConfigError: nothing to draw, or a placement that does not hold every stage once.
    """
    if not panels:
        raise ConfigError("no placement to draw", fix="give at least one")
    for title, placement in panels.items():
        stages = sorted(stage for row in placement for stage in row)
        if not stages or stages != list(range(len(stages))):
            raise ConfigError(f"the stages of {title!r} are {stages}", fix="hold every stage from 0 on exactly once")
    with styled():
        figure = new_figure(3.3 * len(panels), 2.6)
        for axes, (title, placement) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(),
                                            strict=True):  # fmt: skip
            _panel(axes, placement)
            axes.set_title(title)
        samples = [Patch(facecolor=WORK["F"], edgecolor=INK, linewidth=0.5, label="a rank's first chunk")]
        if any(len(row) > 1 for placement in panels.values() for row in placement):
            samples.append(Patch(facecolor=DEEP["F"], edgecolor=INK, linewidth=0.5, label="its last chunk"))
        way = Line2D([], [], color=INK, linewidth=1.2, label="the way of a microbatch, forward")
        figure.legend(handles=[*samples, way], loc="outside lower center", ncols=3)
    return figure


def _panel(axes: Axes, placement: Sequence[Sequence[int]]) -> None:
    """Stages from left to right at their rank's height, and a line from each to the next."""
    place = {stage: (rank, chunk) for rank, row in enumerate(placement) for chunk, stage in enumerate(row)}
    chunks = max(1, len(placement[0]) - 1)
    for stage in range(len(place) - 1):
        (a, _), (b, _) = place[stage], place[stage + 1]
        axes.annotate(
            "", (stage + 1.5, b), (stage + 0.5, a), zorder=0,
            arrowprops={"arrowstyle": "-", "color": INK, "linewidth": 1.2, "shrinkA": 0, "shrinkB": 0},
        )  # fmt: skip
    for stage, (rank, chunk) in place.items():
        colour = shade(WORK["F"], DEEP["F"], chunk / chunks)
        box(axes, (stage + 0.04, rank - 0.34), (0.92, 0.68), colour, str(stage), edge=INK)
    axes.set_xlim(0, len(place))
    axes.set_ylim(len(placement) - 0.4, -0.6)
    axes.set_yticks(range(len(placement)), [f"rank {rank}" for rank in range(len(placement))])
    axes.set_xticks([])
    axes.set_xlabel("stages, from the first layers to the last", fontsize=9)
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
