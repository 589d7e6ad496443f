"""Bars made of parts: what a rank holds, by what it is; with the sum that a formula says beside it.

The parts tell why a bar is as long as it is, which two bars of equal length do not.
"""

from __future__ import annotations

from collections.abc import Mapping

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import FAINT, INK, MEASURED, PAPER, PREDICTED_LINE, REFERENCE, Picture, new_figure, styled

# Parts have no colour of their own in the labs: greys. Hatched is what is whole on every rank, as in `regions`.
LOOKS = (PAPER, REFERENCE[0], FAINT, MEASURED[0])
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
        whole: the part that is whole on every rank, hatched.
        title: above the picture.
        what: the axis: "GB on one rank".
        looks: {part: colour} of parts that have one in other pictures too, in the order of the bars.
        limit: what a bar may reach, drawn as a line through all of them where it is not far away.

    Raises:
        ConfigError: nothing to draw, or more parts than looks, or one that has none.
    """
    parts = list(dict.fromkeys(part for bar in bars.values() for part in bar))
    if not parts:
        raise ConfigError("bars of nothing", fix="give at least one amount")
    if looks is None and len(parts) > len(LOOKS):
        raise ConfigError(f"{len(parts)} parts: {', '.join(parts)}", fix=f"at most {len(LOOKS)} can be told apart")
    looks = dict(zip(parts, LOOKS, strict=False)) if looks is None else looks
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
        axes.grid(axis="x", visible=True)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        figure.legend(
            loc="outside lower center", ncols=min(4, len(parts) + bool(predicted) + (limit is not None)), fontsize=8
        )
    return figure


def _amount(total: float) -> str:
    """Three digits, or all of a thousand and more: 13.7, 1,032."""
    return f"{total:.3g}" if total < 1000 else f"{total:,.0f}"
