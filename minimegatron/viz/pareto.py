"""Time against memory of many layouts: the nearer to the lower left, the better.

A layout is on the *front* if no other is both smaller and faster. Both axes are logarithmic, since the worst of a
thousand layouts is a hundred times slower than the best.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from matplotlib.ticker import LogFormatter

from minimegatron.errors import ConfigError
from minimegatron.viz.bars import FAR
from minimegatron.viz.picture import (
    BYTES,
    FAINT,
    INK,
    PALETTE,
    PREDICTED_LINE,
    SECONDS,
    Picture,
    new_figure,
    scaled,
    styled,
)

Point = tuple[float, float]  # bytes, seconds


def front(points: Iterable[Point]) -> list[Point]:
    """The points that no other point beats in both, from the smallest and slowest to the largest and fastest."""
    found: list[Point] = []
    for point in sorted(points):
        if not found or point[1] < found[-1][1]:
            found.append(point)
    return found


def pareto(
    estimated: Sequence[Point],
    planned: Sequence[Point],
    best: str,
    *,
    limit: float | None = None,
    title: str = "Layouts by memory and time",
) -> Picture:
    """Draw every layout that was estimated, and those that were planned.

    Args:
        estimated: (bytes, seconds) of each.
        planned: (bytes, seconds) of those that were planned, drawn as rings; a star marks the fastest.
        best: name of the fastest.
        limit: bytes of a GPU, drawn as a line if it is near.
        title: above the picture.

    Raises:
        ConfigError: one of the two is empty.
    """
    if not estimated or not planned:
        raise ConfigError(f"{len(estimated)} estimates and {len(planned)} plans", fix="give one of each at least")
    divisor, unit = scaled(min(nbytes for nbytes, _ in estimated), BYTES, 1024)
    tick, time = scaled(min(seconds for _, seconds in estimated) * 1e6, SECONDS, 1000)
    fastest = min(planned, key=lambda point: point[1])

    def columns(points: Iterable[Point]) -> tuple[list[float], list[float]]:
        pairs = [(nbytes / divisor, seconds * 1e6 / tick) for nbytes, seconds in points]
        return [x for x, _ in pairs], [y for _, y in pairs]

    with styled():
        figure = new_figure(7.6, 4.6, title)
        axes = figure.subplots()
        axes.plot(*columns(estimated), ".", color=FAINT, markersize=3, label=f"estimated: {len(estimated):,}")
        axes.plot(*columns(front(estimated)), color=INK, linewidth=1.4, drawstyle="steps-post", label="their front")
        axes.plot(*columns([fastest]), "*", markersize=19, color="none", markeredgecolor=PALETTE[2],
                  markeredgewidth=1.8, label=f"the fastest: {best}")  # fmt: skip
        axes.plot(*columns(planned), "o", markersize=4.5, color="none", markeredgecolor=INK, markeredgewidth=1.2,
                  label=f"planned: {len(planned)}")  # fmt: skip
        if limit is not None and limit <= FAR * max(nbytes for nbytes, _ in estimated):
            axes.axvline(limit / divisor, label="memory for tensors", **PREDICTED_LINE)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel(f"{unit} of the fullest rank")
        axes.set_ylabel(f"{time} of a step")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(LogFormatter())
            axis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
        axes.grid(axis="both", visible=True)
        figure.legend(loc="outside lower center", ncols=2)
    return figure
