"""A ring of keys and values, step by step: whose block each rank has, and which part of it its queries see.

A cell is one rank at one step. Its four quarters are the early and the late half of the rank's queries (rows) against
the early and the late half of the block's keys (columns): filled where all pairs are visible, a triangle where the
causal mask cuts the quarter, empty where nothing is. The colour is that of the block's owner. What is filled is the
work; where cells of one step differ, ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Polygon, Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import FAINT, INK, blank, new_figure, rank_colours, styled

FULL, PART, NONE = "full", "half", "hidden"
GAP = 1.45  # from a cell to the next, in widths of a cell


def seen(queries: Sequence[int], keys: Sequence[int]) -> str:
    """Which of these pairs a causal mask lets through: all (`full`), some (`half`), none (`hidden`)."""
    pairs = sum(j <= i for i in queries for j in keys)
    return FULL if pairs == len(queries) * len(keys) else PART if pairs else NONE


def quarters(held: Sequence[Sequence[int]], rank: int, step: int) -> list[list[str]]:
    """`seen` of the early and the late half of a rank's queries against both halves of the block that it has."""
    mine, theirs = halves(held[rank]), halves(held[(rank - step) % len(held)])
    return [[seen(queries, keys) for keys in theirs] for queries in mine]


def halves(places: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    return places[: len(places) // 2], places[len(places) // 2 :]


def ring_steps(cuts: Mapping[str, Sequence[Sequence[int]]]) -> Figure:
    """A panel for each cut: ranks below each other, steps from left to right.

    Args:
        cuts: {title: for each rank the places of its tokens, ascending}.

    Raises:
        ConfigError: nothing to draw, or ranks hold an odd or a different number of tokens.
    """
    if not cuts:
        raise ConfigError("no cut to draw", fix="give at least one")
    for title, held in cuts.items():
        lengths = {len(places) for places in held}
        if len(lengths) != 1 or min(lengths) < 2 or min(lengths) % 2:
            raise ConfigError(f"the ranks of {title!r} hold {sorted(lengths)} tokens", fix="equal and even numbers")
    most = max(len(held) for held in cuts.values())
    with styled():
        figure = new_figure((0.95 * GAP * most + 0.9) * len(cuts) * 0.72, 0.72 * 0.95 * GAP * most + 1.25)
        for axes, (title, held) in zip(figure.subplots(1, len(cuts), squeeze=False)[0], cuts.items(), strict=True):
            _panel(axes, held)
            axes.set_title(title)
        figure.legend(handles=_key(), loc="outside lower center", ncols=3,
                      title="a square: a rank's queries (rows, early half above) and a block's keys (columns, early "
                      "half left)\nits colour: the rank that owns the keys", title_fontsize=9)  # fmt: skip
    return figure


def _key() -> list[Line2D]:
    square, triangle = [(-1, -1), (-1, 1), (1, 1), (1, -1), (-1, -1)], [(-1, -1), (-1, 1), (1, -1), (-1, -1)]
    looks = (
        (square, FAINT, INK, "full: all pairs visible"),
        (triangle, FAINT, INK, "half: the mask cuts it"),
        (square, "white", FAINT, "hidden: skipped"),
    )
    return [
        Line2D([], [], linestyle="", marker=marker, markersize=10, markerfacecolor=fill, markeredgecolor=edge,
               markeredgewidth=0.6, label=label)
        for marker, fill, edge, label in looks
    ]  # fmt: skip


def _panel(axes: Axes, held: Sequence[Sequence[int]]) -> None:
    size = len(held)
    palette = rank_colours(size)
    for step in range(size):
        x = step * GAP
        axes.text(x + 0.5, -0.42, f"step {step}", ha="center", va="center", fontsize=9)
        for rank in range(size):
            owner, y = (rank - step) % size, rank * GAP
            _cell(axes, (x, y), quarters(held, rank, step), palette[owner])
            axes.text(x + 0.5, y + 1.05, f"keys of {owner}", ha="center", va="top", fontsize=7.5)
    for rank in range(size):
        axes.text(-0.2, rank * GAP + 0.5, f"rank {rank}", ha="right", va="center", fontsize=9)
    axes.set_xlim(-1.25, (size - 1) * GAP + 1.1)
    axes.set_ylim((size - 1) * GAP + 1.35, -0.7)
    blank(axes)


def _cell(axes: Axes, corner: tuple[float, float], parts: Sequence[Sequence[str]], colour: str) -> None:
    for i, row in enumerate(parts):
        for j, part in enumerate(row):
            x, y = corner[0] + j / 2, corner[1] + i / 2
            axes.add_patch(Rectangle((x, y), 0.5, 0.5, fill=False, edgecolor=FAINT, linewidth=0.6, linestyle=":"))
            if part == FULL:
                axes.add_patch(Rectangle((x, y), 0.5, 0.5, facecolor=colour, edgecolor=INK, linewidth=0.5))
            elif part == PART:  # a query sees the keys before it: the lower left of the quarter
                lower = [(x, y), (x, y + 0.5), (x + 0.5, y + 0.5)]
                axes.add_patch(Polygon(lower, facecolor=colour, edgecolor=INK, linewidth=0.5))
