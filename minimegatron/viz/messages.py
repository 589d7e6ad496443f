"""The messages of a program one after the other: what each is, how many bytes it sends, and what was predicted.

A message is a box as wide as its bytes, each kind in a tint of its own; forward stands above backward. So the picture
shows at a glance that a reduce-scatter and an all-gather are the halves of an all-reduce, and which messages one way
has and another has not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.patches import Patch

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import COMM, INK, Picture, box, new_figure, scaled, styled

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_TINTS = {"all_gather": 0.35, "reduce_scatter": 0.65, "all_reduce": 1.0}  # of the colour of communication
_SHORT = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce"}


@dataclasses.dataclass(frozen=True)
class Message:
    """A collective: its name, the bytes that one rank sends for it, and whether it belongs to the backward pass.

    `again`: it brings what another message has brought before; its frame is dashed.
    """

    name: str
    sent: float
    backward: bool = False
    again: bool = False


def strips(
    programs: Mapping[str, Sequence[Message]], predicted: Mapping[str, float] | None = None, *, title: str = ""
) -> Picture:
    """A strip of messages for each program.

    Args:
        programs: {title: its messages, in order}.
        predicted: {title: bytes in all}, written beside the bytes that were counted.

    Raises:
        ConfigError: nothing to draw, or a message that is none of `KINDS`.
    """
    everything = [message for messages in programs.values() for message in messages]
    if not everything:
        raise ConfigError("no message to draw", fix="give at least one")
    if odd := {message.name for message in everything} - set(KINDS):
        raise ConfigError(f"a message called {min(odd)}", fix=f"one of {', '.join(KINDS)}")
    sums = {name: sum(m.sent for m in messages) for name, messages in programs.items()}
    divisor, unit = scaled(max(sums.values()), ("B", "KiB", "MiB", "GiB"), 1024)
    longest = max(
        sum(m.sent for m in messages if m.backward is way) for messages in programs.values() for way in (False, True)
    ) / divisor  # fmt: skip
    with styled():
        figure = new_figure(9.0, 0.9 + 0.85 * len(programs), title)
        axes = figure.subplots()
        for i, (name, messages) in enumerate(programs.items()):
            for way in (False, True):
                _strip(axes, [m for m in messages if m.backward is way], 2.4 * i + way, divisor, longest)
                axes.text(-0.01 * longest, 2.4 * i + way + 0.45, "backward" if way else "forward",
                          ha="right", va="center", fontsize=8)  # fmt: skip
            axes.text(-0.13 * longest, 2.4 * i + 0.95, name, ha="right", va="center", fontsize=9, weight="bold")
            counted = f"{sums[name] / divisor:.4g} {unit} sent"
            if predicted is not None and name in predicted:
                counted += f"\n{predicted[name] / divisor:.4g} {unit} predicted"
            axes.text(1.02 * longest, 2.4 * i + 0.95, counted, ha="left", va="center", fontsize=9)
        axes.set_xlim(-0.36 * longest, 1.26 * longest)
        axes.set_ylim(2.4 * len(programs) - 0.4, -0.1)
        axes.set_axis_off()
        axes.set_xticks([])
        axes.set_yticks([])
        seen = [kind for kind in KINDS if any(m.name == kind for m in everything)]
        handles = [Patch(facecolor=_tint(k), edgecolor="white", linewidth=0.6, label=_SHORT[k]) for k in seen]
        if any(m.again for m in everything):
            handles.append(Patch(facecolor="none", edgecolor=INK, linestyle="--", label="x gathered again, for dW"))
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def _tint(name: str) -> str:
    share, white = _TINTS[name], 1 - _TINTS[name]
    red, green, blue = (share * part + white for part in to_rgb(COMM))
    return to_hex((red, green, blue))


def _strip(axes: Axes, messages: Sequence[Message], y: float, divisor: float, longest: float) -> None:
    x = 0.0
    for message in messages:
        wide = message.sent / divisor
        name = _SHORT[message.name].replace("reduce-s", "reduce-\ns")
        text = f"{name} {wide:.3g}" if wide > 0.11 * longest else f"{wide:.3g}"
        edge = INK if message.again else "white"
        box(axes, (x, y), (wide, 0.88), _tint(message.name), text, edge=edge, fontsize=7, dashed=message.again)
        x += wide
