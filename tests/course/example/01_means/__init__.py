"""Checks of the example lab: the mean loss of counted tokens, alone, on ranks, and hidden behind a product."""

from __future__ import annotations

from typing import Any

import torch

from labkit.checks import overlaps, sends
from labkit.exercises import Case, Draw, Exercise, Lab

Ranks = list[dict[str, Any]]


def token_mean(losses: torch.Tensor, mask: torch.Tensor) -> float:
    return float((losses * mask).sum() / max(float(mask.sum()), 1.0))


def _batch(draw: Draw, tokens: int = 0) -> dict[str, Any]:
    n = tokens or draw.integer(3, 9)
    mask = (draw.tensor(n) > 0).float()
    mask[0], mask[-1] = 1.0, 0.0
    return {"losses": draw.tensor(n).abs(), "mask": mask}


def rank_mean(ranks: Ranks) -> list[float]:
    total = sum(float((r["losses"] * r["mask"]).sum()) for r in ranks)
    return [total / sum(float(r["mask"].sum()) for r in ranks)] * len(ranks)


def _batches(draw: Draw) -> Ranks:
    return [_batch(draw, tokens) for tokens in draw.sizes(draw.integer(2, 4), 3, 9)]


def hidden_sum(ranks: Ranks) -> list[dict[str, torch.Tensor]]:
    total = torch.stack([r["grad"] for r in ranks]).sum(0)
    return [{"grad": total, "y": r["x"] @ r["x"].mT} for r in ranks]


def _gradients(draw: Draw) -> Ranks:
    n = draw.integer(2, 5)
    return [{"grad": draw.tensor(n), "x": draw.tensor(4, 3)} for _ in range(draw.integer(2, 3))]


LAB = Lab(
    "01_means",
    [
        Exercise(
            "token_mean",
            reference=token_mean,
            cases=[
                Case("losses 2, 4, 9, of which the first two count",
                     {"losses": torch.tensor([2.0, 4.0, 9.0]), "mask": torch.tensor([1.0, 1.0, 0.0])}),
                Case("other batches", _batch, points=2, hidden=True,
                     fixed=[{"losses": torch.ones(3), "mask": torch.zeros(3)}]),
            ],
            idea="How many tokens count?",
            hint="The sum of losses * mask, divided by the sum of the mask, or by 1 where nothing counts.",
        ),
        Exercise(
            "rank_mean",
            reference=rank_mean,
            group="group",
            cases=[
                Case("rank 0 has a loss of 6, rank 1 has 1, 2, 3", [
                    {"losses": torch.tensor([6.0]), "mask": torch.ones(1)},
                    {"losses": torch.tensor([1.0, 2.0, 3.0]), "mask": torch.ones(3)}]),
                Case("up to four ranks", _batches, points=2, hidden=True),
                Case("one message of two numbers", _batches, points=2, hidden=True,
                     accept=[sends("all_reduce", times=1)]),
            ],
            idea="Ranks have different numbers of tokens: which two numbers can be added?",
            hint="All-reduce the tensor [sum of counted losses, number of counted tokens]; divide afterwards.",
        ),
        Exercise(
            "hidden_sum",
            reference=hidden_sum,
            group="group",
            cases=[
                Case("two ranks", [{"grad": torch.ones(2), "x": torch.eye(2)} for _ in range(2)]),
                Case("the product is computed while the sum travels", _gradients, points=2, hidden=True,
                     accept=[overlaps("all_reduce", lambda ranks: 48, "grad")]),
            ],
            idea="A collective with async_op=True returns before it is done. When must you wait for it?",
            hint="Start the all-reduce, compute x @ x.mT, wait, return both.",
        ),
    ],
)  # fmt: skip
