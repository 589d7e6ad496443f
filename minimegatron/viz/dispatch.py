"""One dispatch of a mixture of experts, row by row: where each row stands before it travels, when it arrives, at work.

A *row* is one token on its way to one expert; its name is both, `b3` is token b for expert 3, and its colour is the
rank that it comes from. Read from top to bottom the picture is the way there, from bottom to top the way back:

| line         | the rows of a rank                       | numbers below it                                 |
|--------------|------------------------------------------|--------------------------------------------------|
| tokens       | not yet rows                             |                                                  |
| as they leave| by expert, then by token                 | rows for each expert, rows for each rank         |
| as they come | by sender; of one sender still by expert | `blocks`: rows from each sender for each expert  |
| at work      | by expert, then by sender                | rows of each expert                              |

What is drawn is computed by `journey`, not remembered.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.experts import Grid
from minimegatron.viz.picture import COMM, FAINT, INK, blank, box, new_figure, rank_colours, styled

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
    """One dispatch, seen from all ranks.

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
    """The rows of one dispatch at each step.

    Args:
        maps: [rank][token][expert], whether the token goes there. Tokens are named a, b, c, ... over all ranks;
            of E experts rank r of P holds those from r E/P up to (r+1) E/P.

    Raises:
        ConfigError: no ranks, rows of different lengths, experts that cannot be dealt out, or more than 26 tokens.
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
    """A dispatch and its way back, one column for each rank.

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


# ------------------------------------------------------------------------------------------------------------

Places = dict[Row, float]  # the middle of each row on one line of the picture


def _words(axes: Axes, right: float) -> None:
    """What each line is, and what leads from one to the next: down at the left, up at the right."""
    for line, text in enumerate(("tokens", "rows as they leave:\nby expert", "rows as they come:\nby sender",
                                 "rows at work:\nby expert")):  # fmt: skip
        axes.text(0.2, line * _STEP + 0.5, text, ha="left", va="center", fontsize=9, weight="bold")
    down, up = ("permute", "all-to-all", "regroup"), ("unpermute: add", "all-to-all,\nsplits exchanged", "ungroup")
    for line, (there, back) in enumerate(zip(down, up, strict=True)):
        y, top, low = (line + 0.62) * _STEP, line * _STEP + 1.75, (line + 1) * _STEP - 0.75
        for x, text, start, end in ((0.6, there, top, low), (right + 0.4, back, low, top)):
            arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.2}
            axes.annotate("", xy=(x, end), xytext=(x, start), arrowprops=arrow)
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
    """The four lines of one rank; returns where each row stands on the last three."""
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
    """Boxes in groups, a bracket with a label below each; returns where each row stands."""
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
    """A line for each row from step to step, dark where it changes its rank."""
    world, local = len(places), len(way.blocks[0][0])
    for line in range(3):
        for rank in range(world):
            for row, x in places[rank][line].items():
                to = row.expert // local if line == 1 else rank
                colour, thick = (COMM, 1.1) if to != rank else (FAINT, 0.8)
                start = line * _STEP + (1.08 if line == 0 else 2.6)
                axes.plot([x, places[to][line + 1][row]], [start, (line + 1) * _STEP - 0.08], color=colour,
                          linestyle="-", linewidth=thick, zorder=1)  # fmt: skip
