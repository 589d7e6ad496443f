"""Throughput against latency of a server: what each further request a second costs those who wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.ticker import LogLocator, NullLocator

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, PALETTE, PREDICTED_LINE, Picture, legend, new_figure, panels, styled

NAMES = {"ttft": "time to first token", "tpot": "time per token after it", "e2el": "whole answer"}

SHORTEST = 1e-3  # ms: pieces that arrived together are 0 apart, which a logarithmic axis cannot show


def throughput_latency(
    points: Sequence[tuple[str, Mapping[str, Any]]],
    deadlines: Mapping[str, float] = {},
    title: str = "Throughput and latency",
) -> Picture:
    """A panel a metric: output tokens a second to the right, milliseconds upwards, p50 to p99 as a band.

    Args:
        points: (label, e.g. "4/s", summary (`serving/load`)) of each run, in the order in which the load grew.
        deadlines: metric -> seconds, a dashed line each.
        title: above the picture.

    Raises:
        ConfigError: no run has an answer.
    """
    drawn = [(label, s) for label, s in points if s["completed"]]
    if not drawn:
        raise ConfigError(f"none of {len(points)} runs has an answer", fix="see the errors of the runs")
    with styled():
        figure = new_figure(9.6, 3.6, title)
        for axes, metric in panels(figure, {NAMES[name]: name for name in NAMES}):
            runs = [(label, s) for label, s in drawn if s[f"p50_{metric}_ms"] is not None]
            x = [s["output_throughput"] for _, s in runs]
            middle, upper = ([max(s[f"{p}_{metric}_ms"], SHORTEST) for _, s in runs] for p in ("p50", "p99"))
            axes.plot(x, upper, "^--", color=PALETTE[3], markeredgecolor=INK, markeredgewidth=0.5, label="p99")
            axes.plot(x, middle, "o-", color=INK, label="p50")
            for (label, _), across, up in zip(runs, x, middle, strict=True):
                axes.annotate(label, (across, up), (5, -2), textcoords="offset points", va="top", fontsize=8)
            if metric in deadlines:
                axes.axhline(deadlines[metric] * 1000, label="deadline", **PREDICTED_LINE)
            axes.set_xlim(0, 1.4 * max(x, default=1))
            axes.set(xlabel="output tokens a second", ylabel="ms")
            if runs:  # no answer may have a second token
                axes.set_yscale("log")
                axes.margins(y=0.15)
                axes.set_yticks(ticks(*axes.get_ylim()))
                axes.yaxis.set_major_formatter("{x:g}")
                axes.yaxis.set_minor_locator(NullLocator())
        handles = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
        legend(figure, list(handles.values()))
    return figure


def ticks(low: float, high: float) -> list[float]:
    """Round numbers for a logarithmic axis, three or more if possible."""
    found: list[float] = []
    for digits in ((1.0,), (1.0, 2.0, 5.0), tuple(map(float, range(1, 10)))):
        found = [float(t) for t in LogLocator(subs=digits).tick_values(low, high) if low <= t <= high]
        if len(found) >= 3:
            break
    return found
