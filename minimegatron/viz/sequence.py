"""Who holds which tokens of a sequence, how much work that makes, and how heads are exchanged for tokens.

`causal_map`: a row is a query, and its bar is as long as the keys that it sees. The rows of a colour are the tokens
that a rank holds, the area of a colour is the pairs of a query and a key that its attention works on. The rank is
written at the left of each of its rows' runs.

`heads_for_tokens`: what Ulysses moves. Rows are heads, columns are chunks of the sequence; thick lines part the ranks.
An all-to-all turns the cut from columns to rows; afterwards each rank sorts its columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import INK, blank, box, hatch, new_figure, rank_colours, styled


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
        figure = new_figure(4.2 * len(cuts), 3.9)
        for axes, (title, held) in zip(figure.subplots(1, len(cuts), squeeze=False)[0], cuts.items(), strict=True):
            _triangle(axes, held)
            axes.set_title(title)
    return figure


def heads_for_tokens(heads: int, held: Sequence[Sequence[int]]) -> Figure:
    """Heads and chunks of a sequence before an all-to-all, as they arrive, and in the order of the sequence.

    Args:
        heads: of the layer, as many for each rank.
        held: for each rank the numbers of its chunks, in the order in which it holds them.

    Raises:
        ConfigError: heads that the ranks cannot share, or ranks that do not hold each chunk exactly once.
    """
    size, arrived = len(held), [chunk for of in held for chunk in of]
    if not arrived or heads < 1 or heads % size or sorted(arrived) != list(range(len(arrived))):
        raise ConfigError(
            f"{heads} heads and chunks {arrived} on {size} ranks", fix="as many heads for each rank, each chunk once"
        )
    owner = {chunk: rank for rank, of in enumerate(held) for chunk in of}
    by_head = [(rank * heads // size, (rank + 1) * heads // size) for rank in range(size)]
    starts = [sum(len(of) for of in held[:rank]) for rank in range(size + 1)]
    panels: list[tuple[str, list[int], bool]] = [
        ("1  before: a rank has some tokens of all heads", arrived, True),
        ("2  all-to-all: a rank has all tokens of some heads, as they arrive", arrived, False),
        ("3  sorted: the order of the sequence", sorted(arrived), False),
    ]
    with styled():
        figure = new_figure(0.5 * len(arrived) + 2.2, len(panels) * (0.34 * heads + 0.75))
        for axes, (title, chunks, by_token) in zip(figure.subplots(len(panels), 1), panels, strict=True):
            _heads_by_chunks(axes, heads, chunks, owner)
            cuts = [(starts[r], 0, starts[r + 1], heads) for r in range(size)]
            cuts = cuts if by_token else [(0, a, len(chunks), b) for a, b in by_head]
            for rank, (left, top, right, bottom) in enumerate(cuts):
                frame = Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=INK, linewidth=2.2)
                axes.add_patch(frame)
                x, y = ((left + right) / 2, -0.22) if by_token else (right + 0.2, (top + bottom) / 2)
                where = {"ha": "center", "va": "bottom"} if by_token else {"ha": "left", "va": "center"}
                axes.text(x, y, f"rank {rank}", fontsize=8, weight="bold", **where)
            axes.set_title(title)
        figure.supxlabel("number: chunk of the sequence; colour: the rank that it came from; frame: what a rank holds",
                         fontsize=8)  # fmt: skip
    return figure


def _heads_by_chunks(axes: Axes, heads: int, chunks: Sequence[int], owner: Mapping[int, int]) -> None:
    """A box for each chunk of each head, in the colour of the rank that had it first."""
    palette = rank_colours(max(owner.values()) + 1)
    for head in range(heads):
        axes.text(-0.2, head + 0.5, f"head {head}", ha="right", va="center", fontsize=8)
        for column, chunk in enumerate(chunks):
            box(axes, (column, head), (1, 1), palette[owner[chunk]], str(chunk), pattern=hatch(owner[chunk]))
    axes.set_xlim(-1.3, len(chunks) + 1.3)
    axes.set_ylim(heads + 0.1, -0.6)
    axes.set_axis_off()


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
    axes.text(s / 2, s * 1.02, "keys: as many as the query sees", ha="center", va="top", fontsize=8)
    axes.text(-0.27 * s, s / 2, "queries, first at the top", ha="center", va="center", fontsize=8, rotation=90)
    axes.text(0.4 * s, s * 1.10, f"pairs (query, key) of rank {shares}", ha="center", va="top", fontsize=8)
    axes.set_xlim(-0.31 * s, 1.01 * s)
    axes.set_ylim(1.18 * s, 0)
    blank(axes)
