"""Checks of exercises with several outputs: a tuple, a dict, a list a rank."""

from __future__ import annotations

from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise, Lab


def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x + 1, x * 2


def some(draw: Draw) -> dict[str, Any]:
    return {"x": draw.tensor(20)}


def on_two_ranks(ranks: list[dict[str, Any]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [both(one["x"]) for one in ranks]


LAB = Lab(
    "00_parts",
    [
        Exercise("both", [Case("three", {"x": torch.ones(3)}), Case("more", some, hidden=True)], both,
                 outputs=("plus", "double")),
        Exercise("unnamed", [Case("more", some, hidden=True)], both),
        Exercise("sizes", [
            Case("of two", {"n": 2, "m": 3}, fixed=[{"n": 4, "m": 5}]),
            Case("others", lambda draw: {"n": draw.integer(2, 9), "m": 7}, hidden=True),
        ], lambda n, m: {"sum": n + m, "product": n * m, "first": n}),
        Exercise("ranks", [Case("two", lambda draw: [{"x": draw.tensor(9)}, {"x": draw.tensor(9)}], hidden=True)],
                 on_two_ranks, outputs=("plus", "double")),
    ],
)  # fmt: skip
