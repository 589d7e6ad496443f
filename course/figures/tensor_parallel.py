"""Drawings of lab 02: cut products and weights, f and g, the regions of a layer, its messages, shards as images."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import (
    COMM,
    FAINT,
    INK,
    PAPER,
    Picture,
    arrow,
    blank,
    box,
    hatch,
    legend,
    new_figure,
    panels,
    rank_colours,
    sample,
    scaled,
    styled,
)

# --------------------------------------------------------------------------------------------- a product cut over ranks
# Two small matrices in numbers: `columns_of` and `rows_of` compute each rank's factors and its result. A number that
# every rank has stands on hatched grey, a rank's own on its colour, a part of a sum in a dashed frame; a sum has a
# stripe for every rank.
#
# | cut of A   | rank r multiplies              | its result            | to get y = x A           |
# |------------|--------------------------------|-----------------------|--------------------------|
# | by columns | all of x, some columns of A    | these columns of y    | put them side by side    |
# | by rows    | some columns of x, rows of A   | a partial sum of y    | add them                 |

Matrix = list[list[float]]


@dataclasses.dataclass(frozen=True)
class Share:
    """The factors of one rank, and its result; `whole`: x is the same on every rank."""

    x: Matrix
    a: Matrix
    y: Matrix
    whole: bool


def product(x: Sequence[Sequence[float]], a: Sequence[Sequence[float]]) -> Matrix:
    """The product x A."""
    return [[sum(p * q for p, q in zip(row, column, strict=True)) for column in zip(*a, strict=True)] for row in x]


def columns_of(x: Matrix, a: Matrix, ranks: int) -> list[Share]:
    """Rank r has all of x and an equal part of A's columns."""
    wide = len(a[0]) // ranks
    parts = [[row[r * wide : (r + 1) * wide] for row in a] for r in range(ranks)]
    return [Share(x, part, product(x, part), whole=True) for part in parts]


def rows_of(x: Matrix, a: Matrix, ranks: int) -> list[Share]:
    """Rank r has an equal part of A's rows, and the columns of x that meet them."""
    high = len(a) // ranks
    cut = [slice(r * high, (r + 1) * high) for r in range(ranks)]
    return [Share([row[c] for row in x], a[c], product([row[c] for row in x], a[c]), whole=False) for c in cut]


def cut_product(x: Matrix, a: Matrix, ranks: int = 2) -> Picture:
    """Draw y = x A on so many ranks, cut in both ways.

    Raises:
        ConfigError: the matrices do not fit each other, or cannot be cut into equal parts.
    """
    if {len(row) for row in x} != {len(a)} or len({len(row) for row in a}) != 1:
        raise ConfigError("x and A do not fit each other", fix="A needs as many rows as x has columns")
    if len(a) % ranks or len(a[0]) % ranks:
        raise ConfigError(
            f"A, {len(a)} x {len(a[0])}, on {ranks} ranks", fix="the ranks must divide its rows and its columns"
        )
    with styled():
        figure = new_figure(8.6, 0.5 * (2 * ranks * (max(len(x), len(a)) + 0.7) + 1.8))
        upper, lower = figure.subplots(2, 1)
        _draw(upper, columns_of(x, a, ranks), product(x, a), "A cut by columns: put the results side by side", False)
        _draw(lower, rows_of(x, a, ranks), product(x, a), "A cut by rows: add the results", True)
        looks = [(f"only on rank {r}", colour, "") for r, colour in enumerate(rank_colours(ranks))]
        looks.append(("whole on every rank", PAPER, "//"))
        handles = [sample(*look) for look in looks]
        handles.append(sample("partial sum", "white", linewidth=1.2, linestyle="--"))
        legend(figure, handles)
    return figure


