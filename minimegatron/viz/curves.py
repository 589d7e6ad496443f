"""Curves of a training run, and curves over the number of ranks.

The reference is thick and pale and the measurement thin on top of it, so both are visible where they agree. Their
difference has its own axis, because on the first it is narrower than a line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.ticker import LogLocator, NullLocator

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import MEASURED_LINE, REFERENCE_LINE, Picture, new_figure, styled


def beside(
    measured: Sequence[float], reference: Sequence[float], name: str, reference_name: str, what: str, title: str = ""
) -> Picture:
    """Two curves of the same steps, and below them how far they are apart.

    Raises:
        ConfigError: nothing to draw, or curves of different lengths.
    """
    if not measured or len(measured) != len(reference):
        raise ConfigError(f"curves of {len(measured)} and {len(reference)} steps", fix="draw the same steps of both")
    apart = [abs(a - b) for a, b in zip(measured, reference, strict=True)]
    with styled():
        figure = new_figure(7.4, 4.0, title)
        upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        upper.plot(reference, label=reference_name, **REFERENCE_LINE)
        upper.plot(measured, label=name, **MEASURED_LINE)
        upper.set_ylabel(what)
        upper.legend()
        lower.plot(apart, marker=".", **MEASURED_LINE)
        lower.set_ylim(bottom=0)
        lower.set(xlabel="step", ylabel="distance")
    return figure


def losses(curves: Mapping[str, Sequence[float]], title: str = "") -> Picture:
    """Loss curves in one picture, distinguished by colour and dashes.

    Raises:
        ConfigError: nothing to draw.
    """
    if not curves:
        raise ConfigError("no curve to draw", fix="give at least one")
    with styled():
        figure = new_figure(7.4, 2.8, title)
        axes = figure.subplots()
        for name, values in curves.items():
            axes.plot(values, label=name)
        axes.set(xlabel="step", ylabel="loss")
        if len(curves) > 1:
            axes.legend()
    return figure


def over_degrees(degrees: Sequence[int], curves: Mapping[str, Sequence[float]], *, title: str, what: str) -> Picture:
    """Curves over the number of ranks, on two logarithmic axes: halving is a straight line downwards.

    Raises:
        ConfigError: nothing to draw, or a curve that has not one value for each degree.
    """
    if not curves or any(len(values) != len(degrees) for values in curves.values()):
        raise ConfigError(f"curves over {len(degrees)} degrees", fix="give each a value for every degree")
    with styled():
        figure = new_figure(7.4, 3.2, title)
        axes = figure.subplots()
        for name, values in curves.items():
            axes.plot(degrees, values, marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(list(degrees), [str(degree) for degree in degrees])
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 8 * low else (1, 1.5, 2, 3, 4, 6, 8)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set(xlabel="tp", ylabel=what)
        axes.legend(fontsize=8)
    return figure
