"""The roofline: how fast a program can be, from how much it computes for each byte that it moves.

On the slope memory bandwidth is the bound, on the flat part arithmetic is; they meet at the machine's *ridge*. Both
axes are logarithmic. A point with a measured rate stands below its roof; one without stands on it: the best it could
reach. Of two points in one place the second is a larger, empty mark around the first. A dotted line marks the ridge of
the first machine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, new_figure, styled

_LINES = ("-", "--", ":", "-.")
_MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")
_SIZE = 8  # of a mark
_FILLS = ("white", "#c8c8c8", "#555555")  # a program is known by its mark; colours mean ranks and work elsewhere


def roof(intensity: float, peak: float, bandwidth: float) -> float:
    """The highest possible FLOP/s at this many FLOPs a byte."""
    return min(peak, intensity * bandwidth)


def _close(one: tuple[float, float], other: tuple[float, float]) -> bool:
    """Whether two marks would cover each other."""
    return all(abs(math.log10(a / b)) < 0.12 for a, b in zip(one, other, strict=True))


def _sides(axes: Axes, ridge: float) -> None:
    """Label the bound left and right of a ridge."""
    axes.axvline(ridge, color=INK, linewidth=0.8, linestyle=":")
    for words, side, off in (("memory is the bound", "right", -6), ("arithmetic is the bound", "left", 6)):
        axes.annotate(words, (ridge, 0.97), xycoords=("data", "axes fraction"), xytext=(off, 0),
                      textcoords="offset points", ha=side, va="top", fontsize=8)  # fmt: skip


def roofline(
    machines: Mapping[str, tuple[float, float]],
    points: Mapping[str, tuple[float, float | None]],
    title: str = "",
) -> Figure:
    """The roofs of machines, and programs under them.

    Args:
        machines: {name: (peak FLOP/s, bandwidth in bytes/s)}.
        points: {name: (FLOP per byte, measured FLOP/s, or None for the first machine's roof)}.
        title: above the picture.

    Raises:
        ConfigError: there is no machine, or a number that is not positive.
    """
    if not machines:
        raise ConfigError("a roofline needs a machine", fix='{"H100": (peak, bandwidth)}')
    numbers = [n for pair in (*machines.values(), *points.values()) for n in pair if n is not None]
    if bad := [n for n in numbers if not n > 0]:
        raise ConfigError(f"a roofline has logarithmic axes, {bad[0]} has no place on them", fix="positive numbers")
    ridges = [peak / bandwidth for peak, bandwidth in machines.values()]
    low = min([x for x, _ in points.values()] + ridges) / 4
    high = max([x for x, _ in points.values()] + ridges) * 4
    first = next(iter(machines.values()))
    with styled():
        figure = new_figure(7.6, 3.8, title)
        axes = figure.subplots()
        for i, (name, (peak, bandwidth)) in enumerate(machines.items()):
            ridge = peak / bandwidth
            style = _LINES[i % len(_LINES)]
            label = f"{name}: ridge at {ridge:.3g} FLOP/byte"
            axes.plot([low, ridge, high], [low * bandwidth, peak, peak], style, color=INK, linewidth=1.4, label=label)
        drawn: list[tuple[float, float]] = []
        for i, (name, (x, rate)) in enumerate(points.items()):
            y = roof(x, *first) if rate is None else rate
            fill, mark = _FILLS[i % len(_FILLS)], _MARKS[i % len(_MARKS)]
            size = _SIZE + 7 * sum(_close(place, (x, y)) for place in drawn)  # around what stands there already
            fill = "none" if size > _SIZE else fill
            drawn.append((x, y))
            axes.plot([x], [y], mark, color=fill, markeredgecolor=INK, markersize=size, linestyle="none", label=name)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlim(low, high)
        bottom, top = axes.get_ylim()
        axes.set_ylim(bottom, top * (top / bottom) ** 0.1)  # room above the roof, for what bounds a program
        axes.set_xlabel("arithmetic intensity, FLOP per byte")
        axes.set_ylabel("FLOP/s")
        axes.grid(axis="both", visible=True)
        _sides(axes, first[0] / first[1])
        for handle in figure.legend(loc="outside right upper", fontsize=8).get_lines():
            handle.set_markersize(_SIZE)  # a mark around another is as large as the others here
    return figure
