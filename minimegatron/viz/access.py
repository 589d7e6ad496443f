"""Which numbers a warp asks for with one instruction, and which pieces of memory come to it.

Memory serves whole *sectors* of 32 bytes, eight fp32 numbers. A square is a number of a matrix stored row by row; a
dark one was asked for by the thread whose number stands in it, a light one came along because its sector did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, PALETTE, blank, new_figure, styled, text_on

ASKED, CAME, REST = PALETTE[6], PALETTE[0], "white"


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
        shape: rows and columns of the matrix.
        ways: {title: for each thread the place it reads, counted row by row}.
        sector: numbers that come together.

    Raises:
        ConfigError: nothing to draw, or a place outside of the matrix.
    """
    if not ways:
        raise ConfigError("no access to draw", fix="give at least one")
    for asked in ways.values():
        sectors(shape, asked, sector)
    with styled():
        figure = new_figure(0.8 + 0.27 * shape[1], len(ways) * (0.7 + 0.27 * shape[0]))
        for axes, (title, asked) in zip(figure.subplots(len(ways), 1, squeeze=False)[:, 0], ways.items(), strict=True):
            came = sectors(shape, asked, sector)
            _matrix(axes, shape, {place: thread for thread, place in enumerate(asked)}, came, sector)
            sectors_that_come = f"{len(came)} sector{'s' * (len(came) != 1)}"
            axes.set_title(
                f"{title}: {len(asked)} numbers asked for, {sectors_that_come} of {sector} come", fontsize=10
            )
    return figure


def _matrix(axes: Axes, shape: tuple[int, int], thread: Mapping[int, int], came: set[int], sector: int) -> None:
    rows, cols = shape
    for place in range(rows * cols):
        row, col = divmod(place, cols)
        colour = ASKED if place in thread else CAME if place // sector in came else REST
        axes.add_patch(Rectangle((col, row), 1, 1, facecolor=colour, edgecolor=INK, linewidth=0.4))
        if place in thread:
            axes.text(
                col + 0.5, row + 0.5, f"{thread[place]}", ha="center", va="center", fontsize=7, color=text_on(colour)
            )
    axes.set_xlim(-0.1, cols + 0.1)
    axes.set_ylim(rows + 0.1, -0.1)
    axes.set_xticks([])
    axes.set_yticks([])
    blank(axes)
