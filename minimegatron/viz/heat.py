"""Matrices as they are: each number a small square, light or dark, with lines where the ranks' shards meet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, Picture, new_figure, styled

Matrix = Sequence[Sequence[float]]


def shards(matrices: Mapping[str, Sequence[Matrix]], *, title: str = "") -> Picture:
    """Each entry: the shards of one matrix, cut along its rows, below each other with a line between ranks.

    All share one scale of lightness, so that equal numbers look equal.

    Raises:
        ConfigError: nothing to draw, or shards of different widths.
    """
    if not matrices or not all(matrices.values()):
        raise ConfigError("no matrix to draw", fix="give at least one shard for each")
    for name, parts in matrices.items():
        if len({len(row) for part in parts for row in part}) != 1:
            raise ConfigError(
                f"the rows of {name!r} differ in length", fix="shards cut along the rows are equally wide"
            )
    largest = max(abs(number) for parts in matrices.values() for part in parts for row in part for number in row)
    with styled():
        figure = new_figure(3.4 * len(matrices) + 0.4, 3.1, title)
        grid = figure.subplots(1, len(matrices), squeeze=False)[0]
        for axes, (name, parts) in zip(grid, matrices.items(), strict=True):
            rows = [row for part in parts for row in part]
            axes.imshow(rows, vmin=-largest, vmax=largest, aspect="auto", interpolation="nearest")
            start = 0
            middles = []
            for part in parts:
                if start:
                    axes.axhline(start - 0.5, color="white", linewidth=3.5)
                    axes.axhline(start - 0.5, color=INK, linewidth=1.2)
                middles.append(start + (len(part) - 1) / 2)
                start += len(part)
            axes.set_yticks(middles, [f"rank {r}" for r in range(len(parts))])
            axes.set_xticks([])
            axes.grid(visible=False)
            axes.tick_params(length=0)
            axes.set_title(name)
    return figure
