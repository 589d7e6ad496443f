"""A waterfall: how one amount of time becomes a longer one, each cause with its name and its own bar.

A bar begins where the one above it ends, so what all of them take can be read at the last one, and what a cause costs
is the length of its bar. Their looks are those of a timeline: computation, communication, memory, waiting. Where the
useful work is known, the numbers at the right say how fast it is done when everything down to that bar is counted.
"""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import FAINT, INK, Picture, new_figure, scaled, styled
from minimegatron.viz.timeline import LOOKS, SAID, UNITS


def waterfall(
    parts: Mapping[str, tuple[float, str]], *, work: float = 0.0, total: str = "the step", title: str = ""
) -> Picture:
    """Seconds that add up, from the top.

    Args:
        parts: {name: (seconds, a kind of `timeline.LOOKS`)}; what has less than no seconds goes back.
        work: useful FLOPs in that time; 0 writes no rates.
        total: name of the last bar, the sum.
        title: above the picture.

    Raises:
        ConfigError: nothing to draw, or a kind that has no look.
    """
    whole = sum(seconds for seconds, _ in parts.values())
    if not whole > 0:
        raise ConfigError("a waterfall of nothing", fix="give at least one part that takes time")
    if strange := sorted({kind for _, kind in parts.values()} - LOOKS.keys()):
        raise ConfigError(f"a part of kind {strange[0]!r}", fix=f"choose among {', '.join(LOOKS)}")
    divisor, unit = scaled(whole * 1e6, UNITS, 1000)
    per_second = 1e6 / divisor
    with styled():
        figure = new_figure(8.6, 1.35 + 0.3 * (len(parts) + 1), title)
        axes, end, rows = figure.subplots(), 0.0, [*parts.values(), (whole, "mark")]
        digits = max(0, 4 - len(f"{whole * per_second:.0f}"))
        for row, (seconds, kind) in enumerate(rows):
            start, end = (end, end + seconds) if row < len(parts) else (0.0, whole)
            colour, pattern = LOOKS[kind] if row < len(parts) else ("white", "")
            left, length = min(start, end) * per_second, abs(end - start) * per_second
            axes.barh([row], [length], left=left, height=0.72, color=colour, hatch=pattern, edgecolor=INK)
            if row < len(parts):
                axes.plot([end * per_second] * 2, [row - 0.36, row + 1.36], color=FAINT, linewidth=0.8, zorder=0)
            rate = f"{work / end / 1e12:,.0f}" if work and end > 0 else ""
            _numbers(axes, row, (f"{seconds * per_second:,.{digits}f}", f"{seconds / whole:.1%}", rate))
        _numbers(axes, -0.8, (unit, "share", "TFLOP/s" if work else ""))
        axes.set_yticks(range(len(parts) + 1), [*parts, total])
        axes.set_ylim(len(parts) + 0.5, -0.5)
        axes.set_xlim(0, 1.02 * per_second * whole)
        axes.set_xlabel(f"time in {unit}")
        axes.grid(axis="x", visible=True)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        kinds = [kind for kind in LOOKS if any(kind == other for _, other in parts.values())]
        looks = [(kind, *LOOKS[kind]) for kind in kinds]
        handles = [Patch(facecolor=c, hatch=h, edgecolor=INK, linewidth=0.5, label=SAID.get(k, k)) for k, c, h in looks]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def _numbers(axes: Axes, row: float, texts: tuple[str, ...]) -> None:
    """Columns to the right of a bar."""
    for x, text in zip((1.09, 1.215, 1.34), texts, strict=True):
        axes.text(x, row, text, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=9)