def _draw(axes: Axes, shares: list[Share], y: Matrix, title: str, summed: bool) -> None:
    palette = rank_colours(len(shares))
    high = max(len(y), *(len(s.a) for s in shares)) + 0.7
    # every factor gets the width of the widest, so that the signs stand below each other in both panels
    wide = max(len(shares[0].x[0]), len(shares[0].a[0]) * (1 if summed else len(shares)))
    starts = [0.0, wide + 1.0, 2 * wide + 2.0, 3 * wide + 4.6]
    total = len(shares) * high - 0.7
    for r, share in enumerate(shares):
        middle = r * high + (high - 0.7) / 2
        axes.text(-0.4, middle, f"rank {r}", ha="right", va="center", fontsize=9)
        parts = ((share.x, PAPER if share.whole else palette[r]), (share.a, palette[r]), (share.y, palette[r]))
        for start, (numbers, colour) in zip(starts, parts, strict=False):
            left = start + (wide - len(numbers[0])) / 2
            partial = summed and numbers is share.y
            _numbers(axes, (left, middle - len(numbers) / 2), numbers, colour, partial)
        for sign, x in (("×", starts[1] - 0.5), ("=", starts[2] - 0.5)):
            axes.text(x, middle, sign, ha="center", va="center", fontsize=12)
    for name, start in zip(("x", "A", "own result"), starts, strict=False):
        axes.text(start + wide / 2, -0.15, name, ha="center", va="bottom", fontsize=9)
    arrow(axes, (starts[2] + wide + 0.3, total / 2), (starts[3] - 0.2, total / 2), linewidth=1.4)
    axes.text(starts[3] - 1.25, total / 2 - 0.12, "add" if summed else "join", ha="center", va="bottom", fontsize=9)
    top = (total - len(y)) / 2
    axes.text(starts[3] + len(y[0]) / 2, top - 0.15, "y = x A", ha="center", va="bottom", fontsize=9)
    if summed:
        _sums(axes, (starts[3], top), y, palette)
    else:
        each = len(shares[0].y[0])
        for r, share in enumerate(shares):
            _numbers(axes, (starts[3] + r * each, top), share.y, palette[r])
    axes.set_title(title)
    axes.set_xlim(-1.9, starts[3] + len(y[0]) + 0.3)
    axes.set_ylim(total + 0.1, -0.75)
    axes.set_xticks([])
    axes.set_yticks([])
    blank(axes)


def _numbers(axes: Axes, corner: tuple[float, float], numbers: Matrix, colour: str, partial: bool = False) -> None:
    pattern = "//" if colour == PAPER else ""
    for i, row in enumerate(numbers):
        for j, number in enumerate(row):
            place = (corner[0] + j, corner[1] + i)
            box(axes, place, (1, 1), colour, f"{number:g}", edge=INK, pattern=pattern, dashed=partial)


def _sums(axes: Axes, corner: tuple[float, float], numbers: Matrix, palette: list[str]) -> None:
    """Draw numbers with a stripe of every rank that contributed."""
    for i, row in enumerate(numbers):
        for j, number in enumerate(row):
            x, y = corner[0] + j, corner[1] + i
            box(axes, (x, y), (1, 1), PAPER, f"{number:g}", edge=INK)
            for r, colour in enumerate(palette):
                stripe = (0.9 / len(palette), 0.16)
                axes.add_patch(Rectangle((x + 0.05 + r * stripe[0], y + 0.05), *stripe, facecolor=colour))


# ---------------------------------------------------------------------------------------------- a weight cut over ranks
# A rectangle in proportion for each weight, each rank's block with its range.


