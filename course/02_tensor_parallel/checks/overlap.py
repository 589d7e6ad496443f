"""Lab 02, the backward pass of a column layer with sequence parallelism: each message travels while a product is made.

Rank r of t holds the r-th of t equal parts of the tokens of x, and gets that part of dx.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from labkit.checks import overlaps, sends
from labkit.exercises import Case, Draw, Exercise

from .linear import Inputs, in_whole_numbers, local_linear


def _drive_overlap(exercise: Any, dy: Any, x: Any, weight: Any, tp: Any) -> dict[str, Any]:
    dx, dw = exercise.column_backward(dy, x, weight, tp)
    return {"dx": dx.clone(), "dw": dw.clone()}  # waits for one that waits by itself


def _gradients(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    x = torch.cat([r["x"] for r in ranks])
    parts = [local_linear({**r, "x": x, "bias": None}) for r in ranks]
    total = torch.stack([p["dx"] for p in parts]).sum(0)
    return [{"dx": dx, "dw": p["dw"]} for p, dx in zip(parts, total.chunk(len(ranks)), strict=True)]


def _inputs(t: int) -> Callable[[Draw], Inputs]:
    def inputs(draw: Draw) -> Inputs:
        s, b, i, o = draw.shape(4, 2, 9)
        return [{"dy": draw.tensor(t * s, b, o), "x": draw.tensor(s, b, i), "weight": draw.tensor(o, i)}
                for _ in range(t)]  # fmt: skip

    return inputs


def _by_hand() -> Inputs:
    """The product of the lab's picture; each rank has one of the two tokens."""
    a, ones = torch.tensor([[5.0, 7.0], [6.0, 8.0]]), torch.ones(2, 1, 1)  # as PyTorch stores it: [out, in]
    tokens = ([1.0, 2.0], [3.0, 4.0])
    return [{"dy": ones.clone(), "x": torch.tensor([[x]]), "weight": a[r : r + 1].clone()}
            for r, x in enumerate(tokens)]  # fmt: skip


def _a_product(ranks: Inputs) -> float:
    """Multiply-adds of dx, and as many of dW."""
    return float(ranks[0]["dy"].numel() * ranks[0]["x"].shape[-1])


OVERLAP = Exercise(
    "column_backward",
    drive=_drive_overlap,
    axis="tp",
    reference=_gradients,
    cases=[
        Case("the 2 x 2 product of the lab, a token on each rank, dy = 1: one gather, one reduce-scatter", _by_hand(),
             fixed=[in_whole_numbers(_inputs(2))],
             accept=[sends("all_gather", "reduce_scatter", times=2)]),
        Case("other sizes, 3 ranks: dx and dW", _inputs(3), points=2, hidden=True),
        Case("while x travels one product is made, while dx travels the other", _inputs(2), points=3, hidden=True,
             fixed=[_inputs(3)],
             accept=[overlaps("all_gather", _a_product, "x"),
                     overlaps("reduce_scatter", _a_product, "dx")]),
    ],
    idea="Which product can this rank make before any message has arrived? And which message can start only after it?",
    hint="Start the all-gather of x; dy @ weight, this rank's share of dx for all tokens; wait for x; start the "
    "reduce-scatter of the share; dW from dy and the gathered x; wait for dx.",
)  # fmt: skip
