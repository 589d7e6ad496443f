"""Which numbers a warp asks for with one instruction, and which pieces of memory are fetched for it.

Memory is fetched in whole *sectors* of 32 bytes, eight fp32 numbers; a thick border is drawn around each. A square is a
number of a matrix stored row by row. A dark one is asked for by the thread whose number stands in it, a light one comes
along because its sector is fetched, a white one stays where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.cuda import ACTIVE, PASSIVE
from minimegatron.viz.picture import INK, new_figure, styled, text_on

ASKED, CAME, REST = ACTIVE, PASSIVE, "white"


def sectors(shape: tuple[int, int], asked: Sequence[int], sector: int = 8) -> set[int]:
    """Sectors that hold these places of a matrix stored row by row.

    Raises:
        ConfigError: a place outside of it.
    """
    if bad := [i for i in asked if not 0 <= i < shape[0] * shape[1]]:
        raise ConfigError(
            f"a matrix of {shape[0]} x {shape[1]} has no place {bad[0]}", fix=f"places 0 to {shape[0] * shape[1] - 1}"
        )
    return {i // sector for i in asked}


def access_map(shape: tuple[int, int], ways: Mapping[str, Sequence[int]], sector: int = 8) -> Figure:
    """One panel for each way of reading.

    Args:
        shape: rows and columns of the matrix; a row is made of whole sectors.
        ways: {title: for each thread the place it reads, counted row by row}.
        sector: numbers that are fetched together.

    Raises:
        ConfigError: nothing to draw, a place outside of the matrix, or rows that are no whole sectors.
    """
    if not ways:
        raise ConfigError("no access to draw", fix="give at least one")
    if shape[1] % sector:
        raise ConfigError(f"rows of {shape[1]} numbers are not made of sectors of {sector}", fix="a multiple of it")
    for asked in ways.values():
        sectors(shape, asked, sector)
    with styled():
        figure = new_figure(1.2 + 0.27 * shape[1], 0.5 + len(ways) * (0.9 + 0.27 * shape[0]))
        for axes, (title, asked) in zip(figure.subplots(len(ways), 1, squeeze=False)[:, 0], ways.items(), strict=True):
            fetched = sectors(shape, asked, sector)
            _matrix(axes, shape, {place: thread for thread, place in enumerate(asked)}, fetched, sector)
            what = f"{len(fetched)} sector{'s' * (len(fetched) != 1)} (of {sector} numbers)"
            verb = "is" if len(fetched) == 1 else "are"
            axes.set_title(f"{title}: {len(asked)} threads ask, {what} {verb} fetched", fontsize=10)
        legend = ((ASKED, "asked for, by this thread"), (CAME, "comes along"), (REST, "not fetched"))
        patches = [Patch(facecolor=colour, edgecolor=INK, linewidth=0.4, label=label) for colour, label in legend]
        patches.append(Patch(facecolor="none", edgecolor=INK, linewidth=2.0, label="one sector"))
        figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _matrix(axes: Axes, shape: tuple[int, int], thread: Mapping[int, int], fetched: set[int], sector: int) -> None:
    rows, cols = shape
    for place in range(rows * cols):
        row, col = divmod(place, cols)
        colour = ASKED if place in thread else CAME if place // sector in fetched else REST
        axes.add_patch(Rectangle((col, row), 1, 1, facecolor=colour, edgecolor=INK, linewidth=0.3))
        if place in thread:
            axes.text(
                col + 0.5, row + 0.5, f"{thread[place]}", ha="center", va="center", fontsize=7, color=text_on(colour)
            )
    for place in range(0, rows * cols, sector):
        row, col = divmod(place, cols)
        border = Rectangle((col, row), sector, 1, fill=False, edgecolor=INK, linewidth=1.6)
        axes.add_patch(border)
    axes.set_xlim(-0.1, cols + 0.1)
    axes.set_ylim(rows + 0.1, -0.1)
    axes.set_aspect("equal")
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_xticks([c + 0.5 for c in range(0, cols, sector)], [f"{c}" for c in range(0, cols, sector)])
    axes.set_yticks([r + 0.5 for r in range(rows)], [f"{r}" for r in range(rows)])
    axes.tick_params(length=0, labelsize=7)
    axes.set_xlabel("column", fontsize=8)
    axes.set_ylabel("row", fontsize=8)
