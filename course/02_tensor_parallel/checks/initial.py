"""Lab 02, initial values: each rank's part of a matrix that one process would draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise


def initial_part(shape: list[int], dim: int | None, tp_rank: int, tp_size: int, seed: int, std: float) -> torch.Tensor:
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std
    return whole if dim is None else whole.chunk(tp_size, dim)[tp_rank].contiguous()


def _a_matrix(dim: int | None) -> Callable[[Draw], dict[str, Any]]:
    def inputs(draw: Draw) -> dict[str, Any]:
        t = draw.choice([2, 4])
        shape = [t * draw.integer(1, 6), t * draw.integer(1, 6)]
        return {
            "shape": shape, "dim": dim, "tp_rank": draw.integer(1, t - 1), "tp_size": t,
            "seed": draw.integer(0, 10**6), "std": draw.integer(1, 9) / 100,
        }  # fmt: skip

    return inputs


def _first_rank(dim: int, tp_size: int = 3) -> dict[str, Any]:
    return {"shape": [6, 9], "dim": dim, "tp_rank": 0, "tp_size": tp_size, "seed": 5, "std": 0.5}


INITIAL = Exercise(
    "initial_part",
    reference=initial_part,
    cases=[
        Case("a matrix [4, 2] cut along dim 0, rank 1 of 2: its rows 2 and 3",
             {"shape": [4, 2], "dim": 0, "tp_rank": 1, "tp_size": 2, "seed": 1, "std": 0.02}),
        Case("cut along dim 0", _a_matrix(0), hidden=True, fixed=[_first_rank(0), _first_rank(0, 1)]),
        Case("cut along dim 1", _a_matrix(1), hidden=True, fixed=[_first_rank(1), _first_rank(1, 1)]),
        Case("replicated", _a_matrix(None), hidden=True),
    ],
    idea="What does one process draw, and which block of it does this rank hold?",
    hint="Draw the whole matrix from the seed on every rank, times std, and keep this rank's block along dim.",
)  # fmt: skip
