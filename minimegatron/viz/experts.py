"""Which token goes to which expert, and how evenly: the routing of a batch as a grid, and the load as training goes on.

In the grid a line is a token, a column an expert, named above it; a filled square is a row, one token on its way to one
expert; the columns of one rank have one colour, and below them stand their sums. A square with a cross was chosen and
dropped. In the bands each expert's share of all rows is
a band in the colour of its rank, with its number where the run ends: equal bands are an even load, a band that thins
out is an expert that gets no tokens any more, and the thick line is where one rank's work ends and the next one's
begins. `imbalance` shows what that costs in time, and that the loss hardly shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import (
    FAINT,
    INK,
    MEASURED_LINE,
    REFERENCE_LINE,
    blank,
    colours,
    hatch,
    new_figure,
    rank_colours,
    styled,
)

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
        _obey_ranks(widths.pop(), ranks, title)
    with styled():
        width = max(0.26 * len(grid[0]) + 1.2 for grid in maps.values())
        height = max(0.26 * len(grid) + (1.3 if ranks == 1 else 1.6) for grid in maps.values())
        figure = new_figure(width * len(maps), height)
        for axes, (title, grid) in zip(figure.subplots(1, len(maps), squeeze=False)[0], maps.items(), strict=True):
            _grid(axes, grid, ranks, (kept or {}).get(title, grid))
            axes.set_title(title)
    return figure


def _obey_ranks(experts: int, ranks: int, title: str) -> None:
    if experts % ranks:
        raise ConfigError(
            f"{experts} experts of {title!r} cannot be dealt out over {ranks} ranks", fix="as many on each rank"
        )


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
        axes.text(e + 0.5, -0.2, str(e), ha="center", va="bottom", fontsize=8)
    for rank in range(ranks if ranks > 1 else 0):
        middle, count = (rank + 0.5) * local, sum(sum(row[rank * local : (rank + 1) * local]) for row in kept)
        axes.text(middle, -1.15, f"rank {rank}", ha="center", va="bottom", fontsize=8)
        axes.text(middle, tokens + 1.6, str(count), ha="center", va="top", fontsize=8, weight="bold")
        if rank:
            axes.plot([rank * local] * 2, [0, tokens], color=INK, linestyle="-", linewidth=1.4)
    axes.text(-0.2, tokens + 0.25, "rows per\nexpert", ha="right", va="top", fontsize=8)
    if ranks > 1:
        axes.text(-0.2, tokens + 1.6, "rows per\nrank", ha="right", va="top", fontsize=8, weight="bold")
    axes.text(-0.2, -0.2, "expert", ha="right", va="bottom", fontsize=8)
    axes.text(-0.3, tokens / 2, "tokens", ha="right", va="center", rotation=90, fontsize=8)
    axes.set_xlim(-2.3, experts + 0.1)
    axes.set_ylim(tokens + (2.1 if ranks == 1 else 3.3), -2.1)
    blank(axes)


def load_bands(
    loads: Mapping[str, Sequence[Sequence[float]]], what: str = "share of the rows", every: int = 1, ranks: int = 0
) -> Figure:
    """A panel for each run: how the rows of every step are shared among the experts.

    Args:
        loads: {title: for each step, for each expert, its rows}.
        what: the axis of the shares.
        every: so many steps are added up and drawn as one; those left over at the end are not drawn.
        ranks: over how many ranks the experts are dealt out, consecutive ones together: their bands have one colour.
            0 gives each expert a colour of its own.

    Raises:
        ConfigError: nothing to draw, a step without any row, or experts that cannot be dealt out.
    """
    if not loads:
        raise ConfigError("no load to draw", fix="give at least one run")
    for title, steps in loads.items():
        if len(steps) < every or not all(sum(step) > 0 for step in steps):
            raise ConfigError(f"a step of {title!r} has no rows", fix="leave out what never ran")
        _obey_ranks(len(steps[0]), ranks or 1, title)
    with styled():
        figure = new_figure(3.1 * len(loads) + 0.4, 2.9)
        panels = figure.subplots(1, len(loads), squeeze=False, sharey=True)[0]
        for axes, (title, steps) in zip(panels, loads.items(), strict=True):
            _bands(axes, steps, every, ranks)
            axes.set_title(title)
            axes.set_xlabel("step")
        panels[0].set_ylabel(what)
        if ranks:
            named = enumerate(rank_colours(ranks))
            keys = [Patch(facecolor=c, edgecolor=INK, label=f"experts of rank {rank}") for rank, c in named]
            border = Line2D([], [], color=INK, linestyle="-", linewidth=2.4, label="where the next rank's share begins")
            handles = [*keys, border] if ranks > 1 else keys
            figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 4))
    return figure


def _bands(axes: Axes, steps: Sequence[Sequence[float]], every: int, ranks: int) -> None:
    experts, starts = len(steps[0]), range(0, len(steps) - every + 1, every)
    sums = [[sum(step[e] for step in steps[i : i + every]) for e in range(experts)] for i in starts]
    shares = [[one[e] / sum(one) for one in sums] for e in range(experts)]
    local = experts // ranks if ranks else 1
    palette = [rank_colours(ranks)[e // local] for e in range(experts)] if ranks else colours(experts)
    bands = axes.stackplot(starts, *shares, colors=palette, edgecolor=INK, linewidth=0.4)
    for e, band in enumerate(bands):
        band.set_hatch("" if ranks else hatch(e))
    for rank in range(1, ranks):
        border = [sum(shares[e][i] for e in range(rank * local)) for i in range(len(starts))]
        axes.plot(starts, border, color=INK, linestyle="-", linewidth=2.4)
    ends = [shares[e][-1] for e in range(experts)]
    middles = [sum(ends[:e]) + ends[e] / 2 for e in range(experts)]
    for e, (middle, place) in enumerate(zip(middles, _spread(middles), strict=True)):
        axes.plot([1.0, 1.05], [middle, place], transform=axes.transAxes, clip_on=False, color=FAINT, linewidth=0.6,
                  linestyle="-")  # fmt: skip
        axes.text(1.06, place, str(e), transform=axes.transAxes, va="center", fontsize=7)
    axes.text(1.02, 1.03, "expert", transform=axes.transAxes, va="bottom", fontsize=7)
    axes.set_xlim(0, max(starts[-1], 1))
    axes.set_ylim(0, 1)
    axes.grid(visible=False)


def _spread(wanted: Sequence[float], gap: float = 0.062) -> list[float]:
    """Places from 0 to 1 near those that are wanted, in their order, each at least `gap` above the one before."""
    gap = min(gap, 1 / len(wanted))
    places = list(wanted)
    for i, place in enumerate(places):
        places[i] = max(place, places[i - 1] + gap if i else gap / 2)
    for i in reversed(range(len(places))):
        places[i] = min(places[i], places[i + 1] - gap if i + 1 < len(places) else 1 - gap / 2)
    return places


def busiest(steps: Sequence[Sequence[float]], every: int = 1) -> list[float]:
    """The rows of the busiest expert over the mean of all, for each `every` steps added up; 1 is an even load."""
    sums = [[sum(of) for of in zip(*steps[i : i + every], strict=True)] for i in range(0, len(steps), every)]
    return [max(one) * len(one) / sum(one) for one in sums]


def imbalance(
    loads: Mapping[str, Sequence[Sequence[float]]], losses: Mapping[str, Sequence[float]], chance: str, every: int = 5
) -> Figure:
    """What an uneven load costs, and how little the loss says of it.

    Left: the busiest expert's rows over the mean, which is how many times as long the layer takes with one expert on
    each rank. Right: the loss minus that of the first run.

    Args:
        loads: {run: for each step, for each expert, its rows}; the first run is what the others are compared with.
        losses: {run: for each step, the loss}, of the same runs and of `chance`.
        chance: the run that differs from the first by nothing but its random numbers: drawn as the reference.
        every: so many steps are drawn as one.

    Raises:
        ConfigError: fewer than two runs, or a run without a loss.
    """
    lacking = [run for run in (*loads, chance) if run not in losses]
    if len(loads) < 2 or lacking:
        raise ConfigError(
            f"{len(loads)} runs to compare, of which {lacking} have no loss", fix="two runs, and a loss of each"
        )
    first = next(iter(loads))
    styles = dict(zip(loads, ("-", "--", ":"), strict=False))
    with styled():
        figure = new_figure(9.6, 3.0)
        load, loss = figure.subplots(1, 2)
        for run, style in styles.items():
            high = busiest(loads[run], every)
            load.plot(range(0, len(high) * every, every), high, **{**MEASURED_LINE, "linestyle": style}, label=run)
        load.set(xlabel="step", ylabel="times the mean", title="Rows of the busiest expert", ylim=(1, None))
        for run in (chance, *list(loads)[1:]):
            apart = [a - b for a, b in zip(_means(losses[run], every), _means(losses[first], every), strict=True)]
            look = REFERENCE_LINE if run == chance else {**MEASURED_LINE, "linestyle": styles[run]}
            loss.plot(range(0, len(apart) * every, every), apart, **look, label=run)  # type: ignore[arg-type]
        loss.set(xlabel="step", ylabel="nats per byte", title=f"Loss minus that of the run {first}")
        for axes in (load, loss):
            axes.set_xlim(0, max(1, len(losses[first]) - every))
            axes.legend()
    return figure


def _means(numbers: Sequence[float], every: int) -> list[float]:
    pieces = [numbers[i : i + every] for i in range(0, len(numbers), every)]
    return [sum(piece) / len(piece) for piece in pieces]
