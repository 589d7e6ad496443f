"""Who holds which numbers of a tensor in one layout, and in another one: the boxes of each rank, side by side.

A box is a range of rows and a range of columns. Each rank's boxes have its colour and its number; what one rank of
another layout wants is drawn over all as a dashed line, so the picture shows which stored boxes it meets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, Picture, box, new_figure, rank_colours, styled

Box = Sequence[Sequence[int]]  # [[first row, last row], [first column, last column]]; the last is not included


def region_map(
    shape: tuple[int, int],
    layouts: Mapping[str, Sequence[Sequence[Box]]],
    wanted: tuple[str, Sequence[Box]] | None = None,
) -> Picture:
    """One panel for each layout.

    Args:
        shape: rows and columns of the tensor.
        layouts: {title: the boxes of each rank}.
        wanted: (what the legend says, boxes) of a dashed line over every panel.

    Raises:
        ConfigError: nothing to draw, or a box that is not inside the tensor.
    """
    if not layouts:
        raise ConfigError("no layout to draw", fix="give at least one")
    for title, ranks in layouts.items():
        for one in (one for boxes in ranks for one in boxes):
            if not all(0 <= start <= stop <= size for (start, stop), size in zip(one, shape, strict=True)):
                raise ConfigError(f"{title!r} has a box {list(map(list, one))} outside of {list(shape)}")
    with styled():
        figure = new_figure(3.4 * len(layouts), 0.9 + 2.6 * min(1.4, max(0.7, shape[0] / shape[1])))
        for axes, (title, ranks) in zip(
            figure.subplots(1, len(layouts), squeeze=False)[0], layouts.items(), strict=True
        ):
            _tensor(axes, shape, ranks)
            for (top, bottom), (left, right) in wanted[1] if wanted else ():
                axes.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=INK,
                                         linestyle=(0, (3, 1.6)), linewidth=2.8, zorder=5))  # fmt: skip
            axes.set_title(title)
        if wanted:
            handle = Line2D([], [], color=INK, linestyle=(0, (3, 1.6)), linewidth=2.8, label=wanted[0])
            figure.legend(handles=[handle], loc="outside lower center", fontsize=8.5, handlelength=4)
    return figure


def _tensor(axes: Axes, shape: tuple[int, int], ranks: Sequence[Sequence[Box]]) -> None:
    for rank, (boxes, colour) in enumerate(zip(ranks, rank_colours(len(ranks)), strict=True)):
        for (top, bottom), (left, right) in boxes:
            if top < bottom and left < right:
                box(axes, (left, top), (right - left, bottom - top), colour, f"{rank}", edge=INK)
    rows, columns = shape
    for row in range(1, rows):
        axes.axhline(row, color="white", linewidth=0.5, alpha=0.7)
    for column in range(1, columns):
        axes.axvline(column, color="white", linewidth=0.5, alpha=0.7)
    axes.set(xlim=(-0.1, columns + 0.1), ylim=(rows + 0.1, -0.1), xticks=[0, columns], yticks=[0, rows])
    axes.set(xlabel="column", ylabel="row", aspect="equal")
    axes.grid(False)
