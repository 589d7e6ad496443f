"""Drawings of lab 04: which rank holds which tokens, the running softmax, the ring of keys and values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate, groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Polygon, Rectangle

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import (
    COMPUTE,
    FAINT,
    INK,
    PAPER,
    blank,
    box,
    hatch,
    new_figure,
    panels,
    rank_colours,
    styled,
)

# ---------------------------------------------------------------------------------------- which rank holds which tokens
# `causal_map`: a row is a query, and its bar is as long as the number of keys that it sees. Rows of one colour are the
# tokens of one rank, so the area of a colour is the attention work of that rank.
#
# `heads_for_tokens`: the all-to-all of Ulysses. Rows are heads, columns are chunks of the sequence, frames are ranks.
# The all-to-all turns the cut from columns to rows; afterwards each rank sorts its columns.


def pairs_of(held: Sequence[Sequence[int]], documents: Sequence[int] = ()) -> list[int]:
    """The number of visible pairs of each rank's queries; a token sees itself and all tokens of its document before it.

    Args:
        held: for each rank the places of its tokens.
        documents: their lengths, in their order; none: all tokens are one document.
    """
    begins = begins_of(documents)
    return [sum(i + 1 - (begins[i] if begins else 0) for i in tokens) for tokens in held]


def begins_of(documents: Sequence[int]) -> list[int]:
    """For each token the place at which its document begins."""
    return [start for start, n in zip(accumulate(documents, initial=0), documents, strict=False) for _ in range(n)]


def causal_map(cuts: Mapping[str, Sequence[Sequence[int]]], documents: Sequence[int] = ()) -> Figure:
    """Draw a triangle for each cut of a sequence; where it is packed, one for each document.

    Args:
        cuts: {title: for each rank the places of its tokens}.
        documents: their lengths, in their order; none: all tokens are one document.

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
        if documents and sum(documents) != len(tokens):
            raise ConfigError(
                f"documents of {list(documents)} tokens, and {title!r} cuts {len(tokens)}", fix="give all documents"
            )
    with styled():
        figure = new_figure(4.2 * len(cuts), 3.9)
        for axes, held in panels(figure, cuts):
            _triangle(axes, held, documents)
    return figure


