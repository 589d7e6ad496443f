"""What each rank keeps under the stages of ZeRO: as areas, and in bytes.

`stage_grid`: a rank's memory of a model in each stage, a rectangle for each kind of number. All parameters of the
model lie from left to right and the bytes of one parameter from top to bottom (written at the left), so areas are
bytes. Hatched is what is whole on every rank; the stage that shares a kind out leaves a rank its slice of it, in the
rank's colour, and a dotted frame around what other ranks have. Beside each stage stands what that is in bytes, with
Ψ parameters and D ranks.

`stage_bars`: bytes of a rank by owner, a stage beside the other, as a formula says (hatched) and as they were counted.

Rajbhandari et al. 2020 (arXiv 1910.02054), figure 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.memory import OWNERS
from minimegatron.viz.picture import (
    FAINT,
    INK,
    PAPER,
    PREDICTED,
    Picture,
    box,
    hatch,
    new_figure,
    rank_colours,
    scaled,
    styled,
)

# From which stage on a rank keeps 1/D of it; the bytes of a parameter with bf16 weights and gradients, and AdamW's
# fp32 weights and two moments.
SHARED_FROM = {"weights": 3, "gradients": 2, "optimizer state": 1}
BYTES = {"weights": 2, "gradients": 2, "optimizer state": 12}


def bytes_per_parameter(stage: int, ranks: int, of: Mapping[str, int] = BYTES) -> Fraction:
    """What a rank keeps for each parameter of the model: 4 + 12/D bytes in stage 1."""
    return sum((Fraction(n, ranks if stage >= SHARED_FROM[kind] else 1) for kind, n in of.items()), Fraction(0))


def stage_grid(ranks: int = 4, of: Mapping[str, int] = BYTES) -> Picture:
    """Stages 0 to 3 from the top, ranks from the left.

    Args:
        ranks: D, over which states are shared out.
        of: {weights, gradients, optimizer state: bytes of a parameter}.

    Raises:
        ConfigError: fewer than two ranks, or an unknown kind.
    """
    if ranks < 2 or set(of) != set(SHARED_FROM):
        raise ConfigError(f"stages of {sorted(of)} on {ranks} ranks", fix=f"two ranks or more, and {list(SHARED_FROM)}")
    palette, height = rank_colours(ranks), sum(of.values())
    with styled():
        figure = new_figure(1.7 * ranks + 4.3, 4 * 1.15 + 0.9)
        grid = figure.subplots(4, ranks + 1, squeeze=False, width_ratios=[*[1.0] * ranks, 1.15])
        for stage, row in enumerate(grid):
            for rank, axes in enumerate(row[:-1]):
                _cell(axes, stage, rank, ranks, of, palette[rank])
                if stage == 0:
                    axes.set_title(f"rank {rank}")
            row[0].text(-0.74, height / 2, f"stage {stage}", ha="right", va="center", weight="bold")
            _kinds(row[0], of)
            row[-1].text(0.0, 0.62, _formula(stage, of), va="center", fontsize=9)
            kept = float(bytes_per_parameter(stage, ranks, of))
            row[-1].text(0.0, 0.32, f"D = {ranks}: {kept:.4g} bytes a parameter", va="center", fontsize=9)
            row[-1].set_xticks([])
            row[-1].set_yticks([])
            row[-1].set_axis_off()
        looks = [("whole on every rank", PAPER, "//"), *((f"slice of rank {r}", palette[r], "") for r in range(ranks))]
        handles = [Patch(facecolor=c, hatch=h, edgecolor=INK, linewidth=0.6, label=text) for text, c, h in looks]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)), fontsize=8)
    return figure


def _cell(axes: Axes, stage: int, rank: int, ranks: int, of: Mapping[str, int], colour: str) -> None:
    """What one rank keeps in one stage."""
    top, most = 0.0, sum(of.values())
    for kind, height in of.items():
        if stage >= SHARED_FROM[kind]:
            frame = {"facecolor": "none", "edgecolor": FAINT, "linestyle": ":", "linewidth": 0.8}
            axes.add_patch(Rectangle((0, top), 1, height, **frame))  # type: ignore[arg-type]
            box(axes, (rank / ranks, top), (1 / ranks, height), colour, edge=INK, pattern=hatch(rank))
        else:
            box(axes, (0, top), (1, height), PAPER, edge=INK, pattern="//")
        top += height
    axes.set_xlim(-0.01, 1.01)
    axes.set_ylim(1.02 * most, -0.02 * most)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_axis_off()


def _kinds(axes: Axes, of: Mapping[str, int]) -> None:
    """What each stretch from top to bottom is, at the left of a row."""
    top = 0.0
    for kind, height in of.items():
        axes.text(-0.04, top + height / 2, f"{kind}: {height}", ha="right", va="center", fontsize=7)
        top += height


def _formula(stage: int, of: Mapping[str, int]) -> str:
    """`4Ψ + 12Ψ/D`."""
    whole = sum(n for kind, n in of.items() if stage < SHARED_FROM[kind])
    cut = sum(n for kind, n in of.items() if stage >= SHARED_FROM[kind])
    return " + ".join([f"{whole}Ψ"] * bool(whole) + [f"{cut}Ψ/D"] * bool(cut))


def stage_bars(
    predicted: Mapping[str, Mapping[str, float]],
    measured: Mapping[str, Mapping[str, float]] | None = None,
    *,
    capacity: float | None = None,
    binary: bool = True,
    title: str = "",
) -> Picture:
    """Bytes of one rank, a pair of bars for each stage: predicted on the left, measured on the right.

    Args:
        predicted: {stage: {owner: bytes}}.
        measured: the same, counted; None draws the prediction alone.
        capacity: bytes of a GPU, as a dashed line.
        binary: MiB and GiB; else MB and GB.
        title: above the picture.

    Raises:
        ConfigError: nothing to draw, or other stages measured than predicted.
    """
    if not predicted or (measured is not None and measured.keys() != predicted.keys()):
        raise ConfigError(
            f"predicted {list(predicted)}, measured {list(measured or {})}", fix="the same stages in both, at least one"
        )
    sides = [predicted] if measured is None else [predicted, measured]
    most = max([capacity or 0.0, *(sum(bar.values()) for side in sides for bar in side.values())])
    units = ("B", "KiB", "MiB", "GiB", "TiB") if binary else ("B", "kB", "MB", "GB", "TB")
    divisor, unit = scaled(most, units, 1024 if binary else 1000)
    held = {owner for side in sides for bar in side.values() for owner in bar}
    owners = [owner for owner in OWNERS if owner in held] + sorted(held - OWNERS.keys())
    with styled():
        figure = new_figure(2.6 + 1.5 * len(predicted), 3.9, title)
        axes = figure.subplots()
        width = 0.4 if measured is not None else 0.55
        for i, stage in enumerate(predicted):
            for j, side in enumerate(sides):
                x = i + (j - (len(sides) - 1) / 2) * (width + 0.03)
                pattern = PREDICTED[1] if j == 0 else ""
                _bar(axes, x, width, {o: side[stage].get(o, 0.0) / divisor for o in owners}, pattern)
                total = sum(side[stage].values())
                axes.text(x, total / divisor + 0.025 * most / divisor, _short(total / divisor), ha="center", fontsize=8,
                          bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8})  # fmt: skip
        if capacity is not None:
            axes.axhline(capacity / divisor, color=INK, linestyle="--", linewidth=1.2)
        axes.set_xticks(range(len(predicted)), list(predicted))
        axes.set_xlim(-0.6, len(predicted) - 0.4)
        axes.set_ylim(0, most / divisor * 1.12)
        axes.set_ylabel(f"{unit} on one rank")
        axes.grid(visible=False, axis="x")
        handles: list[Artist] = [
            Patch(facecolor=OWNERS.get(o, "white"), edgecolor=INK, linewidth=0.5, label=o) for o in owners
        ]
        handles.append(Patch(facecolor="white", hatch=PREDICTED[1], edgecolor=INK, linewidth=0.5, label="predicted"))
        if measured is not None:
            handles.append(Patch(facecolor="white", edgecolor=INK, linewidth=0.5, label="measured"))
        if capacity is not None:
            text = f"a GPU has {_short(capacity / divisor)} {unit}"
            handles.append(Line2D([], [], color=INK, linestyle="--", linewidth=1.2, label=text))
        figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    return figure


def _bar(axes: Axes, x: float, width: float, parts: Mapping[str, float], pattern: str) -> None:
    bottom = 0.0
    for owner, amount in parts.items():
        if amount:
            look = {"color": OWNERS.get(owner, "white"), "edgecolor": INK, "linewidth": 0.5, "hatch": pattern}
            axes.bar(x, amount, width, bottom=bottom, **look)  # type: ignore[arg-type]
            bottom += amount


def _short(amount: float) -> str:
    """Three digits, or all of a thousand and more."""
    return f"{amount:.3g}" if amount < 1000 else f"{amount:,.0f}"
