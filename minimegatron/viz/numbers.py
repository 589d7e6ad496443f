"""Numbers in few bits: which ones a format has, and how far a cast is off, recipe by recipe.

A floating-point format has the same count of numbers between any two powers of two, so their steps double with each.
Below 2^lowest the steps stay as they are, down to 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, new_figure, styled

Format = tuple[int, int, float]  # mantissa bits, lowest exponent, largest number
_BARS = (("white", ""), ("#c8c8c8", "///"), ("#555555", ""))


def numbers_of(format: Format, low: float, high: float) -> list[float]:
    """The numbers of a format from `low` to `high`, neither of them negative, ascending."""
    mantissa, lowest, top = format
    found, exponent = [m * 2.0 ** (lowest - mantissa) for m in range(2**mantissa)], lowest
    while 2.0**exponent <= min(high, top):
        found += [(1 + m / 2**mantissa) * 2.0**exponent for m in range(2**mantissa)]
        exponent += 1
    return [number for number in found if low <= number <= min(high, top)]


def number_lines(formats: Mapping[str, Format], ranges: Sequence[tuple[float, float]], title: str = "") -> Figure:
    """A mark for each number of each format, in a panel for each range.

    Raises:
        ConfigError: no format, or a range without a number.
    """
    if not formats or not ranges:
        raise ConfigError("no numbers to draw", fix="give a format and a range")
    with styled():
        figure = new_figure(8.6, 0.8 + (0.45 + 0.34 * len(formats)) * len(ranges), title)
        for axes, (low, high) in zip(figure.subplots(len(ranges), 1, squeeze=False)[:, 0], ranges, strict=True):
            for place, (name, format) in enumerate(formats.items()):
                found = numbers_of(format, low, high)
                if not found:
                    raise ConfigError(f"{name} has no number from {low:g} to {high:g}", fix="another range")
                axes.plot([low, high], [place, place], "-", color=INK, linewidth=0.6)
                axes.plot(found, [place] * len(found), "|", color=INK, markersize=11, markeredgewidth=1.6)
            axes.set_yticks(range(len(formats)), [*formats])
            axes.set_ylim(len(formats) - 0.4, -0.6)
            span = high - low
            axes.set_xlim(low - 0.01 * span, high + 0.01 * span)
            axes.grid(visible=False)
            axes.spines["left"].set_visible(False)
            axes.tick_params(axis="y", length=0)
            axes.set_title(f"from {low:g} to {high:g}", fontsize=9)
    return figure


def error_bars(tensors: Sequence[str], errors: Mapping[str, Sequence[float]], title: str = "") -> Figure:
    """Relative errors on a logarithmic axis: a group of bars for each tensor, a bar for each recipe, its value above.

    Args:
        tensors: names of the groups.
        errors: {recipe: for each tensor a number above 0}; at most three recipes.

    Raises:
        ConfigError: nothing to draw, too many recipes, or an error that has no place on the axis.
    """
    if not errors or not tensors or len(errors) > len(_BARS):
        raise ConfigError(f"{len(errors)} recipes on {len(tensors)} tensors", fix=f"1 to {len(_BARS)} recipes")
    if bad := [name for name, row in errors.items() if len(row) != len(tensors) or not all(e > 0 for e in row)]:
        raise ConfigError(f"the errors of {bad[0]!r} cannot be drawn", fix="one above 0 for each tensor")
    width = 0.8 / len(errors)
    with styled():
        figure = new_figure(8.0, 3.2, title)
        axes = figure.subplots()
        for i, ((name, row), (colour, pattern)) in enumerate(zip(errors.items(), _BARS, strict=False)):
            places = [place + width * (i - (len(errors) - 1) / 2) for place in range(len(tensors))]
            axes.bar(places, row, 0.92 * width, color=colour, hatch=pattern, edgecolor=INK, linewidth=0.7, label=name)
            for place, error in zip(places, row, strict=True):
                axes.text(place, error * 1.1, f"{error:.1%}", ha="center", va="bottom", fontsize=8)
        axes.set_yscale("log")
        most = max(max(row) for row in errors.values())
        axes.set_ylim(min(min(row) for row in errors.values()) / 3, 3 * most)
        axes.set_xticks(range(len(tensors)), list(tensors))
        axes.set_ylabel("relative error")
        figure.legend(loc="outside right upper")
    return figure
