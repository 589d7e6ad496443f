"""Lab 06, sums of many ranks: which partial sums are rounded, in a ring and in a tree."""

from __future__ import annotations

from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise


def _drive(exercise: Any, parts: Any, dtype: str) -> Any:
    import torch as t

    return {name: getattr(exercise, f"{name}_sum")(parts.clone(), getattr(t, dtype)) for name in ("ring", "tree")}


def _rounded(parts: torch.Tensor, dtype: str) -> dict[str, torch.Tensor]:
    """Sums in float64 of two numbers of `dtype`, each rounded once."""
    kind, ranks = getattr(torch, dtype), len(parts)
    held, chunks = parts.to(kind).double(), torch.arange(ranks)
    ring, tree = torch.zeros_like(held[0]), held
    for step in range(1, ranks + 1):
        ring = (ring + held[(chunks + step) % ranks, chunks]).to(kind).double()
    while len(tree) > 1:
        tree = (tree[::2] + tree[1::2]).to(kind).double()
    return {"ring": ring.to(kind), "tree": tree[0].to(kind)}


def _parts(draw: Draw, ranks: int, dtype: str) -> dict[str, Any]:
    return {"parts": draw.tensor(ranks, ranks, draw.integer(2, 4)), "dtype": dtype}


def _some(draw: Draw) -> dict[str, Any]:
    return _parts(draw, draw.choice([4, 8, 16]), "bfloat16")


def _two(draw: Draw) -> dict[str, Any]:
    return _parts(draw, 2, "bfloat16")


def _other(draw: Draw) -> dict[str, Any]:
    return _parts(draw, 16, draw.choice(["float16", "float32"]))


_FOUR = {"parts": torch.tensor([256.0, 1, 1, 1]).view(4, 1, 1).expand(4, 4, 1).contiguous(), "dtype": "bfloat16"}

SUMS = Exercise(
    "sums",
    reference=_rounded,
    function="ring_sum",
    drive=_drive,
    rtol=0.0,
    atol=0.0,
    cases=[
        Case("4 ranks, a number in each chunk: 256 on rank 0, 1 on the others", _FOUR),
        Case("other ranks and numbers", _some, points=2, hidden=True, fixed=[_two, _some]),
        Case("other dtypes", _other, hidden=True),
    ],
    idea="A partial sum is rounded whenever it is written. Ring: through which ranks has chunk c gone when it reaches "
    "rank c, its last?",
    hint="held = parts.to(dtype). ring: chunk c begins with held[c + 1, c] and takes c + 2, ..., c; every + rounds. "
    "tree: held = held[::2] + held[1::2] until one is left.",
)  # fmt: skip
