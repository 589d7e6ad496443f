"""Who holds which tokens of a sequence, and how much work that makes: the causal triangle, coloured by rank.

A row is a query, and its bar is as long as the keys that it sees. The rows of a colour are the tokens that a rank
holds, the area of a colour is the work of its attention. The rank is written at the left of each of its rows' runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, blank, hatch, new_figure, rank_colours, styled


def pairs_of(held: Sequence[Sequence[int]]) -> list[int]:
    """Visible pairs of each rank's queries, a token seeing itself and all before it."""
    return [sum(i + 1 for i in tokens) for tokens in held]


def causal_map(cuts: Mapping[str, Sequence[Sequence[int]]]) -> Figure:
    """A triangle for each cut of a sequence.

    Args:
        cuts: {title: for each rank the places of its tokens}.

    Raises:
        ConfigError: nothing to draw, or the ranks do not hold each token exactly once.
    """
    if not cuts:
        raise ConfigError("no cut to draw", fix="give at least one")
    for title, held in cuts.items():
        tokens = sorted(i for of in held for i in of)
        if not tokens or tokens != list(range(len(tokens))):
            raise ConfigError(
                f"the ranks of {title!r} hold {tokens}", fix="every token from 0 on must be on exactly one rank"
            )
    with styled():
        figure = new_figure(4.2 * len(cuts), 3.6)
        for axes, (title, held) in zip(figure.subplots(1, len(cuts), squeeze=False)[0], cuts.items(), strict=True):
            _triangle(axes, held)
            axes.set_title(title)
    return figure


def _triangle(axes: Axes, held: Sequence[Sequence[int]]) -> None:
    owner = {i: rank for rank, tokens in enumerate(held) for i in tokens}
    palette, work = rank_colours(len(held)), pairs_of(held)
    for i in range(len(owner)):
        colour, pattern = palette[owner[i]], hatch(owner[i])
        axes.add_patch(Rectangle((0, i), i + 1, 1, facecolor=colour, edgecolor=INK, hatch=pattern, linewidth=0.4))
    for rank, run in groupby(range(len(owner)), key=owner.__getitem__):
        rows = list(run)
        middle = (rows[0] + rows[-1] + 1) / 2
        axes.text(-0.3, middle, f"rank {rank}", ha="right", va="center", fontsize=8)
    s = len(owner)
    shares = "  ".join(f"{rank}: {pairs}" for rank, pairs in enumerate(work))
    axes.text(s / 2, s + 0.3, f"pairs of rank {shares}", ha="center", va="top", fontsize=8)
    axes.set_xlim(-0.22 * s, 1.01 * s)
    axes.set_ylim(s + 0.09 * s, 0)
    blank(axes)
