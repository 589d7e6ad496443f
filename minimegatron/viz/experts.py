"""Which token goes to which expert, and how evenly: the routing of a batch as a grid, and the load as training goes on.

In the grid a row is a token, a column an expert, a filled square a row that travels; the columns of one rank have one
colour. A square with a cross was chosen and dropped. In the curves each expert's share of all rows is a band: equal
bands are an even load, a band that thins out is an expert that gets no tokens any more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import FAINT, INK, blank, colours, hatch, new_figure, rank_colours, styled

Grid = Sequence[Sequence[bool]]


def routing_grid(maps: Mapping[str, Grid], ranks: int = 1, kept: Mapping[str, Grid] | None = None) -> Figure:
    """A grid for each routing.

    Args:
        maps: {title: for each token, for each expert, whether it goes there}.
        ranks: over how many ranks the experts are dealt out, consecutive ones together.
        kept: {title: the same of what a capacity has left}; a title that is not in it drops nothing.

    Raises:
        ConfigError: nothing to draw, rows of different lengths, or experts that cannot be dealt out.
    """
    if not maps:
        raise ConfigError("no routing to draw", fix="give at least one")
    for title, grid in maps.items():
        widths = {len(row) for row in grid}
        if len(widths) != 1 or 0 in widths:
            raise ConfigError(f"the rows of {title!r} are {sorted(widths)} wide", fix="one column for each expert")
        if widths.pop() % ranks:
            raise ConfigError(
                f"{len(grid[0])} experts of {title!r} cannot be dealt out over {ranks} ranks",
                fix="as many on each rank",
            )
    with styled():
        width = max(0.26 * len(grid[0]) + 1.1 for grid in maps.values())
        height = max(0.26 * len(grid) + 0.9 for grid in maps.values())
        figure = new_figure(width * len(maps), height)
        for axes, (title, grid) in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps.items(), strict=True):
            _grid(axes, grid, ranks, (kept or {}).get(title, grid))
            axes.set_title(title)
    return figure


def _grid(axes: Axes, grid: Grid, ranks: int, kept: Grid) -> None:
    tokens, experts = len(grid), len(grid[0])
    local, palette = experts // ranks, rank_colours(ranks)
    for t, row in enumerate(grid):
        for e, goes in enumerate(row):
            rank = e // local
            if goes and kept[t][e]:
                face, pattern = palette[rank], hatch(rank)
                axes.add_patch(Rectangle((e, t), 1, 1, facecolor=face, hatch=pattern, edgecolor=INK, linewidth=0.5))
            else:
                axes.add_patch(Rectangle((e, t), 1, 1, fill=False, edgecolor=FAINT, linewidth=0.3))
                if goes:
                    axes.plot([e + 0.2, e + 0.8], [t + 0.2, t + 0.8], color=INK, linestyle="-", linewidth=1.0)
                    axes.plot([e + 0.2, e + 0.8], [t + 0.8, t + 0.2], color=INK, linestyle="-", linewidth=1.0)
    for e in range(experts):
        count = sum(bool(row[e]) for row in kept)
        axes.text(e + 0.5, tokens + 0.25, str(count), ha="center", va="top", fontsize=8)
    for rank in range(ranks if ranks > 1 else 0):
        axes.text((rank + 0.5) * local, -0.25, f"rank {rank}", ha="center", va="bottom", fontsize=8)
        if rank:
            axes.plot([rank * local] * 2, [0, tokens], color=INK, linestyle="-", linewidth=1.4)
    axes.text(-0.2, tokens + 0.25, "rows", ha="right", va="top", fontsize=8)
    axes.text(-0.3, tokens / 2, "tokens", ha="right", va="center", rotation=90, fontsize=8)
    axes.set_xlim(-2.0, experts + 0.1)
    axes.set_ylim(tokens + 1.4, -1.2)
    blank(axes)


def load_bands(
    loads: Mapping[str, Sequence[Sequence[float]]], what: str = "share of the rows", every: int = 1
) -> Figure:
    """A panel for each run: how the rows of every step are shared among the experts.

    Args:
        loads: {title: for each step, for each expert, its rows}.
        what: the axis of the shares.
        every: so many steps are added up and drawn as one; those left over at the end are not drawn.

    Raises:
        ConfigError: nothing to draw, or a step without any row.
    """
    if not loads:
        raise ConfigError("no load to draw", fix="give at least one run")
    for title, steps in loads.items():
        if len(steps) < every or not all(sum(step) > 0 for step in steps):
            raise ConfigError(f"a step of {title!r} has no rows", fix="leave out what never ran")
    with styled():
        figure = new_figure(3.1 * len(loads) + 0.4, 2.9)
        panels = figure.subplots(1, len(loads), squeeze=False, sharey=True)[0]
        for axes, (title, steps) in zip(panels, loads.items(), strict=True):
            _bands(axes, steps, every)
            axes.set_title(title)
            axes.set_xlabel("step")
        panels[0].set_ylabel(what)
    return figure


def _bands(axes: Axes, steps: Sequence[Sequence[float]], every: int) -> None:
    experts, starts = len(steps[0]), range(0, len(steps) - every + 1, every)
    sums = [[sum(step[e] for step in steps[i : i + every]) for e in range(experts)] for i in starts]
    shares = [[one[e] / sum(one) for one in sums] for e in range(experts)]
    bands = axes.stackplot(starts, *shares, colors=colours(experts), edgecolor=INK, linewidth=0.4)
    for e, band in enumerate(bands):
        band.set_hatch(hatch(e))
    low = 0.0
    for e in range(experts):  # name it where the run ends, if there is room for a digit
        share = shares[e][-1]
        if share >= 0.05:
            axes.annotate(str(e), (1.01, low + share / 2), xycoords="axes fraction", va="center", fontsize=8)
        low += share
    axes.set_xlim(0, max(starts[-1], 1))
    axes.set_ylim(0, 1)
    axes.grid(visible=False)
