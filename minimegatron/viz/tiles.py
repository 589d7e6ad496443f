"""Matrices in tiles: the scores of causal attention, as a flash kernel meets them; a tensor with a scale for each tile.

`score_tiles` draws the s x s scores. A row of tiles is a block of queries, which stays on the chip; the tiles that it
computes are those whose keys and values are loaded for it. A tile beyond the diagonal is never touched.

`scaled_tiles` draws numbers before and after a cast with one scale for each tile: what is rounded to 0 is marked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.cuda import ACTIVE, PASSIVE
from minimegatron.viz.picture import INK, blank, box, new_figure, styled

FULL, HALF, HIDDEN = ACTIVE, PASSIVE, "white"
LOST = "///"  # the hatch of what was a number, and is 0


def kinds(s: int, rows: int, cols: int) -> list[list[str]]:
    """For each block of queries, from the top, its tiles: "full", "half" (the mask cuts it) or "hidden".

    Raises:
        ConfigError: the tiles do not divide the tokens.
    """
    if min(s, rows, cols) < 1 or s % rows or s % cols:
        raise ConfigError(f"tiles of {rows} x {cols} do not divide {s} tokens", fix="sizes that divide s")
    return [
        [
            "hidden" if key > query + rows - 1 else "full" if key + cols - 1 <= query else "half"
            for key in range(0, s, cols)
        ]
        for query in range(0, s, rows)
    ]


def score_tiles(s: int, rows: int, cols: int, title: str = "") -> Figure:
    """The tiles of s x s causal scores, and beside each block of queries the keys that are loaded for it.

    Raises:
        ConfigError: the tiles do not divide the tokens.
    """
    table = kinds(s, rows, cols)
    with styled():
        figure = new_figure(
            7.2, 4.2, title or f"Causal scores of {s} tokens, in blocks of {rows} queries x {cols} keys"
        )
        axes = figure.subplots()
        for query in range(s):
            for key in range(s):
                kind = table[query // rows][key // cols]
                colour = {"full": FULL, "half": FULL if key <= query else HALF, "hidden": HIDDEN}[kind]
                axes.add_patch(Rectangle((key, query), 1, 1, facecolor=colour, edgecolor=INK, linewidth=0.2))
        for block, of in enumerate(table):
            for tile in range(len(of)):
                corner = tile * cols, block * rows
                axes.add_patch(Rectangle(corner, cols, rows, fill=False, edgecolor=INK, linewidth=1.8))
            seen = (len(of) - of.count("hidden")) * cols
            text = f"queries {block * rows} to {(block + 1) * rows - 1}: loads {seen} keys, {seen} values"
            axes.text(s + 0.3, (block + 0.5) * rows, text, ha="left", va="center", fontsize=8)
        axes.set_xlim(-0.1, s + 6.6 * s / 8)
        axes.set_ylim(s + 0.1, -0.1)
        axes.set_aspect("equal")
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        axes.tick_params(length=0, labelsize=7)
        axes.set_xticks([key + 0.5 for key in range(s)], [str(key) for key in range(s)])
        axes.set_yticks([query + 0.5 for query in range(s)], [str(query) for query in range(s)])
        axes.set_xlabel("key", fontsize=8, loc="left")
        axes.set_ylabel("query", fontsize=8)
        legend = ((FULL, "a score that counts"), (HALF, "computed, then set to -∞"), (HIDDEN, "never computed"))
        patches = [Patch(facecolor=colour, edgecolor=INK, linewidth=0.4, label=label) for colour, label in legend]
        figure.legend(handles=patches, loc="outside lower center", ncols=3, fontsize=8)
    return figure


Numbers = Sequence[Sequence[float]]


def scaled_tiles(
    before: Numbers, ways: Sequence[tuple[str, tuple[int, int], Numbers, Numbers]], title: str = ""
) -> Figure:
    """A matrix, and what is left of it after a cast and back, for each way to cut it into tiles.

    Args:
        before: the numbers, row by row.
        ways: for each its name, the tile (rows, columns), the scales [tiles down][tiles across], and the numbers after.
        title: above the picture.

    Raises:
        ConfigError: nothing to draw, or a matrix of another shape.
    """
    shape = len(before), len(before[0]) if before else 0
    if not ways or not all(shape):
        raise ConfigError("no tiles to draw", fix="give a matrix and at least one way to cut it")
    if bad := [name for name, _, _, after in ways if (len(after), len(after[0])) != shape]:
        raise ConfigError(f"{bad[0]!r} has another shape than the matrix before", fix=f"{shape[0]} x {shape[1]}")
    panels = [("before", shape, None, before), *ways]
    with styled():
        figure = new_figure(0.6 + 0.72 * shape[1], len(panels) * (0.55 + 0.62 * shape[0]) + 0.4, title)
        drawn = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
        for axes, (name, tile, scales, numbers) in zip(drawn, panels, strict=True):
            _cells(axes, before, numbers, tile[0])
            if scales is not None:
                _scales(axes, shape, tile, scales)
            axes.set_title(name, fontsize=10)
            axes.set_xlim(-0.05, shape[1] + 0.05)
            axes.set_ylim(1.35 * shape[0] + 0.05, -0.05)
            blank(axes)
            axes.set_aspect("auto")
        lost = Patch(facecolor=PASSIVE, edgecolor=INK, hatch=LOST, label="was not 0, and is 0 now")
        border = Patch(facecolor="none", edgecolor=INK, linewidth=2.0, label="one tile, its scale below")
        figure.legend(handles=[lost, border], loc="outside lower center", ncols=2, fontsize=8)
    return figure


def _top(row: int, high: int) -> float:
    """Where a row begins: those of one tile stand close together, below each tile there is room for its scale."""
    return 0.8 * row + 0.55 * (row // high)


def _cells(axes: Axes, before: Numbers, numbers: Numbers, high: int) -> None:
    for r, row in enumerate(numbers):
        for c, number in enumerate(row):
            lost = number == 0 and before[r][c] != 0
            colour, pattern, text = PASSIVE if lost else "white", LOST if lost else "", f"{number + 0.0:.4g}"
            box(axes, (c, _top(r, high)), (1, 0.8), colour, text, edge=INK, fontsize=8, pattern=pattern)


def _scales(axes: Axes, shape: tuple[int, int], tile: tuple[int, int], scales: Numbers) -> None:
    (rows, cols), (m, n) = shape, tile
    for i, across in enumerate(scales):
        for j, scale in enumerate(across):
            top, left = i * m, j * n
            bottom, right = min(rows, top + m), min(cols, left + n)
            height = 0.8 * (bottom - top)
            border = Rectangle((left, _top(top, m)), right - left, height, fill=False, edgecolor=INK, linewidth=2.2)
            axes.add_patch(border)
            axes.text((left + right) / 2, _top(top, m) + height + 0.26, _scale(scale), ha="center",
                      va="center", fontsize=8)  # fmt: skip


def _scale(scale: float) -> str:
    fraction, exponent = math.frexp(scale)
    return f"scale 2^{exponent - 1}" if fraction == 0.5 else f"scale {scale:.4g}"
