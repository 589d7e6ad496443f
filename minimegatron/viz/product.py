"""A product of two small matrices cut over ranks, in numbers: by columns and put side by side, by rows and added.

What is drawn is computed: `columns_of` and `rows_of` give each rank's factors and its result, and the picture shows
them. A number that every rank has stands on hatched grey, a rank's own on its colour, in a dashed frame where it is a
part of a sum; a sum carries a stripe of every rank.

| cut of A   | rank r multiplies              | its result            | to get y = x A           |
|------------|--------------------------------|-----------------------|--------------------------|
| by columns | all of x, some columns of A    | these columns of y    | put them side by side    |
| by rows    | some columns of x, rows of A   | a partial sum of y    | add them                 |
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, PAPER, Picture, blank, box, new_figure, rank_colours, styled

Matrix = list[list[float]]


@dataclasses.dataclass(frozen=True)
class Share:
    """What one rank multiplies, and its result; `whole`: x is the same on every rank."""

    x: Matrix
    a: Matrix
    y: Matrix
    whole: bool


def product(x: Sequence[Sequence[float]], a: Sequence[Sequence[float]]) -> Matrix:
    """x A."""
    return [[sum(p * q for p, q in zip(row, column, strict=True)) for column in zip(*a, strict=True)] for row in x]


def columns_of(x: Matrix, a: Matrix, ranks: int) -> list[Share]:
    """Rank r has all of x and an equal part of A's columns."""
    wide = len(a[0]) // ranks
    parts = [[row[r * wide : (r + 1) * wide] for row in a] for r in range(ranks)]
    return [Share(x, part, product(x, part), whole=True) for part in parts]


def rows_of(x: Matrix, a: Matrix, ranks: int) -> list[Share]:
    """Rank r has an equal part of A's rows, and the columns of x that meet them."""
    high = len(a) // ranks
    cut = [slice(r * high, (r + 1) * high) for r in range(ranks)]
    return [Share([row[c] for row in x], a[c], product([row[c] for row in x], a[c]), whole=False) for c in cut]


def cut_product(x: Matrix, a: Matrix, ranks: int = 2) -> Picture:
    """y = x A on so many ranks, cut in both ways.

    Raises:
        ConfigError: the matrices do not fit each other, or cannot be cut into equal parts.
    """
    if {len(row) for row in x} != {len(a)} or len({len(row) for row in a}) != 1:
        raise ConfigError("x and A do not fit each other", fix="A needs as many rows as x has columns")
    if len(a) % ranks or len(a[0]) % ranks:
        raise ConfigError(
            f"A, {len(a)} x {len(a[0])}, on {ranks} ranks", fix="the ranks must divide its rows and its columns"
        )
    with styled():
        figure = new_figure(8.6, 0.5 * (2 * ranks * (max(len(x), len(a)) + 0.7) + 1.8))
        upper, lower = figure.subplots(2, 1)
        _draw(upper, columns_of(x, a, ranks), product(x, a), "A cut by columns: put the results side by side", False)
        _draw(lower, rows_of(x, a, ranks), product(x, a), "A cut by rows: add the results", True)
        looks = [(f"only on rank {r}", colour, "") for r, colour in enumerate(rank_colours(ranks))]
        looks.append(("whole on every rank", PAPER, "//"))
        handles = [Patch(facecolor=c, hatch=h, edgecolor=INK, linewidth=0.6, label=text) for text, c, h in looks]
        handles.append(Patch(facecolor="white", edgecolor=INK, linewidth=1.2, linestyle="--", label="partial sum"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    return figure


def _draw(axes: Axes, shares: list[Share], y: Matrix, title: str, summed: bool) -> None:
    palette = rank_colours(len(shares))
    high = max(len(y), *(len(s.a) for s in shares)) + 0.7
    # every factor gets the width of the widest, so that the signs stand below each other in both panels
    wide = max(len(shares[0].x[0]), len(shares[0].a[0]) * (1 if summed else len(shares)))
    starts = [0.0, wide + 1.0, 2 * wide + 2.0, 3 * wide + 4.6]
    total = len(shares) * high - 0.7
    for r, share in enumerate(shares):
        middle = r * high + (high - 0.7) / 2
        axes.text(-0.4, middle, f"rank {r}", ha="right", va="center", fontsize=9)
        parts = ((share.x, PAPER if share.whole else palette[r]), (share.a, palette[r]), (share.y, palette[r]))
        for start, (numbers, colour) in zip(starts, parts, strict=False):
            left = start + (wide - len(numbers[0])) / 2
            partial = summed and numbers is share.y
            _numbers(axes, (left, middle - len(numbers) / 2), numbers, colour, partial)
        for sign, x in (("×", starts[1] - 0.5), ("=", starts[2] - 0.5)):
            axes.text(x, middle, sign, ha="center", va="center", fontsize=12)
    for name, start in zip(("x", "A", "own result"), starts, strict=False):
        axes.text(start + wide / 2, -0.15, name, ha="center", va="bottom", fontsize=9)
    arrow = {"arrowstyle": "-|>", "color": INK, "linewidth": 1.4}
    axes.annotate("", xy=(starts[3] - 0.2, total / 2), xytext=(starts[2] + wide + 0.3, total / 2), arrowprops=arrow)
    axes.text(starts[3] - 1.25, total / 2 - 0.12, "add" if summed else "join", ha="center", va="bottom", fontsize=9)
    top = (total - len(y)) / 2
    axes.text(starts[3] + len(y[0]) / 2, top - 0.15, "y = x A", ha="center", va="bottom", fontsize=9)
    if summed:
        _sums(axes, (starts[3], top), y, palette)
    else:
        each = len(shares[0].y[0])
        for r, share in enumerate(shares):
            _numbers(axes, (starts[3] + r * each, top), share.y, palette[r])
    axes.set_title(title)
    axes.set_xlim(-1.9, starts[3] + len(y[0]) + 0.3)
    axes.set_ylim(total + 0.1, -0.75)
    axes.set_xticks([])
    axes.set_yticks([])
    blank(axes)


def _numbers(axes: Axes, corner: tuple[float, float], numbers: Matrix, colour: str, partial: bool = False) -> None:
    pattern = "//" if colour == PAPER else ""
    for i, row in enumerate(numbers):
        for j, number in enumerate(row):
            place = (corner[0] + j, corner[1] + i)
            box(axes, place, (1, 1), colour, f"{number:g}", edge=INK, pattern=pattern, dashed=partial)


def _sums(axes: Axes, corner: tuple[float, float], numbers: Matrix, palette: list[str]) -> None:
    """Numbers with a stripe of every rank that contributed."""
    for i, row in enumerate(numbers):
        for j, number in enumerate(row):
            x, y = corner[0] + j, corner[1] + i
            box(axes, (x, y), (1, 1), PAPER, f"{number:g}", edge=INK)
            for r, colour in enumerate(palette):
                stripe = (0.9 / len(palette), 0.16)
                axes.add_patch(Rectangle((x + 0.05 + r * stripe[0], y + 0.05), *stripe, facecolor=colour))
