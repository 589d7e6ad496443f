"""Shared parts of all pictures: one style file, one palette, and figures that belong to their caller.

Figures are made without pyplot, so nothing is left in a global list and nothing pops up. A `Picture` shows itself as
the last value of a notebook cell, whether or not pyplot has been imported there.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

_T = TypeVar("_T")
STYLE = Path(__file__).with_name("minimegatron.mplstyle")

# One colour, one meaning, in every picture of every lab. What a colour says, a label, a letter or a hatch says too.
# From light to dark, so that a grey print keeps them apart; hues differ as well.
PALETTE = ("#fbe3a1", "#a8dbc5", "#f4a97b", "#84b2e3", "#d2789f", "#4f9d69", "#7a52a8", "#24406e")
# Rank 0, 1, 2, ... of whatever is drawn; none of them is a colour of WORK.
RANKS = ("#c4ecdb", "#f4a97b", "#d2789f", "#7a52a8", "#dcc8ee", "#b58a5a", "#2f8f8f", "#6e1f3a")
WORK = {"F": "#fbe3a1", "B": "#84b2e3", "W": "#4f9d69"}  # forward, backward of activations, backward of weights
COMPUTE, COMM = WORK["F"], "#24406e"
INK, FAINT, PAPER = "#222222", "#9a9a9a", "#f4f4f2"
HATCHES = ("", "///", "...", "xxx")
BYTES, SECONDS = ("B", "KiB", "MiB", "GiB", "TiB"), ("µs", "ms", "s")  # for `scaled`
# (colour, hatch) of bars: what a formula says, what was counted or timed, and what both are compared with.
PREDICTED, MEASURED, REFERENCE = ("white", "///"), ("#555555", ""), ("#c8c8c8", "")
# How a curve of each is drawn, as keyword arguments of `plot`.
PREDICTED_LINE: dict[str, Any] = {"color": INK, "linestyle": "--", "linewidth": 1.4}
MEASURED_LINE: dict[str, Any] = {"color": INK, "linestyle": "-", "linewidth": 1.4}
REFERENCE_LINE: dict[str, Any] = {"color": "#b0b0b0", "linestyle": "-", "linewidth": 5.0}


class Picture(Figure):
    """A figure that a notebook can show by itself."""

    def __repr__(self) -> str:
        # Stored beside the picture and compared when a notebook is validated; the size depends on what was measured.
        return "<Picture>"

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", bbox_inches="tight")
        return buffer.getvalue()


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """In the block matplotlib has this package's style; the caller's settings are restored after it."""
    with matplotlib.rc_context(fname=STYLE):
        yield


def new_figure(width: float, height: float, title: str = "") -> Picture:
    """An empty picture of `width` x `height` inches; call it, and draw, inside `styled()`."""
    figure = Picture(figsize=(width, height), layout="constrained")
    if title:
        figure.suptitle(title)
    return figure


def panels(figure: Figure, titled: Mapping[str, _T], *, down: bool = False, **shared: Any) -> list[tuple[Axes, _T]]:
    """Axes with a title for each entry, side by side or below each other; `shared` as for `Figure.subplots`."""
    shape = (len(titled), 1) if down else (1, len(titled))
    found = list(zip(figure.subplots(*shape, squeeze=False, **shared).flat, titled.values(), strict=True))
    for (axes, _), title in zip(found, titled, strict=True):
        axes.set_title(title)
    return found


def rows_of_bars(axes: Axes, names: Sequence[str], places: Sequence[float]) -> None:
    """Set up axes for horizontal bars: a name for each row, a grid across the amounts."""
    axes.set_yticks(places, names)
    axes.grid(axis="x", visible=True)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)


def sample(text: str, colour: str, pattern: str = "", **look: Any) -> Patch:
    """A legend entry: a filled rectangle."""
    return Patch(**{"facecolor": colour, "hatch": pattern, "edgecolor": INK, "linewidth": 0.6, "label": text, **look})


def legend(figure: Figure, handles: Sequence[Artist], columns: int | None = None, fontsize: float | None = 8) -> None:
    """Draw the legend below the picture, in one line or in `columns` columns."""
    ncols = min(columns or len(handles), len(handles))
    figure.legend(handles=handles, loc="outside lower center", ncols=ncols, fontsize=fontsize)


def arrow(
    axes: Axes, start: tuple[float, float], end: tuple[float, float], *, zorder: float | None = None, **look: Any
) -> None:
    """Draw an arrow; `look` as for `matplotlib.patches.FancyArrowPatch`."""
    axes.annotate("", xy=end, xytext=start, zorder=zorder, arrowprops={"arrowstyle": "-|>", "color": INK, **look})


def blank(axes: Axes) -> None:
    """Remove frame and ticks."""
    axes.set_axis_off()
    axes.set(xticks=[], yticks=[])
    axes.set_aspect("equal")


def box(
    axes: Axes,
    corner: tuple[float, float],
    size: tuple[float, float],
    colour: str,
    text: str = "",
    *,
    pattern: str = "",
    edge: str = "white",
    fontsize: float = 9,
    upright: bool = False,
    bold: bool = False,
    dashed: bool = False,
) -> None:
    """Draw a filled rectangle with a text in its middle; on a hatched one the text has a plain background."""
    (x, y), (width, height) = corner, size
    line = 1.6 if dashed else 1.2 if edge == "white" else 0.6
    axes.add_patch(
        Rectangle(
            corner, width, height, facecolor=colour, edgecolor=edge, hatch=pattern, linewidth=line,
            linestyle="--" if dashed else "-",
        )
    )  # fmt: skip
    if text:
        patch = {"facecolor": colour, "edgecolor": "none", "pad": 1.5} if pattern else None
        axes.text(
            x + width / 2, y + height / 2, text, ha="center", va="center", bbox=patch, clip_on=True,
            color=text_on(colour), fontsize=fontsize, rotation=90 * upright, weight="bold" if bold else "normal",
        )  # fmt: skip


def colours(n: int) -> list[str]:
    """`n` colours as far apart in lightness as the palette allows; beyond its length they repeat (see `hatch`)."""
    if n >= len(PALETTE):
        return [PALETTE[i % len(PALETTE)] for i in range(n)]
    step = (len(PALETTE) - 1) / max(1, n - 1)
    return [PALETTE[round(i * step)] for i in range(n)]


def rank_colours(n: int) -> list[str]:
    """The colours of `n` ranks: a rank has the same colour whatever `n` is; beyond eight they repeat (see `hatch`)."""
    return [RANKS[i % len(RANKS)] for i in range(n)]


def hatch(i: int) -> str:
    """The hatch that distinguishes colour `i` from colour `i - len(PALETTE)`."""
    return HATCHES[i // len(PALETTE) % len(HATCHES)]


def text_on(colour: str) -> str:
    """Black or white, whichever can be read on `colour`."""
    red, green, blue = to_rgb(colour)
    return "white" if 0.30 * red + 0.59 * green + 0.11 * blue < 0.5 else INK


def scaled(value: float, units: tuple[str, ...], base: float) -> tuple[float, str]:
    """(divisor, unit) with which `value` has one to four digits before the point."""
    power = 0 if value < 1 else min(int(math.log(value, base) + 1e-9), len(units) - 1)
    return base**power, units[power]


def bytes_text(nbytes: float) -> str:
    """`1536` -> `1.5 KiB`."""
    divisor, unit = scaled(nbytes, BYTES, 1024)
    return f"{nbytes / divisor:.4g} {unit}"