def heads_for_tokens(heads: int, held: Sequence[Sequence[int]]) -> Figure:
    """Draw heads and chunks of a sequence before an all-to-all, as they arrive, and in the order of the sequence.

    Args:
        heads: of the layer; each rank has the same number.
        held: for each rank the numbers of its chunks, in the order in which it holds them.

    Raises:
        ConfigError: heads that do not divide by the ranks, or ranks that do not hold each chunk exactly once.
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
    """Draw a box for each chunk of each head, in the colour of the rank that had it first."""
    palette = rank_colours(max(owner.values()) + 1)
    for head in range(heads):
        axes.text(-0.2, head + 0.5, f"head {head}", ha="right", va="center", fontsize=8)
        for column, chunk in enumerate(chunks):
            box(axes, (column, head), (1, 1), palette[owner[chunk]], str(chunk), pattern=hatch(owner[chunk]))
    axes.set_xlim(-1.3, len(chunks) + 1.3)
    axes.set_ylim(heads + 0.1, -0.6)
    axes.set_axis_off()


def _triangle(axes: Axes, held: Sequence[Sequence[int]], documents: Sequence[int]) -> None:
    owner = {i: rank for rank, tokens in enumerate(held) for i in tokens}
    palette, work, begins = rank_colours(len(held)), pairs_of(held, documents), begins_of(documents)
    for i in range(len(owner)):
        colour, pattern, left = palette[owner[i]], hatch(owner[i]), begins[i] if begins else 0
        axes.add_patch(
            Rectangle((left, i), i + 1 - left, 1, facecolor=colour, edgecolor=INK, hatch=pattern, linewidth=0.4)
        )
    s, packed = len(owner), bool(documents)
    for rank, run in groupby(range(s), key=owner.__getitem__):
        rows = list(run)
        beside = (
            rows[-1] + 1.4 if packed else -0.3
        )  # bars of one document begin at the left edge, those of several do not
        middle = (rows[0] + rows[-1] + 1) / 2
        axes.text(beside, middle, f"rank {rank}", ha="left" if packed else "right", va="center", fontsize=8)
    shares = "  ".join(f"{rank}: {pairs}" for rank, pairs in enumerate(work))
    keys = "keys: those that the query sees" if packed else "keys: as many as the query sees"
    axes.text(s / 2, s * 1.02, keys, ha="center", va="top", fontsize=8)
    sides = (-0.09 * s, 1.19 * s) if packed else (-0.31 * s, 1.01 * s)
    axes.text(
        sides[0] + 0.04 * s, s / 2, "queries, first at the top", ha="center", va="center", fontsize=8, rotation=90
    )
    x = (0.5 if packed else 0.4) * s
    axes.text(x, s * 1.10, f"pairs (query, key) of rank {shares}", ha="center", va="top", fontsize=8)
    axes.set_xlim(sides)
    axes.set_ylim(1.18 * s, 0)
    blank(axes)


# --------------------------------------------------------------------------------------- the running softmax of one row
# One query meets its keys a block at a time and keeps three numbers: the largest score so far m, the sum l, and the
# weighted sum of values O. A new maximum shrinks l and O by e^(m - m') before the block is added. The picture is this
# calculation as a table: a column for each block, a row for each quantity, with numbers to check by hand. Scores are
# given as e^S, whole numbers, so that all but m stay fractions: for e^S = 2 the score is ln 2.

ROWS = (
    "scores S", "values V", "largest so far m", "old sums shrink by", "P = e^(S - m)", "sum l", "sum O",
)  # fmt: skip
WIDE, LABEL, START, END = 4.6, 3.6, 1.3, 3.4  # widths of a block's column, of the labels, of the first and last column


@dataclasses.dataclass(frozen=True)
class Step:
    """The state after one block of keys.

    Attributes:
        weights: e^S of its keys.
        values: of its keys.
        top: e^m', the largest weight so far.
        shrink: e^(m - m'), 0 before the first block.
        p: e^(S - m') of its keys.
        total: l after the block.
        out: O after the block.
    """

    weights: tuple[int, ...]
    values: tuple[int, ...]
    top: int
    shrink: Fraction
    p: tuple[Fraction, ...]
    total: Fraction
    out: Fraction


def steps_of(weights: Sequence[int], values: Sequence[int], block: int) -> list[Step]:
    """The running softmax of one row, a step for each block.

    Args:
        weights: e^S of every key, whole and positive.
        values: of every key.
        block: keys of a block; the last may be shorter.

    Raises:
        ConfigError: no keys, keys without a value, a weight below 1, or a block of no keys.
    """
    if not weights or len(weights) != len(values) or min(weights) < 1 or block < 1:
        raise ConfigError(
            f"{len(weights)} weights, {len(values)} values, blocks of {block}",
            fix="give each key a weight of 1 or more and a value, and blocks of at least one key",
        )
    steps: list[Step] = []
    top, total, out = 0, Fraction(0), Fraction(0)
    for i in range(0, len(weights), block):
        some, those = tuple(weights[i : i + block]), tuple(values[i : i + block])
        higher = max(top, *some)
        shrink, p = Fraction(top, higher), tuple(Fraction(w, higher) for w in some)
        total = total * shrink + sum(p)
        out = out * shrink + sum(one * value for one, value in zip(p, those, strict=True))
        top = higher
        steps.append(Step(some, those, top, shrink, p, total, out))
    return steps


def running_softmax(weights: Sequence[int], values: Sequence[int], block: int) -> Figure:
    """Draw the table of `steps_of` from the start (m = -∞) to the end, out = O / l and lse = m + ln l.

    Raises:
        ConfigError: as `steps_of`.
    """
    steps = steps_of(weights, values, block)
    with styled():
        width = LABEL + START + WIDE * len(steps) + END
        figure = new_figure(0.62 * width, 0.5 * (len(ROWS) + 1.2), "One query, softmax block by block")
        axes = figure.subplots()
        for i, name in enumerate(ROWS):
            axes.text(LABEL - 0.25, i + 0.5, name, ha="right", va="center", fontsize=9)
        x = LABEL + START / 2
        axes.text(x, -0.35, "start", ha="center", va="center", fontsize=9, weight="bold")
        for i, text in ((2, "m = -∞"), (5, "l = 0"), (6, "O = 0")):
            box(axes, (LABEL + 0.1, i + 0.08), (START - 0.2, 0.84), PAPER, text)
        before = (Fraction(0), Fraction(0))
        for number, step in enumerate(steps):
            _column(axes, LABEL + START + WIDE * number, number, step, before)
            before = step.total, step.out
        _end(axes, LABEL + START + WIDE * len(steps), steps[-1])
        axes.set_xlim(0, width)
        axes.set_ylim(len(ROWS) + 0.1, -0.8)
        axes.set_axis_off()
    return figure


def _column(axes: Axes, x: float, number: int, step: Step, before: tuple[Fraction, Fraction]) -> None:
    axes.text(x + WIDE / 2, -0.35, f"block {number + 1}", ha="center", va="center", fontsize=9, weight="bold")
    part = sum(step.p, Fraction(0))
    product = sum((p * v for p, v in zip(step.p, step.values, strict=True)), Fraction(0))
    _cells(axes, x, 0, [f"ln {w}" for w in step.weights], PAPER)
    _cells(axes, x, 1, [str(v) for v in step.values], PAPER)
    _cells(axes, x, 2, [f"ln {step.top}"], PAPER)
    _cells(axes, x, 3, [f"{step.shrink}"], PAPER)
    _cells(axes, x, 4, [str(p) for p in step.p], PAPER)
    for row, (old, added, now) in enumerate(((before[0], part, step.total), (before[1], product, step.out)), 5):
        _cells(axes, x, row, [f"{old} · {step.shrink}  +  {added}  =  {now}"], COMPUTE)


def _cells(axes: Axes, x: float, row: int, texts: Sequence[str], colour: str) -> None:
    width = (WIDE - 0.2) / len(texts)
    for i, text in enumerate(texts):
        box(axes, (x + 0.1 + i * width, row + 0.08), (width, 0.84), colour, text)


def _end(axes: Axes, x: float, last: Step) -> None:
    axes.text(x + END / 2, -0.35, "end", ha="center", va="center", fontsize=9, weight="bold")
    lse, out = last.top * last.total, last.out / last.total
    for row, text in ((5, f"lse = m + ln l\n= ln {lse}"), (6, f"out = O / l\n= {out}")):
        box(axes, (x + 0.1, row + 0.08), (END - 0.2, 0.84), PAPER, text, fontsize=8, bold=True)


# -------------------------------------------------------------------------------------------- a ring of keys and values
# A cell is one rank at one step. Its four quarters are the early and the late half of the rank's queries (rows) against
# the early and the late half of the block's keys (columns): filled where all pairs are visible, a triangle where the
# causal mask cuts the quarter, empty where nothing is visible. The colour is that of the rank that owns the block. The
# filled area is the work; where cells of one step differ, the faster ranks wait.

FULL, PART, NONE = "full", "half", "hidden"
GAP = 1.45  # from a cell to the next, in widths of a cell


def seen(queries: Sequence[int], keys: Sequence[int]) -> str:
    """Which of these pairs are visible under a causal mask: all (`full`), some (`half`), none (`hidden`)."""
    pairs = sum(j <= i for i in queries for j in keys)
    return FULL if pairs == len(queries) * len(keys) else PART if pairs else NONE


def quarters(held: Sequence[Sequence[int]], rank: int, step: int) -> list[list[str]]:
    """`seen` for the early and the late half of a rank's queries with both halves of the block that it has at a
    step."""
    queries, keys = halves(held[rank]), halves(held[(rank - step) % len(held)])
    return [[seen(rows, columns) for columns in keys] for rows in queries]


def halves(places: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    return places[: len(places) // 2], places[len(places) // 2 :]


def ring_steps(cuts: Mapping[str, Sequence[Sequence[int]]]) -> Figure:
    """Draw a panel for each cut, with a row for each rank and a column for each step.

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
        for axes, held in panels(figure, cuts):
            _panel(axes, held)
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
