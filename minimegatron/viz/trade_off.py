"""What a schedule costs in memory and in time, as a point in a plane: the nearer to the lower left, the better.

To the right: the activations that the fullest rank keeps, in units of what a rank keeps of one microbatch (a chunk
counts 1/v of it). Upwards: the bubble, idle time over work. Points that lie on each other share one label. Where the
same schedules stood before, with another number of microbatches, they are pale and larger, so that a point that now
stands there hides none, and an arrow leads from there to here. Then the bubble is on a logarithmic scale: each halving
is one length, of a small bubble too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, MEASURED, REFERENCE, new_figure, styled

Point = tuple[float, float]  # activations kept, bubble

SIZE = 6.8, 4.0  # inches
ROOM = 435.0, 205.0  # of the axes inside, about, in points
LETTER, HALF = 5.2, 5.0  # a label's letter and half a line, in points
ASIDE = 10  # from a point to its label
PALE = 15  # points wide: a point that stood here; one that stands here has 9


def trade_off(
    predicted: Mapping[str, Point],
    measured: Mapping[str, Point] | None = None,
    title: str = "",
    before: Mapping[str, Point] | None = None,
) -> Figure:
    """Schedules by memory and bubble.

    Args:
        predicted: {name: (activations kept, bubble)}, a bubble of 0.25 being a quarter of the work.
        measured: of the same names, drawn filled beside the hollow ones.
        title: above the picture.
        before: where points of these names stood, e.g. with half as many microbatches; other names are left out.

    Raises:
        ConfigError: no point at all, or something is measured that was not predicted.
    """
    measured = measured or {}
    if not predicted or not set(measured) <= set(predicted):
        raise ConfigError(
            f"points for {sorted(predicted)} and measured ones for {sorted(measured)}",
            fix="predict at least one, and each that is measured",
        )
    before = {name: point for name, point in (before or {}).items() if name in predicted}
    together: dict[Point, list[str]] = {}
    for name, (kept, bubble) in predicted.items():
        together.setdefault((round(kept, 3), round(bubble, 4)), []).append(name)
    points = [*predicted.values(), *measured.values(), *before.values()]
    high = 1.3 * max(kept for kept, _ in points), 1.15 * max(*(bubble for _, bubble in points), 0.01)
    least = min(bubble for _, bubble in points)
    low = least / 1.6 if before and least > 0 else 0.0  # of a logarithmic scale
    high = high if not low else (high[0], 1.3 * high[1])
    with styled():
        figure = new_figure(*SIZE, title)
        axes = figure.subplots()
        for name, point in before.items():
            _moved(axes, point, predicted[name])
        labels = [(point, ", ".join(names)) for point, names in together.items()]
        for (kept, bubble), text, (across, up) in _placed(labels, points, low, high):
            axes.plot([kept], [100 * bubble], "o", markersize=9, markerfacecolor="white", markeredgecolor=INK)
            side = "left" if across > 0 else "right" if across < 0 else "center"
            axes.annotate(
                text, (kept, 100 * bubble), (across, up), textcoords="offset points", va="center", ha=side, fontsize=9,
            )  # fmt: skip
        for name, (kept, bubble) in measured.items():
            (x, y) = predicted[name]
            axes.plot([x, kept], [100 * y, 100 * bubble], linewidth=0.8, linestyle=":", color=INK)
            axes.plot([kept], [100 * bubble], "o", markersize=6, color=MEASURED[0])
        if before:
            axes.plot([], [], "o", markersize=PALE, color=REFERENCE[0], label="before")
        axes.plot([], [], "o", markersize=9, markerfacecolor="white", markeredgecolor=INK, label="predicted")
        if measured:
            axes.plot([], [], "o", markersize=6, color=MEASURED[0], label="measured")
        axes.set_xlim(0, high[0])
        if low:
            axes.set_yscale("log", base=2)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(100 * low, 100 * high[1])
        axes.set_xlabel("most activations kept (1: what a rank keeps of one microbatch)")
        axes.set_ylabel("bubble, % of the work")
        axes.text(0.01, 0.02, "↙ better", transform=axes.transAxes, fontsize=9)
        axes.grid(visible=True, axis="both")
        if measured or before:
            figure.legend(loc="outside lower center", ncols=3)
    return figure


def _moved(axes: Axes, old: Point, new: Point) -> None:
    """A pale point where a schedule stood, and an arrow from there to where it stands."""
    axes.plot([old[0]], [100 * old[1]], "o", markersize=PALE, color=REFERENCE[0])
    if old != new:
        shape = {"arrowstyle": "-|>", "color": REFERENCE[0], "shrinkA": 6, "shrinkB": 7}
        axes.annotate("", (new[0], 100 * new[1]), (old[0], 100 * old[1]), arrowprops=shape)


def _placed(
    labels: list[tuple[Point, str]], points: Iterable[Point], low: float, high: Point
) -> Iterable[tuple[Point, str, tuple[int, int]]]:
    """Each label with its offset: the first place inside the axes that is free of points and of other labels."""

    def at_points(point: Point) -> Point:
        if low:
            return point[0] * ROOM[0] / high[0], math.log(point[1] / low) / math.log(high[1] / low) * ROOM[1]
        return point[0] * ROOM[0] / high[0], point[1] * ROOM[1] / high[1]

    dots = [at_points(point) for point in points]
    taken = [(0.0, 0.0, 52.0, 14.0), *((x - 7, y - 7, x + 7, y + 7) for x, y in dots)]  # "better", and points
    for point, text in labels:
        (x, y), wide = at_points(point), LETTER * len(text)
        at = {
            (ASIDE, 0): x + ASIDE, (-ASIDE, 0): x - ASIDE - wide, (0, 15): x - wide / 2, (0, -15): x - wide / 2,
            (ASIDE, 13): x + ASIDE, (ASIDE, -13): x + ASIDE, (-ASIDE, 13): x - ASIDE - wide,
            (-ASIDE, -13): x - ASIDE - wide,
        }  # fmt: skip
        boxes = {place: (left, y + place[1] - HALF, left + wide, y + place[1] + HALF) for place, left in at.items()}
        inside = {p: b for p, b in boxes.items() if b[0] > 0 and b[1] > 0 and b[2] < ROOM[0] and b[3] < ROOM[1]}
        free = [place for place, box in inside.items() if not any(_meet(box, other) for other in taken)]
        place = next(iter([*free, *inside, *boxes]))
        taken.append(boxes[place])
        yield point, text, place


def _meet(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return min(a[2], b[2]) > max(a[0], b[0]) and min(a[3], b[3]) > max(a[1], b[1])
