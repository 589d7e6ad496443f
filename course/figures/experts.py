"""Drawings of lab 05: routing of tokens to experts, the load over time, a dispatch row by row."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import (
    COMM,
    FAINT,
    INK,
    MEASURED_LINE,
    REFERENCE_LINE,
    arrow,
    blank,
    box,
    colours,
    hatch,
    legend,
    new_figure,
    panels,
    rank_colours,
    sample,
    styled,
)

# --------------------------------------------------------------------------------------------- the routing and the load
# `routing_grid`: a row of the grid is a token, a column an expert. A filled square is a token that goes to an expert,
# a square with a cross was chosen and then dropped by the capacity. The columns of one rank have one colour, and
# below them stand their sums.
#
# `load_bands`: each expert's share of all rows over the steps. Equal bands are an even load, a band that thins out is
# an expert that gets no tokens any more, and a thick line parts the ranks.
#
# `imbalance`: what an uneven load costs in time, and how little the loss shows of it.

Grid = Sequence[Sequence[bool]]


def routing_grid(maps: Mapping[str, Grid], ranks: int = 1, kept: Mapping[str, Grid] | None = None) -> Figure:
    """Draw a grid for each routing.

    Args:
        maps: {title: for each token, for each expert, whether it goes there}.
        ranks: the number of ranks, each of which has consecutive experts.
        kept: {title: the same after the capacity}; a title that is missing drops nothing.

    Raises:
        ConfigError: nothing to draw, rows of different lengths, or experts that do not divide by the ranks.
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
        for axes, (title, grid) in panels(figure, {title: (title, grid) for title, grid in maps.items()}):
            _grid(axes, grid, ranks, (kept or {}).get(title, grid))
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
    """Draw for each run a panel with the share of rows of each expert in every step.

    Args:
        loads: {title: for each step, for each expert, its rows}.
        what: the label of the vertical axis.
        every: the number of steps that are added up and drawn as one; a rest at the end is not drawn.
        ranks: the number of ranks, each of which has consecutive experts in bands of one colour. 0 gives each expert a
            colour of its own.

    Raises:
        ConfigError: nothing to draw, a step without any row, or experts that do not divide by the ranks.
    """
    if not loads:
        raise ConfigError("no load to draw", fix="give at least one run")
    for title, steps in loads.items():
        if len(steps) < every or not all(sum(step) > 0 for step in steps):
            raise ConfigError(f"a step of {title!r} has no rows", fix="leave out what never ran")
        _obey_ranks(len(steps[0]), ranks or 1, title)
    with styled():
        figure = new_figure(3.1 * len(loads) + 0.4, 2.9)
        for axes, steps in panels(figure, loads, sharey=True):
            _bands(axes, steps, every, ranks)
            axes.set_xlabel("step")
        figure.axes[0].set_ylabel(what)
        if ranks:
            named = enumerate(rank_colours(ranks))
            keys = [sample(f"experts of rank {rank}", c, linewidth=None) for rank, c in named]
            border = Line2D([], [], color=INK, linestyle="-", linewidth=2.4, label="where the next rank's share begins")
            handles = [*keys, border] if ranks > 1 else keys
            legend(figure, handles, 4, fontsize=None)
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
    """Move places from 0 to 1 apart to at least `gap`, in their order, near the wanted places."""
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
    """Draw the cost of an uneven load, and the loss, which shows little of it.

    Left: the busiest expert's rows over the mean, which is how many times as long the layer takes with one expert on
    each rank. Right: the loss minus that of the first run.

    Args:
        loads: {run: for each step, for each expert, its rows}; the others are compared with the first run.
        losses: {run: for each step, the loss}, of the same runs and of `chance`.
        chance: the run that differs from the first by nothing but its random numbers: drawn as the reference.
        every: the number of steps that are drawn as one.

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
        figure = new_figure(9.6, 3.3)
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
        legend(figure, [*load.lines, loss.lines[0]], 4, fontsize=None)  # a curve crosses any place inside
    return figure


def _means(numbers: Sequence[float], every: int) -> list[float]:
    pieces = [numbers[i : i + every] for i in range(0, len(numbers), every)]
    return [sum(piece) / len(piece) for piece in pieces]


# ----------------------------------------------------------------------------------------------- copies over a network


def copies(experts: Mapping[int, Sequence[int]], gpus: int = 4) -> Figure:
    """Draw how a token of machine 0 reaches its experts: a row for each, and one copy for each machine.

    Args:
        experts: {machine: the GPUs there on which the token has an expert}; machine 0 has the token, on GPU 0.
        gpus: the GPUs of a machine.

    Raises:
        ConfigError: an expert in machine 0, or on a GPU that is not there.
    """
    if 0 in experts or not all(0 <= g < gpus for at in experts.values() for g in at):
        raise ConfigError(f"experts {dict(experts)} on {gpus} GPUs a machine", fix="other machines than 0, GPUs from 0")
    step = 0.75 * gpus + 1.1
    middle = step * (len(experts) - 1) / 2
    with styled():
        figure = new_figure(8.6, 0.3 * step * len(experts) + 0.5)
        for axes, once in panels(figure, {"a row for each expert": False, "one copy for each machine": True}):
            _machine(axes, (0, middle), 0, (), gpus)
            for line, (machine, at) in enumerate(experts.items()):
                _machine(axes, (6, line * step), machine, at, gpus)
                for gpu in [0] if once else at:
                    end = line * step + 0.75 * gpu + 0.37
                    axes.plot([1.7, 6], [middle + 0.37, end], color=COMM, linestyle="-", linewidth=2.2)
                for gpu in at if once else ():
                    ends = [(7.7, line * step + 0.75 * one + 0.37) for one in (0, gpu)]
                    arrow(axes, *ends, linewidth=1.0, connectionstyle=f"arc3,rad={-0.9 + 0.15 * gpu}")
            axes.set_xlim(-0.2, 9.2)
            axes.set_ylim(step * len(experts) - 0.9, -0.75)
            blank(axes)
        network = Line2D([], [], color=COMM, linestyle="-", linewidth=2.2, label="over the network")
        nvlink = Line2D([], [], color=INK, linestyle="-", linewidth=1.0, label="over NVLink")
        legend(figure, [network, nvlink], 2)
    return figure


def _machine(axes: Axes, corner: tuple[float, float], number: int, at: Sequence[int], gpus: int) -> None:
    (x, y), (own, other) = corner, rank_colours(2)
    for gpu in range(gpus):
        source = number == 0 and gpu == 0
        face, text = (own, "token") if source else (other, "expert") if gpu in at else ("white", "")
        box(axes, (x, y + 0.75 * gpu), (1.7, 0.75), face, text, edge=INK, fontsize=8)
    axes.text(x + 0.85, y - 0.15, f"machine {number}", ha="center", va="bottom", fontsize=8)


# --------------------------------------------------------------------------------------------- one dispatch, row by row
# A *row* is one token on its way to one expert: `b3` is token b for expert 3, in the colour of the rank that it comes
# from. From top to bottom the picture is the dispatch, from bottom to top the combine:
#
# | line         | the rows of a rank                       | numbers below it                                 |
# |--------------|------------------------------------------|--------------------------------------------------|
# | tokens       | not yet rows                             |                                                  |
# | as they leave| by expert, then by token                 | rows for each expert, rows for each rank         |
# | as they come | by sender; of one sender still by expert | `blocks`: rows from each sender for each expert  |
# | at work      | by expert, then by sender                | rows of each expert                              |
#
# `journey` computes what is drawn.

_GAP, _STEP = 0.5, 4.3  # between groups of rows; from one line of the picture to the next
_LEFT, _RIGHT = 6.4, 6.6  # room for the words beside the rows
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Row:
    """One token on its way to one expert; `origin` is the rank that holds the token."""

    token: str
    expert: int
    origin: int

    @property
    def name(self) -> str:
        return f"{self.token}{self.expert}"


@dataclasses.dataclass(frozen=True)
class Journey:
    """The rows of one dispatch on all ranks.

    Attributes:
        tokens: [rank] -> names of its tokens.
        leaving: [rank] -> its rows, by expert, then by token.
        arriving: [rank] -> the rows that it gets, by sender, then by expert.
        working: [rank] -> the same rows, by expert, then by sender.
        counts: [rank][expert] rows that leave.
        blocks: [rank][sender][its e-th expert] rows that arrive.
    """

    tokens: list[list[str]]
    leaving: list[list[Row]]
    arriving: list[list[Row]]
    working: list[list[Row]]
    counts: list[list[int]]
    blocks: list[list[list[int]]]

    def input_splits(self, rank: int) -> list[int]:
        """Rows that `rank` sends to each rank."""
        local = len(self.counts[rank]) // len(self.counts)
        return [sum(self.counts[rank][i : i + local]) for i in range(0, len(self.counts[rank]), local)]

    def output_splits(self, rank: int) -> list[int]:
        """Rows that `rank` gets from each rank."""
        return [sum(of_sender) for of_sender in self.blocks[rank]]


def journey(maps: Sequence[Grid]) -> Journey:
    """Compute the rows of one dispatch at each step.

    Args:
        maps: [rank][token][expert], whether the token goes there. Tokens are named a, b, c, ... over all ranks;
            of E experts rank r of P holds those from r E/P up to (r+1) E/P.

    Raises:
        ConfigError: no ranks, rows of different lengths, experts that do not divide by the ranks, or more than 26
            tokens.
    """
    world, widths = len(maps), {len(row) for grid in maps for row in grid}
    if not maps or len(widths) != 1 or widths == {0} or min(widths) % world:
        raise ConfigError(
            f"a dispatch over {world} ranks whose maps are {sorted(widths)} wide",
            fix="one map for each rank, one column for each expert, as many experts on each rank",
        )
    if sum(map(len, maps)) > 26:
        raise ConfigError(f"{sum(map(len, maps))} tokens for 26 letters", fix="draw fewer tokens")
    experts = widths.pop()
    letters, local = iter("abcdefghijklmnopqrstuvwxyz"), experts // world
    tokens = [[next(letters) for _ in grid] for grid in maps]
    leaving = [
        [Row(tokens[r][t], e, r) for e in range(experts) for t, goes in enumerate(grid) if goes[e]]
        for r, grid in enumerate(maps)
    ]
    arriving = [[row for rows in leaving for row in rows if row.expert // local == r] for r in range(world)]
    working = [sorted(rows, key=lambda row: (row.expert, row.origin)) for rows in arriving]
    counts = [[sum(row.expert == e for row in rows) for e in range(experts)] for rows in leaving]
    blocks = [[of[r * local : (r + 1) * local] for of in counts] for r in range(world)]
    return Journey(tokens, leaving, arriving, working, counts, blocks)


def dispatch_steps(maps: Sequence[Grid]) -> Figure:
    """Draw a dispatch and its combine, one column for each rank.

    Args:
        maps: as for `journey`.

    Raises:
        ConfigError: as `journey`.
    """
    way = journey(maps)
    world = len(maps)
    most = max(len(rows) for rows in (*way.leaving, *way.arriving))
    widest = max(6.0, most + _GAP * (world + 1))
    with styled():
        width = _LEFT + world * (widest + 1.2) + _RIGHT
        figure = new_figure(0.33 * width, 0.33 * (3 * _STEP + 5.2))
        axes = figure.subplots()
        _words(axes, _LEFT + world * (widest + 1.2))
        for rank in range(world):
            _header(axes, _LEFT + rank * (widest + 1.2) + widest / 2, rank, len(maps[0][0]) // world)
        places = [_rank_columns(axes, way, rank, _LEFT + rank * (widest + 1.2), widest) for rank in range(world)]
        _travel(axes, way, places)
        axes.set_title("One dispatch: b3 is token b for expert 3; the colour is the rank that it comes from")
        axes.set_xlim(0, width)
        axes.set_ylim(3 * _STEP + 3.2, -1.4)
        blank(axes)
    return figure


Places = dict[Row, float]  # the middle of each row on one line of the picture


def _words(axes: Axes, right: float) -> None:
    """Name each line and the operations between lines: the dispatch at the left, the combine at the right."""
    for line, text in enumerate(("tokens", "rows as they leave:\nby expert", "rows as they come:\nby sender",
                                 "rows at work:\nby expert")):  # fmt: skip
        axes.text(0.2, line * _STEP + 0.5, text, ha="left", va="center", fontsize=9, weight="bold")
    down, up = ("permute", "all-to-all", "regroup"), ("unpermute: add", "all-to-all", "ungroup")
    for line, (left_word, right_word) in enumerate(zip(down, up, strict=True)):
        y, top, low = (line + 0.62) * _STEP, line * _STEP + 1.75, (line + 1) * _STEP - 0.75
        for x, text, start, end in ((0.6, left_word, top, low), (right + 0.4, right_word, low, top)):
            arrow(axes, (x, start), (x, end), linewidth=1.2)
            axes.text(x + 0.5, y, text, ha="left", va="center", fontsize=9)
    note = "A dark line is a row that changes its rank: these are the bytes."
    axes.text(right + 6.4, 3 * _STEP + 2.95, note, ha="right", va="center", fontsize=8)
    axes.text(0.2, -0.9, "the way there", ha="left", va="center", fontsize=9, style="italic")
    axes.text(right, -0.9, "the way back", ha="left", va="center", fontsize=9, style="italic")


def _header(axes: Axes, middle: float, rank: int, local: int) -> None:
    held = ", ".join(str(e) for e in range(rank * local, (rank + 1) * local))
    text = f"rank {rank} holds expert{'s' * (local > 1)} {held}"
    axes.text(middle, -0.9, text, ha="center", va="center", fontsize=9, weight="bold")


def _rank_columns(axes: Axes, way: Journey, rank: int, left: float, width: float) -> list[Places]:
    """Draw the four lines of one rank; return where each row stands on the last three."""
    palette, local = rank_colours(len(way.tokens)), len(way.blocks[rank][0])
    at_first = Places()
    x = left + (width - len(way.tokens[rank])) / 2
    for token in way.tokens[rank]:
        box(axes, (x, 0), (1, 1), palette[rank], token, edge=INK)
        at_first |= {row: x + 0.5 for row in way.leaving[rank] if row.token == token}
        x += 1
    lines: list[tuple[list[Row], Callable[[Row], int], str, str]] = [
        (way.leaving[rank], lambda row: row.expert // local, "to {}",
         f"counts {way.counts[rank]}   input splits {way.input_splits(rank)}"),
        (way.arriving[rank], lambda row: row.origin, "from {}",
         f"blocks {way.blocks[rank]}   output splits {way.output_splits(rank)}"),
        (way.working[rank], lambda row: row.expert, "expert {}",
         f"rows of each expert {[sum(of) for of in zip(*way.blocks[rank], strict=True)]}"),
    ]  # fmt: skip
    places = [at_first]
    for line, (rows, group, label, numbers) in enumerate(lines, 1):
        places.append(_line(axes, _grouped(rows, group), label, (left, line * _STEP, width), palette))
        axes.text(left + width / 2, line * _STEP + 1.95, numbers, ha="center", va="top", fontsize=8)
    return places


def _grouped(rows: Sequence[_T], group: Callable[[_T], int]) -> list[tuple[int, list[_T]]]:
    return [(number, list(of)) for number, of in groupby(rows, key=group)]


def _line(
    axes: Axes, groups: list[tuple[int, list[Row]]], label: str, at: tuple[float, float, float], palette: list[str]
) -> Places:
    """Draw boxes in groups, with a bracket and a label below each; return where each row stands."""
    left, y, width = at
    found = Places()
    taken = sum(len(rows) for _, rows in groups) + _GAP * (len(groups) - 1)
    x = left + (width - taken) / 2
    if not groups:
        axes.add_patch(Rectangle((left, y), width, 1, fill=False, edgecolor=FAINT, linestyle=":", linewidth=0.6))
        axes.text(left + width / 2, y + 0.5, "no rows", ha="center", va="center", fontsize=8)
    for number, rows in groups:
        for i, row in enumerate(rows):
            box(axes, (x + i, y), (1, 1), palette[row.origin], row.name, edge=INK, fontsize=8.5)
            found[row] = x + i + 0.5
        axes.plot([x + 0.1, x + len(rows) - 0.1], [y + 1.18] * 2, color=INK, linestyle="-", linewidth=1.0)
        axes.text(x + len(rows) / 2, y + 1.27, label.format(number), ha="center", va="top", fontsize=7)
        x += len(rows) + _GAP
    return found


def _travel(axes: Axes, way: Journey, places: Sequence[Sequence[Places]]) -> None:
    """Draw a line for each row from step to step, dark where it changes its rank."""
    world, local = len(places), len(way.blocks[0][0])
    for line in range(3):
        for rank in range(world):
            for row, x in places[rank][line].items():
                to = row.expert // local if line == 1 else rank
                colour, thick = (COMM, 1.1) if to != rank else (FAINT, 0.8)
                start = line * _STEP + (1.08 if line == 0 else 2.6)
                axes.plot([x, places[to][line + 1][row]], [start, (line + 1) * _STEP - 0.08], color=colour,
                          linestyle="-", linewidth=thick, zorder=1)  # fmt: skip