@dataclasses.dataclass(frozen=True)
class Shards:
    """A logical tensor and the ranges of one of its dims that each rank holds.

    Attributes:
        name: shown above the picture.
        shape: of the logical tensor; one or two dims.
        dim: the dim that is cut; None when every rank holds the whole tensor.
        parts: for each rank, the ranges `(start, stop)` of `dim` that it holds.
        bands: names of the equal bands that are stacked along dim 0, written beside them.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = None
    parts: Sequence[Sequence[tuple[int, int]]] = ()
    bands: Sequence[str] = ()


def weight_shards(weights: Sequence[Shards]) -> Figure:
    """Draw each weight as a rectangle in proportion, with its cuts, and in every block its rank and its range.

    Raises:
        ConfigError: no tensor, or one of more than two dims.
    """
    if not weights:
        raise ConfigError("no weights to draw", fix="give at least one `Shards`")
    for weight in weights:
        if not 1 <= len(weight.shape) <= 2:
            raise ConfigError(f"{weight.name} has {len(weight.shape)} dims", fix="draw tensors of one or two dims")
    columns = min(4, len(weights))
    rows = math.ceil(len(weights) / columns)
    with styled():
        figure = new_figure(2.6 * columns, 2.9 * rows)
        grid = figure.subplots(rows, columns, squeeze=False)
        for axes in grid.flat[len(weights) :]:
            axes.set_visible(False)
        for axes, weight in zip(grid.flat, weights, strict=False):
            _draw_weight(axes, weight)
    return figure


def _draw_weight(axes: Axes, weight: Shards) -> None:
    width, height = _drawn_size(weight.shape)
    left, below = (1 - width) / 2, height + 0.05
    text = " x ".join(map(str, weight.shape))
    if weight.dim is None or len(weight.parts) <= 1:
        vector = len(weight.shape) == 1
        held = "every rank holds all" if vector else "every rank\nholds all"
        box(axes, (left, 0), (width, height), PAPER, held, pattern="//", edge=INK, upright=vector)
    else:
        text += f", dim {weight.dim} cut"
        palette, length = rank_colours(len(weight.parts)), weight.shape[weight.dim]
        for rank, ranges in enumerate(weight.parts):
            for start, stop in ranges:
                a, b = start / length, stop / length
                if weight.dim == 0:
                    corner, size = (left, a * height), (width, (b - a) * height)
                else:
                    corner, size = (left + a * width, 0.0), ((b - a) * width, height)
                upright, small = size[1] > 1.4 * size[0], min(8, 60 * min(size))
                label = f"rank {rank}\n[{start}:{stop}]"
                box(axes, corner, size, palette[rank], label, pattern=hatch(rank), fontsize=small, upright=upright)
    for i, band in enumerate(weight.bands):
        middle = (i + 0.5) * height / len(weight.bands)
        axes.text(left - 0.05, middle, band, ha="right", va="center", fontsize=9, style="italic")
    axes.set_title(weight.name)
    axes.text(0.5, below, text, ha="center", va="top", fontsize=9)
    axes.set_xlim(-0.02, 1.02)
    axes.set_ylim(1.18, -0.02)
    blank(axes)


def _drawn_size(shape: tuple[int, ...]) -> tuple[float, float]:
    """Width and height inside a unit square, in proportion but with a least width; a vector is a narrow column."""
    if len(shape) == 1:
        return 0.14, 1.0
    ratio = min(max(shape[1] / shape[0], 0.4), 2.5)
    return (1.0, 1.0 / ratio) if ratio >= 1 else (ratio, 1.0)


# -------------------------------------------------------------------------------------------------------------- f and g
# A column-parallel layer, an elementwise function, a row-parallel layer: what each rank holds. The forward pass runs
# from left to right, the backward pass below it from right to left. f and g span all ranks: dark where they
# all-reduce, white where they do nothing. Each communicates in one direction only, so the two dark boxes stand at
# opposite ends.
#
# | held        | drawn                        | meaning                                             |
# |-------------|------------------------------|-----------------------------------------------------|
# | `whole`     | grey, hatched                | every rank has the same whole tensor                |
# | `part`      | the rank's colour            | these features are on this rank alone               |
# | `sum`       | the rank's colour, dashed    | as large as the whole; the ranks' must be added     |

SENDS, NOTHING = "all-reduce", "nothing"
HATCH = "//"  # whole on every rank, as in `regions`


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor between two steps; `{r}` in a text is the rank. `held` and `held_back`: whole, part or sum."""

    forward: str
    backward: str
    held: str
    held_back: str


@dataclasses.dataclass(frozen=True)
class Work:
    """The local computation of each rank, in each direction."""

    forward: str
    backward: str


@dataclasses.dataclass(frozen=True)
class Meeting:
    """f or g: whether it sends in each direction, `SENDS` or `NOTHING`."""

    name: str
    forward: str
    backward: str


Step = Tensor | Work | Meeting
PAIR: tuple[Step, ...] = (
    Tensor("x", "dx", "whole", "whole"),
    Meeting("f", NOTHING, SENDS),
    Tensor("x", "part of dx", "whole", "sum"),
    Work("A{r}", "A{r}ᵀ"),
    Tensor("y{r}", "dy{r}", "part", "part"),
    Work("GELU", "GELU'"),
    Tensor("u{r}", "du{r}", "part", "part"),
    Work("B{r}", "B{r}ᵀ"),
    Tensor("part of z", "dz", "sum", "whole"),
    Meeting("g", SENDS, NOTHING),
    Tensor("z", "dz", "whole", "whole"),
)
_WIDTH, _GAP, _LANE = 1.05, 0.42, 1.0


