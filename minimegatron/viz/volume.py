"""How much travels: bytes predicted beside bytes measured, one pair of bars for each kind of message.

The comparison that matters is equality, and the eye cannot see a percent on a bar, so each pair also carries its
numbers and their ratio.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from matplotlib.figure import Figure

from minimegatron.errors import ConfigError
from minimegatron.trace import Event
from minimegatron.viz.picture import INK, MEASURED, PREDICTED, bytes_text, new_figure, scaled, styled


def wire_bytes(events: Iterable[Event]) -> dict[str, float]:
    """Bytes one rank sends if every collective runs as a ring: `{"all_reduce over tp": 24576.0, ...}`."""
    table: dict[str, float] = {}
    for event in events:
        if event.kind == "comm":
            key = f"{event.name} over {event.axis}" if event.axis else event.name
            table[key] = table.get(key, 0.0) + event.wire_bytes
    return dict(sorted(table.items()))


def bars(
    predicted: Mapping[str, float],
    measured: Mapping[str, float] | None = None,
    *,
    title: str = "",
    what: str = "sent by one rank",
) -> Figure:
    """Horizontal bars of bytes.

    Args:
        predicted: bytes by what they belong to, drawn from the top in this order; empty where nothing was predicted.
        measured: the same keys, or some of them, or more; absent ones count as 0 and are said to be.
        title: above the picture.
        what: happens to the bytes, for the axis: "sent by one rank", "kept by one rank".

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
    divisor, unit = scaled(most, ("B", "KiB", "MiB", "GiB", "TiB"), 1024)
    height = 0.8 / len(series)
    with styled():
        figure = new_figure(8.0, 0.9 + 0.55 * len(keys), title)
        axes = figure.subplots()
        for i, (name, table, colour, pattern) in enumerate(series):
            places = [k + (i - (len(series) - 1) / 2) * height for k in range(len(keys))]
            values = [table.get(key, 0.0) / divisor for key in keys]
            said = f"{name} (x: times what was predicted)" if name == "measured" and predicted else name
            axes.barh(
                places, values, height * 0.92, label=said, color=colour, hatch=pattern, edgecolor=INK, linewidth=0.7
            )
            for place, key in zip(places, keys, strict=True):
                axes.text(
                    table.get(key, 0.0) / divisor,
                    place,
                    "  " + _label(key, name, predicted, table, divisor, unit),
                    va="center",
                    fontsize=8,
                )
        axes.set_yticks(range(len(keys)), keys)
        axes.invert_yaxis()
        axes.set_xlim(0, most / divisor * 1.3 or 1.0)
        axes.set_xlabel(f"{unit} {what}")
        axes.grid(axis="x", visible=True)
        axes.grid(axis="y", visible=False)
        axes.tick_params(axis="y", length=0)
        if len(series) > 1:
            figure.legend(loc="outside lower center", ncols=2)
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
