"""The checks of a lab on settings: a sum over a group, over two axes, a group of one's own, and one without ranks."""

from __future__ import annotations

from typing import Any

import torch

from labkit.checks import sends
from labkit.exercises import Case, Draw, Exercise, Lab

Inputs = list[dict[str, Any]]

RING = sends("send", "recv", to_the_next=True)


def summed(ranks: Inputs) -> list[torch.Tensor]:
    return [sum((r["x"] for r in ranks), torch.zeros((), dtype=ranks[0]["x"].dtype))] * len(ranks)


def some(draw: Draw) -> Inputs:
    shape = draw.shape(2, 2)
    return [{"x": draw.tensor(*shape)} for _ in range(draw.integer(2, 4))]


def by_parity(ranks: Inputs) -> list[list[int]]:
    return [list(range(first, len(ranks), 2)) for first in range(min(2, len(ranks)))]


def row_of(ranks: Inputs) -> list[dict[str, Any]]:
    total = summed(ranks)[0]
    return [{"dp": total, "edp": sum(ranks[p]["x"] for p in range(r % 2, len(ranks), 2))} for r in range(len(ranks))]


def from_before(ranks: Inputs) -> list[torch.Tensor]:
    return [ranks[r - 1]["x"] for r in range(len(ranks))]


def two_axes(exercise: Any, x: Any, dp: Any, edp: Any) -> dict[str, Any]:
    return {"dp": exercise.over(x, dp), "edp": exercise.over(x, edp)}


def outer(draw: Draw) -> dict[str, Any]:
    return {"x": draw.tensor(3), "n": draw.integer(0, 1)}


TWO = [{"x": torch.tensor([[1.0, 2.0]])}, {"x": torch.tensor([[3.0, 4.0]])}]
HIDDEN = [Case("visible", TWO), *(Case(f"hidden {i}", some, hidden=True) for i in range(3))]

LAB = Lab(
    "00_settings",
    [
        Exercise("total", reference=summed, cases=HIDDEN, group="group", seconds=5),
        Exercise("over", reference=row_of, drive=two_axes, cases=HIDDEN, seconds=5,
                 axis={"dp": None, "edp": by_parity}),
        Exercise("pass_on", reference=from_before, cases=HIDDEN, seconds=5, axis="cp", accept=[RING]),
        Exercise("own_group", reference=summed, cases=HIDDEN, seconds=5),
        Exercise("into", function="into", reference=lambda x, out: 2 * x, changes=("out",), seconds=2,
                 cases=[Case("into out", {"x": torch.ones(2), "out": torch.zeros(2)})]),
        Exercise("plus", reference=lambda x, n: x + n, seconds=2, cases=[
            Case("by hand", {"x": torch.zeros(1), "n": 1}, fixed=[{"x": torch.ones(1), "n": 2}]),
            Case("drawn", outer, hidden=True, fixed=[{"x": torch.ones(2), "n": 7}]),
        ], idea="Add n."),
    ],
)  # fmt: skip