def flow(steps: Sequence[Step] = PAIR, ranks: int = 2) -> Picture:
    """Draw the steps on so many ranks, forward above, backward below.

    Raises:
        ConfigError: nothing to draw, or a tensor that is held in an unknown way.
    """
    if not steps:
        raise ConfigError("a flow without steps", fix="give at least one")
    for step in steps:
        if isinstance(step, Tensor) and (odd := {step.held, step.held_back} - {"whole", "part", "sum"}):
            raise ConfigError(f"{step.forward} is held {min(odd)!r}", fix="whole, part or sum")
    with styled():
        figure = new_figure(0.92 * len(steps) + 0.9, 2 * (0.62 * ranks + 0.55) + 0.4)
        for axes, back in zip(figure.subplots(2, 1), (False, True), strict=True):
            _direction(axes, steps, ranks, back)
        palette = rank_colours(ranks)
        looks = [
            *((f"only on rank {r}", colour, "") for r, colour in enumerate(palette)),
            ("whole on every rank", PAPER, HATCH), ("the ranks talk", COMM, ""),
        ]  # fmt: skip
        handles = [sample(*look) for look in looks]
        handles.append(sample("partial sum", "white", linewidth=1.2, linestyle="--"))
        legend(figure, handles)
    return figure


def _direction(axes: Axes, steps: Sequence[Step], ranks: int, back: bool) -> None:
    palette, step_width = rank_colours(ranks), _WIDTH + _GAP
    for r in range(ranks):
        axes.text(-0.2, r * _LANE + 0.4, f"rank {r}", ha="right", va="center", fontsize=9)
    for i, step in enumerate(steps):
        x, text = i * step_width, step.backward if back else step.forward
        if isinstance(step, Meeting):
            sends = text == SENDS
            size = (_WIDTH, ranks * _LANE - 0.2)
            label = f"{step.name}\n{text.replace('-', '-' + chr(10)) if sends else text}"
            box(axes, (x, 0), size, COMM if sends else "white", label, edge=INK, fontsize=9, bold=sends)
            continue
        for r in range(ranks):
            label = text.format(r="₀₁₂₃₄₅₆₇₈₉"[r])
            if isinstance(step, Work):
                axes.text(x + _WIDTH / 2, r * _LANE + 0.4, f"× {label}" if label[0] in "AB" else label,
                          ha="center", va="center", fontsize=10, style="italic")  # fmt: skip
                continue
            held = step.held_back if back else step.held
            colour, pattern = (PAPER, HATCH) if held == "whole" else (palette[r], "")
            box(axes, (x, r * _LANE + 0.08), (_WIDTH, 0.64), colour, label, pattern=pattern, edge=INK, fontsize=8.5,
                dashed=held == "sum")  # fmt: skip
    for i in range(len(steps) - 1):
        left, right = i * step_width + _WIDTH + 0.04, (i + 1) * step_width - 0.04
        for r in range(ranks):
            ends = [(x, r * _LANE + 0.4) for x in ((right, left) if back else (left, right))]
            arrow(axes, *ends, linewidth=1.0, shrinkA=0, shrinkB=0, mutation_scale=9)
    axes.set_title("backward, from right to left" if back else "forward, from left to right")
    axes.set_xlim(-1.1, len(steps) * step_width - _GAP + 0.05)
    axes.set_ylim(ranks * _LANE - 0.1, -0.1)
    axes.set_xticks([])
    axes.set_yticks([])
    blank(axes)


# ----------------------------------------------------------------------------------------------- the regions of a layer
# How activations (rows are tokens, columns are features) are cut in each part of a transformer layer, and what is sent
# between two parts. `border` computes the messages from the cuts on both sides:
#
# | from      | to        | forward          | backward         | written as                |
# |-----------|-----------|------------------|------------------|---------------------------|
# | whole     | features  | nothing          | all-reduce       | f                         |
# | features  | whole     | all-reduce       | nothing          | g                         |
# | tokens    | features  | all-gather       | reduce-scatter   | `gather_sequence`         |
# | features  | tokens    | reduce-scatter   | all-gather       | `reduce_scatter_sequence` |
#
# An all-reduce sends as much as a reduce-scatter and an all-gather, so both rows of a layer send the same.
# Korthikanti et al. 2022, figures 4 and 5.

