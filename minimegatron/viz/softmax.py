"""The softmax of one row, block by block, with numbers that can be checked by hand.

One query meets its keys a block at a time and keeps three numbers: the largest score so far m, the sum l, and the
weighted sum of values O. A new maximum shrinks l and O by e^(m - m') before the block is added. The picture is the
whole calculation as a table: a column for each block, a row for each quantity.

Scores are given as e^S, whole numbers, so that all but m stays a fraction: for e^S = 2 the score is ln 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from minimegatron.errors import ConfigError
from minimegatron.viz.picture import COMPUTE, PAPER, box, new_figure, styled

ROWS = (
    "scores S", "values V", "m' = max(m, S)", "shrink = e^(m - m')", "P = e^(S - m')", "l · shrink + sum of P",
    "O · shrink + sum of P·V",
)  # fmt: skip
WIDE, LABEL, START, END = 4.6, 3.6, 1.3, 3.4  # widths of a block's column, of the labels, of the first and last column


@dataclasses.dataclass(frozen=True)
class Step:
    """One block of keys.

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
    """The table of `steps_of` from the start (m = -∞) to the end, out = O / l and lse = m + ln l.

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
