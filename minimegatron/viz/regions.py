"""The regions of a transformer layer on several ranks: how activations are cut in each, what is sent at the borders.

An activation is a rectangle, its rows are tokens and its columns features. The borders are computed from the cuts on
both sides of them (`border`), so the picture of any way through a layer says what it sends:

| from      | to        | forward          | backward         | written as                |
|-----------|-----------|------------------|------------------|---------------------------|
| whole     | features  | nothing          | all-reduce       | f                         |
| features  | whole     | all-reduce       | nothing          | g                         |
| tokens    | features  | all-gather       | reduce-scatter   | `gather_sequence`         |
| features  | tokens    | reduce-scatter   | all-gather       | `reduce_scatter_sequence` |

An all-reduce sends as much as a reduce-scatter and an all-gather: both rows of a layer send the same on these borders.
Korthikanti et al. 2022, figures 4 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.patches import Patch

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import COMM, FAINT, INK, PAPER, Picture, blank, box, new_figure, rank_colours, styled

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
_SIDE, _GAP = 1.0, 1.05


def border(before: str, after: str) -> tuple[str, str]:
    """What is sent between two regions, (forward, backward).

    Raises:
        ConfigError: no layer needs such a border.
    """
    if before == after:
        return NOTHING, NOTHING
    if (before, after) not in BORDERS:
        raise ConfigError(f"a border from {before} to {after}", fix="regions are whole, tokens or features")
    return BORDERS[before, after]


def regions(ways: Mapping[str, Sequence[str]] = LAYER, parts: Sequence[str] = PARTS, ranks: int = 2) -> Picture:
    """One row for each way through the layer.

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
        for axes, (title, cuts) in zip(figure.subplots(len(ways), 1, squeeze=False)[:, 0], ways.items(), strict=True):
            _way(axes, cuts, parts, ranks)
            axes.set_title(title)
        looks = [*((f"on rank {r}", colour, "") for r, colour in enumerate(rank_colours(ranks)))]
        looks += [("whole on every rank", PAPER, "//")] * any(WHOLE in cuts for cuts in ways.values())
        looks += [("the ranks talk", COMM, "")]
        handles = [Patch(facecolor=c, hatch=h, edgecolor=INK, linewidth=0.6, label=text) for text, c, h in looks]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=8)
    return figure


def _way(axes: Axes, cuts: Sequence[str], parts: Sequence[str], ranks: int) -> None:
    step = _SIDE + _GAP
    for i, (cut, part) in enumerate(zip(cuts, parts, strict=True)):
        _activation(axes, i * step, cut, ranks)
        axes.text(i * step + _SIDE / 2, 1.08, part, ha="center", va="top", fontsize=8.5)
    axes.text(-0.08, _SIDE / 2, "tokens", ha="right", va="center", rotation=90, fontsize=7.5)
    axes.text(_SIDE / 2, -0.05, "features", ha="center", va="bottom", fontsize=7.5)
    for i, pair in enumerate(zip(cuts, cuts[1:], strict=False)):
        left, right = i * step + _SIDE + 0.06, (i + 1) * step - 0.06
        for text, y, ends in zip(border(*pair), (0.25, 0.75), ((left, right), (right, left)), strict=True):
            sends = text != NOTHING
            arrow = {"arrowstyle": "-|>", "color": COMM if sends else FAINT, "linewidth": 3.0 if sends else 1.0,
                     "shrinkA": 0, "shrinkB": 0, "mutation_scale": 11}  # fmt: skip
            axes.annotate("", xytext=(ends[0], y), xy=(ends[1], y), arrowprops=arrow)
            axes.text((left + right) / 2, y - 0.07, text, ha="center", va="bottom", fontsize=8,
                      weight="bold" if sends else "normal")  # fmt: skip
    if len(cuts) > 1:
        for text, y in (("forward", 0.25), ("backward", 0.75)):
            axes.text(len(cuts) * step - _GAP + 0.1, y, text, ha="left", va="center", fontsize=8, style="italic")
    axes.set_xlim(-0.3, len(cuts) * step - _GAP + 0.75)
    axes.set_ylim(1.45, -0.25)
    axes.set_xticks([])
    axes.set_yticks([])
    blank(axes)


def _activation(axes: Axes, x: float, cut: str, ranks: int) -> None:
    """A square of tokens x features: rows of a colour are cut by tokens, columns by features."""
    if cut == WHOLE:
        box(axes, (x, 0), (_SIDE, _SIDE), PAPER, "whole", pattern="//", edge=INK)
        return
    share = _SIDE / ranks
    for r, colour in enumerate(rank_colours(ranks)):
        corner, size = ((x, r * share), (_SIDE, share)) if cut == TOKENS else ((x + r * share, 0), (share, _SIDE))
        box(axes, corner, size, colour, str(r), edge=INK)