WHOLE, TOKENS, FEATURES = "whole", "tokens", "features"
NOTHING = "nothing"
BORDERS = {
    (WHOLE, FEATURES): (NOTHING, "all-reduce"),
    (FEATURES, WHOLE): ("all-reduce", NOTHING),
    (TOKENS, FEATURES): ("all-gather", "reduce-scatter"),
    (FEATURES, TOKENS): ("reduce-scatter", "all-gather"),
}
PARTS = ("norm", "QKV, heads,\nprojection", "dropout,\nresidual, norm", "fc1, GELU,\nfc2", "dropout,\nresidual")
LAYER = {
    "tensor parallelism": (WHOLE, FEATURES, WHOLE, FEATURES, WHOLE),
    "tensor and sequence parallelism": (TOKENS, FEATURES, TOKENS, FEATURES, TOKENS),
}
_SIDE, _APART = 1.0, 1.05


def border(before: str, after: str) -> tuple[str, str]:
    """The messages between two regions, (forward, backward).

    Raises:
        ConfigError: no layer needs such a border.
    """
    if before == after:
        return NOTHING, NOTHING
    if (before, after) not in BORDERS:
        raise ConfigError(f"a border from {before} to {after}", fix="regions are whole, tokens or features")
    return BORDERS[before, after]


def regions(ways: Mapping[str, Sequence[str]] = LAYER, parts: Sequence[str] = PARTS, ranks: int = 2) -> Picture:
    """Draw one row for each way through the layer.

    Args:
        ways: {title: how each part's activations are cut}.
        parts: the parts of the layer, in order.
        ranks: over which they are cut.

    Raises:
        ConfigError: nothing to draw, or a way that is not as long as the layer.
    """
    if not ways:
        raise ConfigError("no way through the layer", fix="give at least one")
    for title, cuts in ways.items():
        if len(cuts) != len(parts):
            raise ConfigError(f"{title!r} cuts {len(cuts)} parts of {len(parts)}", fix="one cut for each part")
    with styled():
        figure = new_figure(1.95 * len(parts), 2.0 * len(ways) + 0.3)
        for axes, cuts in panels(figure, ways, down=True):
            _way(axes, cuts, parts, ranks)
        looks = [*((f"on rank {r}", colour, "") for r, colour in enumerate(rank_colours(ranks)))]
        looks += [("whole on every rank", PAPER, "//")] * any(WHOLE in cuts for cuts in ways.values())
        looks += [("the ranks talk", COMM, "")]
        handles = [sample(*look) for look in looks]
        legend(figure, handles)
    return figure


def _way(axes: Axes, cuts: Sequence[str], parts: Sequence[str], ranks: int) -> None:
    step = _SIDE + _APART
    for i, (cut, part) in enumerate(zip(cuts, parts, strict=True)):
        _activation(axes, i * step, cut, ranks)
        axes.text(i * step + _SIDE / 2, 1.08, part, ha="center", va="top", fontsize=8.5)
    axes.text(-0.08, _SIDE / 2, "tokens", ha="right", va="center", rotation=90, fontsize=7.5)
    axes.text(_SIDE / 2, -0.05, "features", ha="center", va="bottom", fontsize=7.5)
    for i, pair in enumerate(zip(cuts, cuts[1:], strict=False)):
        left, right = i * step + _SIDE + 0.06, (i + 1) * step - 0.06
        for text, y, ends in zip(border(*pair), (0.25, 0.75), ((left, right), (right, left)), strict=True):
            sends = text != NOTHING
            look: dict[str, Any] = {"color": COMM, "linewidth": 3.0} if sends else {"color": FAINT, "linewidth": 1.0}
            arrow(axes, (ends[0], y), (ends[1], y), **look, shrinkA=0, shrinkB=0, mutation_scale=11)
            axes.text((left + right) / 2, y - 0.07, text, ha="center", va="bottom", fontsize=8,
                      weight="bold" if sends else "normal")  # fmt: skip
    if len(cuts) > 1:
        for text, y in (("forward", 0.25), ("backward", 0.75)):
            axes.text(len(cuts) * step - _APART + 0.1, y, text, ha="left", va="center", fontsize=8, style="italic")
    axes.set_xlim(-0.3, len(cuts) * step - _APART + 0.75)
    axes.set_ylim(1.45, -0.25)
    axes.set_xticks([])
    axes.set_yticks([])
    blank(axes)


