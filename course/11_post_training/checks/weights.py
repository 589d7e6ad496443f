"""Lab 11, what a loss is a mean of: how much one counted token moves the step."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from labkit.exercises import Case, Draw, Exercise

WAYS = ("tokens", "padding", "rows", "microbatches")
Counts = list[list[int]]


def token_weights(counts: Counts, width: int, way: str) -> list[list[float]]:
    """By definition: the step's loss where the loss of one token is 1 and all others are 0."""
    losses = [[[Fraction(0)] * n for n in rows] for rows in counts]
    found = []
    for m, rows in enumerate(counts):
        found.append([0.0] * len(rows))
        for row, n in enumerate(rows):
            if n:
                losses[m][row][0] = Fraction(1)
                found[m][row] = float(_loss(losses, width, way))
                losses[m][row][0] = Fraction(0)
    return found


def _mean(values: list[Fraction], n: int | None = None) -> Fraction:
    n = len(values) if n is None else n
    return sum(values, Fraction(0)) / n if n else Fraction(0)


def _loss(losses: list[list[list[Fraction]]], width: int, way: str) -> Fraction:
    if way == "tokens":
        return _mean([loss for rows in losses for row in rows for loss in row])
    if way == "padding":
        return _mean([_mean([_mean(row, width) for row in rows]) for rows in losses])
    if way == "rows":
        return _mean([_mean([_mean(row) for row in rows]) for rows in losses])
    return _mean([_mean([loss for row in rows for loss in row]) for rows in losses])


def _some(draw: Draw, counts: Counts | None = None) -> dict[str, Any]:
    n = draw.integer(2, 4)
    width = draw.integer(9, 16)
    counts = counts or [[draw.integer(0, 8) for _ in range(n)] for _ in range(draw.integer(2, 4))]
    return {"counts": counts, "width": width, "way": draw.choice(WAYS)}


_EXAMPLE: Counts = [[3, 2], [4, 0]]
_FIXED: list[Counts] = [
    [[3, 2], [4, 0]],
    [[5]],
    [[0, 0], [1, 7]],
    [[6, 1, 2]],
    [[2], [3], [7]],
    [[4, 1], [2], [5, 5, 5]],
]
WEIGHTS = Exercise(
    "token_weights",
    reference=token_weights,
    cases=[
        Case("the example, the mean over all tokens", {"counts": _EXAMPLE, "width": 8, "way": "tokens"}),
        Case("the example, padding in the mean", {"counts": _EXAMPLE, "width": 8, "way": "padding"}),
        Case("the example, by rows and by microbatches", {"counts": _EXAMPLE, "width": 8, "way": "rows"}, fixed=[
            {"counts": _EXAMPLE, "width": 8, "way": "microbatches"}]),
        Case("other batches", _some, points=2, hidden=True, draws=6, fixed=[
            {"counts": counts, "width": 9, "way": way} for counts in _FIXED for way in WAYS]),
    ],
    errors={"division by zero": "A row or a microbatch without a counted token has no mean of its own: nothing is "
            "divided by 0 there."},
    idea="Follow one token through each mean above it: what is it divided by, and what is that mean divided by then?",
    hint="tokens: 1 / all counted tokens. The others end in / microbatches: padding 1 / (rows here * width), rows 1 / "
    "(rows here * tokens of the row), microbatches 1 / tokens of the microbatch. 0 where the row has none.",
)  # fmt: skip
