"""Horizontal bars: amounts made of parts, bytes predicted beside bytes measured, a step's time part by part."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import (
    BYTES,
    FAINT,
    INK,
    MEASURED,
    PAPER,
    PREDICTED,
    PREDICTED_LINE,
    REFERENCE,
    SECONDS,
    Picture,
    bytes_text,
    legend,
    new_figure,
    rows_of_bars,
    sample,
    scaled,
    styled,
)
from minimegatron.viz.timeline import LOOKS, SAID

# --------------------------------------------------------------------------------------------------- bars made of parts
GREYS = (PAPER, REFERENCE[0], FAINT, MEASURED[0])
FAR = 6  # a limit so many times as far away as the longest bar reaches would leave little to see of the bars


def stacked(
    bars: Mapping[str, Mapping[str, float]],
    *,
    predicted: Mapping[str, float] | None = None,
    whole: str = "",
    title: str = "",
    what: str = "",
    looks: Mapping[str, str] | None = None,
    limit: float | None = None,
) -> Picture:
    """One horizontal bar for each entry, its parts one after the other, its sum at its end.

    Args:
        bars: {bar: {part: amount}}, drawn from the top; a part has the same look in all bars.
        predicted: {bar: sum}, drawn as a dashed line across the bar.
        whole: the part that is replicated on every rank, hatched.
        title: above the picture.
        what: label of the axis: "GB on one rank".
        looks: {part: colour} for parts that have a colour in other pictures too, in the order of the bars.
        limit: the most that a bar may reach, drawn as a line through all of them if it is near.

    Raises:
        ConfigError: nothing to draw, or more parts than looks, or one that has none.
    """
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    if not parts:
        raise ConfigError("bars of nothing", fix="give at least one amount")
    if looks is None and len(parts) > len(GREYS):
        raise ConfigError(f"{len(parts)} parts: {', '.join(parts)}", fix=f"at most {len(GREYS)} can be told apart")
    looks = dict(zip(parts, GREYS, strict=False)) if looks is None else looks
    if strange := [part for part in parts if part not in looks]:
        raise ConfigError(f"{strange[0]} has no colour among {', '.join(looks)}", fix="give it one")
    parts.sort(key=list(looks).index)
    sums = {name: sum(bar.values()) for name, bar in bars.items()}
    most = max([*sums.values(), *(predicted or {}).values()])
    near = limit is not None and limit <= FAR * most
    most = max(most, limit) if limit is not None and near else most
    with styled():
        figure = new_figure(8.0, 1.15 + 0.38 * len(bars), title)
        axes = figure.subplots()
        left = dict.fromkeys(bars, 0.0)
        for part in parts:
            pattern = "//" if part == whole else ""
            amounts = [bar.get(part, 0.0) for bar in bars.values()]
            axes.barh(list(bars), amounts, left=list(left.values()), label=part, height=0.7,
                      color=looks[part], hatch=pattern, edgecolor=INK, linewidth=0.6)  # fmt: skip
            left = {name: left[name] + amount for name, amount in zip(bars, amounts, strict=True)}
        for i, (name, total) in enumerate(sums.items()):
            end = max(total, (predicted or {}).get(name, 0.0))
            axes.text(end + 0.012 * most, i, _amount(total), va="center", fontsize=8)
            if predicted and name in predicted:
                label = "predicted sum" if i == 0 else None
                axes.plot([predicted[name]] * 2, [i - 0.45, i + 0.45], label=label, **PREDICTED_LINE)  # type: ignore[arg-type]
        if limit is not None:
            label = f"limit: {_amount(limit)}" + ", beyond the axis" * (not near)
            axes.plot([limit] * 2 * near, [-0.6, len(bars) - 0.4] * near, label=label, **PREDICTED_LINE)
            axes.set_ylim(-0.6, len(bars) - 0.4)
        axes.invert_yaxis()
        axes.set_xlim(0, 1.12 * most)
        axes.set_xlabel(what)
        rows_of_bars(axes, list(bars), range(len(bars)))
        legend(figure, axes.get_legend_handles_labels()[0], 4)
    return figure


def _amount(total: float) -> str:
    """Three digits, or all digits from a thousand on: 13.7, 1,032."""
    return f"{total:.3g}" if total < 1000 else f"{total:,.0f}"


# ----------------------------------------------------------------------------------------- bytes predicted and measured
# The comparison that matters is equality, and the eye cannot see a percent on a bar, so each pair of bars also carries
# its numbers and their ratio.


def byte_bars(
    predicted: Mapping[str, float],
    measured: Mapping[str, float] | None = None,
    *,
    title: str = "",
    what: str = "sent by one rank",
) -> Figure:
    """Horizontal bars of bytes.

    Args:
        predicted: {name: bytes}, drawn from the top in this order; empty if nothing was predicted.
        measured: the same keys, or some of them, or more; absent ones count as 0 and are labelled "not measured".
        title: above the picture.
        what: label of the axis: "sent by one rank", "kept by one rank".

    Raises:
        ConfigError: nothing to draw.
    """
    keys = list(dict.fromkeys([*predicted, *(measured or {})]))
    if not keys:
        raise ConfigError("bars of nothing", fix="give at least one number of bytes")
    series = [("predicted", predicted, *PREDICTED)] if predicted else []
    if measured is not None:
        series.append(("measured", measured, *MEASURED))
    most = max(max(table.values(), default=0.0) for _, table, _, _ in series)
    divisor, unit = scaled(most, BYTES, 1024)
    height = 0.8 / len(series)
    with styled():
        figure = new_figure(8.0, 0.9 + 0.55 * len(keys), title)
        axes = figure.subplots()
        for i, (name, table, colour, pattern) in enumerate(series):
            places = [k + (i - (len(series) - 1) / 2) * height for k in range(len(keys))]
            values = [table.get(key, 0.0) / divisor for key in keys]
            label = f"{name} (x: times what was predicted)" if name == "measured" and predicted else name
            look = {"color": colour, "hatch": pattern, "edgecolor": INK, "linewidth": 0.7}
            axes.barh(places, values, height * 0.92, label=label, **look)  # type: ignore[arg-type]
            for place, key, value in zip(places, keys, values, strict=True):
                axes.text(
                    value, place, "  " + _label(key, name, predicted, table, divisor, unit), va="center", fontsize=8
                )
        rows_of_bars(axes, keys, range(len(keys)))
        axes.invert_yaxis()
        axes.set_xlim(0, most / divisor * 1.3 or 1.0)
        axes.set_xlabel(f"{unit} {what}")
        if len(series) > 1:
            legend(figure, axes.get_legend_handles_labels()[0], fontsize=None)
    return figure


def _label(
    key: str, name: str, predicted: Mapping[str, float], table: Mapping[str, float], divisor: float, unit: str
) -> str:
    if key not in table:
        return f"not {name}"
    value = table[key] / divisor
    text = f"{value:.3g} {unit}" if value >= 0.01 else bytes_text(table[key])  # in the unit of the axis
    if name == "measured" and predicted.get(key):
        text += f"  (x {table[key] / predicted[key]:.3g})"
    return text


# -------------------------------------------------------------------------- how one amount of time becomes a longer one
# A bar begins where the one above it ends, in the look of its kind on a timeline. Where the useful work is known, the
# numbers at the right are the rate when everything down to that bar is counted.


def waterfall(parts: Mapping[str, tuple[float, str]], *, work: float = 0.0, title: str = "") -> Picture:
    """Seconds that add up, from the top.

    Args:
        parts: {name: (seconds, a kind of `timeline.LOOKS`)}; negative seconds go back.
        work: useful FLOPs in that time; 0 writes no rates.
        title: above the picture.

    Raises:
        ConfigError: nothing to draw, or a kind that has no look.
    """
    whole = sum(seconds for seconds, _ in parts.values())
    if not whole > 0:
        raise ConfigError("a waterfall of nothing", fix="give at least one part that takes time")
    if strange := sorted({kind for _, kind in parts.values()} - LOOKS.keys()):
        raise ConfigError(f"a part of kind {strange[0]!r}", fix=f"choose among {', '.join(LOOKS)}")
    divisor, unit = scaled(whole * 1e6, SECONDS, 1000)
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
        rows_of_bars(axes, [*parts, "the step"], range(len(parts) + 1))
        axes.set_ylim(len(parts) + 0.5, -0.5)
        axes.set_xlim(0, 1.02 * per_second * whole)
        axes.set_xlabel(f"time in {unit}")
        kinds = [kind for kind in LOOKS if any(kind == other for _, other in parts.values())]
        legend(figure, [sample(SAID.get(k, k), *LOOKS[k], linewidth=0.5) for k in kinds], fontsize=None)
    return figure


def _numbers(axes: Axes, row: float, texts: tuple[str, ...]) -> None:
    """Write columns to the right of a bar."""
    for x, text in zip((1.09, 1.215, 1.34), texts, strict=True):
        axes.text(x, row, text, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=9)