def _activation(axes: Axes, x: float, cut: str, ranks: int) -> None:
    """Draw a square of tokens x features: rows of a colour are cut by tokens, columns by features."""
    if cut == WHOLE:
        box(axes, (x, 0), (_SIDE, _SIDE), PAPER, "whole", pattern="//", edge=INK)
        return
    share = _SIDE / ranks
    for r, colour in enumerate(rank_colours(ranks)):
        corner, size = ((x, r * share), (_SIDE, share)) if cut == TOKENS else ((x + r * share, 0), (share, _SIDE))
        box(axes, corner, size, colour, str(r), edge=INK)


# ----------------------------------------------------------------------------------------- messages one after the other
# A message is a box as wide as its bytes, each kind in its own tint; forward stands above backward. One sees that a
# reduce-scatter and an all-gather are the halves of an all-reduce, and which messages only one way has.

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
_TINTS = {"all_gather": 0.35, "reduce_scatter": 0.65, "all_reduce": 1.0}  # of the colour of communication
_SHORT = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter", "all_reduce": "all-reduce"}


@dataclasses.dataclass(frozen=True)
class Message:
    """A collective: its name, the bytes that one rank sends for it, and whether it belongs to the backward pass.

    `again`: it repeats another message, and its frame is dashed.
    """

    name: str
    sent: float
    backward: bool = False
    again: bool = False


def strips(
    programs: Mapping[str, Sequence[Message]], predicted: Mapping[str, float] | None = None, *, title: str = ""
) -> Picture:
    """Draw a strip of messages for each program.

    Args:
        programs: {title: its messages, in order}.
        predicted: {title: bytes in all}, written beside the counted bytes.

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
        handles = [sample(_SHORT[k], _tint(k), edgecolor="white") for k in seen]
        if any(m.again for m in everything):
            handles.append(sample("x gathered again, for dW", "none", linestyle="--", linewidth=None))
        legend(figure, handles, fontsize=None)
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
        if wide < 0.14 * longest:
            name = name.replace("all-", "all-\n")
        text = f"{name} {wide:.3g}" if wide > 0.11 * longest else f"{wide:.3g}"
        edge = INK if message.again else "white"
        box(axes, (x, y), (wide, 0.88), _tint(message.name), text, edge=edge, fontsize=7, dashed=message.again)
        x += wide


# --------------------------------------------------------------------------------------------------- matrices as images
# Each number is a small square, light or dark, with lines where the ranks' shards meet.

Image = Sequence[Sequence[float]]


def shards(matrices: Mapping[str, Sequence[Image]], *, title: str = "") -> Picture:
    """Draw for each entry the shards of one matrix, cut along its rows, below each other with a line between ranks.

    All entries share one scale of lightness, so that equal numbers look equal.

    Raises:
        ConfigError: nothing to draw, or shards of different widths.
    """
    if not matrices or not all(matrices.values()):
        raise ConfigError("no matrix to draw", fix="give at least one shard for each")
    for name, parts in matrices.items():
        if len({len(row) for part in parts for row in part}) != 1:
            raise ConfigError(
                f"the rows of {name!r} differ in length", fix="shards cut along the rows are equally wide"
            )
    largest = max(abs(number) for parts in matrices.values() for part in parts for row in part for number in row)
    with styled():
        figure = new_figure(3.4 * len(matrices) + 0.4, 3.1, title)
        for axes, parts in panels(figure, matrices):
            rows = [row for part in parts for row in part]
            axes.imshow(rows, vmin=-largest, vmax=largest, aspect="auto", interpolation="nearest")
            start = 0
            middles = []
            for part in parts:
                if start:
                    axes.axhline(start - 0.5, color="white", linewidth=3.5)
                    axes.axhline(start - 0.5, color=INK, linewidth=1.2)
                middles.append(start + (len(part) - 1) / 2)
                start += len(part)
            axes.set_yticks(middles, [f"rank {r}" for r in range(len(parts))])
            axes.set_xticks([])
            axes.grid(visible=False)
            axes.tick_params(length=0)
    return figure
