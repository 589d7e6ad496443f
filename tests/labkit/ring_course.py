"""The checks of a lab of one ring and of one overlap: what is judged is how ranks talk."""

from __future__ import annotations

from typing import Any

import torch

from labkit.checks import at_most, nothing_waits_until, only, started_before, to_the_next
from labkit.exercises import Case, Exercise, Lab

Inputs = list[dict[str, Any]]
THREE = [{"x": torch.arange(6.0) + rank} for rank in range(3)]


def summed(ranks: Inputs) -> list[torch.Tensor]:
    return [sum((r["x"] for r in ranks), torch.zeros(()))] * len(ranks)


def reduce_and_multiply(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    total = sum((r["x"] for r in ranks), torch.zeros(()))
    return [{"total": total, "product": r["w"] @ r["w"]} for r in ranks]


def in_two_steps(exercise: Any, x: Any) -> Any:
    reducer = exercise.Reducer(x)
    mark("backward ended")  # type: ignore[name-defined]  # noqa: F821  the player gives it
    return reducer.finish()


def late_scale(exercise: Any, x: Any) -> Any:
    reducer = exercise.Reducer(x)
    factor = late(0)  # type: ignore[name-defined]  # noqa: F821  the player gives it
    return {"sum": reducer.finish(), "scaled": factor * x}


def scaled(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    return [{"sum": total, "scaled": r["factor"][0] * r["x"]} for r, total in zip(ranks, summed(ranks), strict=True)]


LAB = Lab(
    "00_ring",
    [
        Exercise("ring", reference=summed, cases=[Case("three ranks", THREE, fixed=[THREE])], seconds=10, accept=[
            only("send", "recv"), to_the_next, at_most("2 (N-1)/N n", lambda i: 2 * 2 * i[0]["x"].nbytes / 3, "send")]),
        Exercise("overlapped", reference=reduce_and_multiply, spoil=("w",), seconds=10, cases=[
            Case("two ranks", [{"x": torch.ones(3) + r, "w": torch.eye(3) + r} for r in range(2)])]),
        Exercise("reducer", reference=summed, drive=in_two_steps, function="Reducer", seconds=10,
                 cases=[Case("two ranks", THREE[:2])],
                 accept=[started_before("backward ended", "all_reduce", lambda _: 1),
                         nothing_waits_until("backward ended")]),
        Exercise("gated", reference=scaled, drive=late_scale, function="Reducer", late="factor", seconds=10,
                 cases=[Case("two ranks", [{**one, "factor": [0.5 + i]} for i, one in enumerate(THREE[:2])])],
                 accept=[started_before("late 0", "all_reduce", lambda _: 1), nothing_waits_until("late 0")]),
    ],
)  # fmt: skip
