"""The checks of a miniature lab: one exercise alone, one on ranks, one through a drive."""

from __future__ import annotations

from typing import Any

import torch

from labkit.checks import at_most, sends
from labkit.exercises import Case, Draw, Exercise, Lab


def bubble(p: int, m: int) -> float:
    return (p - 1) / (m + p - 1)


def some_pipeline(draw: Draw) -> dict[str, Any]:
    return {"p": draw.integer(2, 16), "m": draw.integer(3, 64)}


def summed(ranks: list[dict[str, Any]]) -> list[torch.Tensor]:
    return [sum((r["x"] for r in ranks), torch.zeros(()))] * len(ranks)


def some_ranks(draw: Draw) -> list[dict[str, Any]]:
    shape = draw.integer(2, 5), draw.integer(2, 5)
    return [{"x": draw.tensor(*shape)} for _ in range(draw.integer(2, 4))]


def ring_bytes(ranks: list[dict[str, Any]]) -> float:
    return ranks[0]["x"].nbytes * (len(ranks) - 1)


def backward(exercise: Any, x: torch.Tensor) -> Any:
    x.requires_grad_()
    y = exercise.double(x)
    y.sum().backward()
    return {"y": y, "grad": x.grad}


LAB = Lab(
    "00_mini",
    [
        Exercise(
            "bubble",
            reference=bubble,
            cases=[
                Case(
                    "4 stages, 8 microbatches",
                    {"p": 4, "m": 8},
                    points=2,
                    errors={"IndexError": "Four stages are as good as any."},
                ),
                Case(
                    "other pipelines",
                    some_pipeline,
                    points=3,
                    hidden=True,
                    errors={"IndexError": "Any number of stages will do."},
                ),
            ],
            errors={"division by zero": "A pipeline is never empty."},
            idea="Which part of the whole is idle?",
            hint="The first stage works for m microbatches; how long does it wait?",
            seconds=2,
        ),
        Exercise(
            "ring_all_reduce",
            reference=summed,
            cases=[
                Case("two ranks", [{"x": torch.tensor([1.0, 2.0])}, {"x": torch.tensor([3.0, 4.0])}]),
                Case("up to four ranks", some_ranks, points=3, hidden=True),
                Case("neighbours only", some_ranks, hidden=True, accept=[sends("send", "recv")]),
                Case(
                    "no more bytes than a ring",
                    some_ranks,
                    hidden=True,
                    accept=[at_most("(N-1) n", ring_bytes, "send")],
                    errors={"bytes; (N-1) n is": "Something travels more than once."},
                ),
            ],
            errors={"ZeroDivisionError": "A sum divides by nothing."},
            hint="After N-1 steps each rank has seen every other tensor once.",
            seconds=5,
        ),
        Exercise(
            "double",
            drive=backward,
            reference=lambda x: {"y": 2 * x, "grad": torch.full_like(x, 2.0)},
            cases=[Case("forward and backward", {"x": torch.tensor([1.0, -1.0])})],
            seconds=2,
        ),
    ],
)
