"""What was predicted against what others have published: the nearer to the diagonal, the better."""

from __future__ import annotations

from collections.abc import Mapping

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, PALETTE, REFERENCE_LINE, Picture, new_figure, styled

MARKS = "osD^v"


def agreement(
    series: Mapping[str, Mapping[str, tuple[float, float]]], *, what: str, title: str = "", band: float = 0.1
) -> Picture:
    """A point for each run, a mark for each table that it comes from.

    Args:
        series: {table: {run: (published, predicted)}}.
        what: both axes: "TFLOP/s a GPU".
        title: above the picture.
        band: two thin lines are so far, as a share, from the diagonal.

    Raises:
        ConfigError: nothing to draw, or more tables than marks.
    """
    points = [point for runs in series.values() for point in runs.values()]
    if not points or len(series) > len(MARKS):
        raise ConfigError(f"{len(points)} runs of {len(series)} tables", fix=f"1 run or more, {len(MARKS)} tables")
    low, high = 0.85 * min(min(p) for p in points), 1.08 * max(max(p) for p in points)
    with styled():
        figure = new_figure(6.6, 5.2, title)
        axes = figure.subplots()
        axes.plot([low, high], [low, high], **REFERENCE_LINE)
        for share in (1 - band, 1 + band):
            axes.plot([low, high], [share * low, share * high], color=INK, linewidth=0.6, linestyle=":")
        for (name, runs), mark, colour in zip(series.items(), MARKS, PALETTE[1::2], strict=False):
            x, y = zip(*runs.values(), strict=True)
            axes.plot(x, y, mark, color=colour, markeredgecolor=INK, markersize=7, label=name)
            for run, (published, predicted) in runs.items():
                at = {"textcoords": "offset points", "xytext": (7, -3), "fontsize": 7}
                axes.annotate(run, (published, predicted), **at)  # type: ignore[arg-type]
        axes.plot([], [], color=INK, linewidth=0.6, linestyle=":", label=f"{band:.0%} apart")
        axes.set(xlabel=f"published: {what}", ylabel=f"predicted: {what}", xlim=(low, high), ylim=(low, high))
        axes.set_aspect("equal")
        axes.grid(visible=True, axis="both")
        axes.legend(loc="upper left", fontsize=8)
    return figure
