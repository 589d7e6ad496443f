"""The grid of ranks, and the groups along any axis.

A grid with up to four axes longer than 1 is drawn flat: the fastest axis runs to the right, the second downwards, the
third repeats that block to the right, the fourth repeats all of it downwards. So ranks that communicate most stand
closest.

Data comes in as plain numbers: sizes and groups as `minimegatron.comm.mesh.grid_sizes` and `rank_groups` return them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, PAPER, arrow, blank, box, colours, hatch, new_figure, styled, text_on

Groups = Sequence[Sequence[int]]
_GAP = 0.45  # between blocks of a slower axis, in cells


def rank_grid(
    sizes: Mapping[str, int], groups: Mapping[str, Groups] | None = None, *, mark: int | None = None
) -> Figure:
    """The grid of ranks; one panel for each axis in `groups`, its groups told apart by colour and letter.

    Args:
        sizes: ranks along each axis, the fastest varying first: `{"tp": 2, "cp": 1, "dp": 2, "pp": 2}`.
        groups: `{"tp": [[0, 1], [2, 3], ...], ...}`; without it one panel shows every rank's coordinates.
        mark: a rank to outline ("you are here").

    Raises:
        ConfigError: more than four axes are longer than 1, or a group names a rank that is not in the grid.
    """
    places, extents = _places(sizes)
    for name, members in (groups or {}).items():
        strangers = {r for group in members for r in group} - set(range(len(places)))
        if strangers:
            raise ConfigError(
                f"groups of {name} name rank {min(strangers)}; the grid has {len(places)} ranks",
                fix="give both the same world",
            )
    panels = list((groups or {"": []}).items())
    columns = _columns(len(panels), *extents)
    rows = math.ceil(len(panels) / columns)
    cell = 0.62 if groups else 0.95
    with styled():
        figure = new_figure(columns * (extents[0] + 1.6) * cell, rows * (extents[1] + 1.9) * cell)
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (name, members) in zip(grid.flat, panels, strict=False):
            _draw_grid(axes, sizes, places, extents, members, mark)
            axes.set_title(_panel_title(name, members) if name else _grid_title(sizes, len(places)))
    return figure


def _places(sizes: Mapping[str, int]) -> tuple[list[tuple[float, float]], tuple[float, float]]:
    """(x, y) of every rank, in cells, y downwards; and the width and height of the drawing."""
    long = [n for n in sizes.values() if n > 1]
    if len(long) > 4:
        raise ConfigError(f"{len(long)} axes are longer than 1: {dict(sizes)}", fix="a flat picture shows four of them")
    a, b, c, d = [*long, 1, 1, 1, 1][:4]
    places = []
    for rank in range(a * b * c * d):
        i, j, k, m = rank % a, rank // a % b, rank // (a * b) % c, rank // (a * b * c)
        places.append((i + k * (a + _GAP), j + m * (b + _GAP)))
    return places, (a * c + (c - 1) * _GAP, b * d + (d - 1) * _GAP)


def _columns(panels: int, width: float, height: float) -> int:
    """The number of columns for which the page is nearly 16:9 and has few empty places."""

    def cost(n: int) -> float:
        rows = math.ceil(panels / n)
        return abs(math.log(n * width / (rows * height) / (16 / 9))) + 0.3 * (n * rows - panels)

    return min(range(1, panels + 1), key=cost)


def _coordinates(sizes: Mapping[str, int], rank: int) -> str:
    words = []
    for name, size in sizes.items():
        if size > 1:
            words.append(f"{name} {rank % size}")
        rank //= size
    return "\n".join(words)


def _draw_grid(
    axes: Axes,
    sizes: Mapping[str, int],
    places: list[tuple[float, float]],
    extents: tuple[float, float],
    groups: Groups,
    mark: int | None,
) -> None:
    group_of = {rank: i for i, group in enumerate(groups) for rank in group}
    palette = colours(len(groups))
    for rank, (x, y) in enumerate(places):
        if rank in group_of:
            i = group_of[rank]
            box(axes, (x, y), (1, 1), palette[i], str(rank), pattern=hatch(i), fontsize=13, bold=True)
            axes.text(x + 0.9, y + 0.12, _letter(i), ha="right", va="top", color=text_on(palette[i]), fontsize=8)
        else:
            box(axes, (x, y), (1, 1), PAPER)
            axes.text(x + 0.5, y + 0.3, str(rank), ha="center", va="center", fontsize=13, weight="bold")
            axes.text(x + 0.5, y + 0.5, _coordinates(sizes, rank), ha="center", va="top", fontsize=8, linespacing=1.05)
    if mark is not None:
        axes.add_patch(Rectangle(places[mark], 1, 1, fill=False, edgecolor=INK, linewidth=3, zorder=3))
    _draw_arrows(axes, sizes, extents)
    axes.set_xlim(_margin(sizes, 4), extents[0] + 0.2)
    axes.set_ylim(extents[1] + 0.2, _margin(sizes, 3))
    blank(axes)


def _margin(sizes: Mapping[str, int], axes: int) -> float:
    """The margin of the picture: room for two arrows if there are as many axes, else for one."""
    return -1.0 if sum(n > 1 for n in sizes.values()) >= axes else -0.5


def _draw_arrows(axes: Axes, sizes: Mapping[str, int], extents: tuple[float, float]) -> None:
    """Draw the direction of each axis: the first two over one block, the next two over the whole picture."""
    names = [name for name, size in sizes.items() if size > 1]
    spans = [*(float(sizes[name]) for name in names[:2]), *extents[: max(0, len(names) - 2)]]
    patch = {"facecolor": "white", "edgecolor": "none", "pad": 1}
    for i, (name, span) in enumerate(zip(names, spans, strict=True)):
        offset, upright = (-0.25 if i < 2 else -0.72), i % 2 == 1
        start, middle, end = ((offset, v) if upright else (v, offset) for v in (0.0, span / 2, span))
        arrow(axes, start, end, arrowstyle="->", linewidth=1.0, shrinkA=0, shrinkB=0)
        axes.text(*middle, name, ha="center", va="center", fontsize=9, rotation=90 * upright, bbox=patch)


def _letter(i: int) -> str:
    """A, B, ... Z, AA, AB, ..."""
    return (_letter(i // 26 - 1) if i >= 26 else "") + chr(ord("A") + i % 26)


def _grid_title(sizes: Mapping[str, int], world: int) -> str:
    product = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f"{world} ranks = {product}" if product else "1 rank"


def _panel_title(name: str, groups: Groups) -> str:
    lengths = sorted({len(group) for group in groups})
    count = f"{len(groups)} group{'s' if len(groups) != 1 else ''}"
    return f"{name}: {count} of {' or '.join(map(str, lengths))}"
