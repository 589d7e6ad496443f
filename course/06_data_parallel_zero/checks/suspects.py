"""Lab 06: shards of the clipped gradient of each rank, compared with the whole gradient of the twin."""

from __future__ import annotations

import math
from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise

Inputs = dict[str, Any]


def suspects(got: list[torch.Tensor], want: torch.Tensor) -> list[float]:
    flat = torch.cat([want.double(), torch.zeros(sum(len(g) for g in got) - len(want), dtype=torch.float64)])
    found = []
    for g, w in zip(got, flat.split([len(g) for g in got]), strict=True):
        found.append(_factor(g.double(), w))
    return found


def _factor(g: torch.Tensor, w: torch.Tensor) -> float:
    if (g - w).norm() <= 1e-3 * w.norm():
        return 1.0
    factor = (g * w).sum() / (w * w).sum()
    return factor.item() if (g - factor * w).norm() <= 1e-3 * (factor * w).norm() else math.nan


def _whole(draw: Draw, ranks: int, share: int, padding: int, factors: list[float | None]) -> Inputs:
    want = draw.tensor(ranks * share - padding)
    flat = torch.cat([want, torch.zeros(padding)])
    got = [draw.tensor(share) if f is None else f * part for f, part in zip(factors, flat.chunk(ranks), strict=True)]
    return {"got": [g * (1 + 1e-6 * draw.tensor(share)) for g in got], "want": want}


def _some(draw: Draw) -> Inputs:
    return _whole(draw, 4, draw.integer(4, 8), 2, draw.random.sample([1.0, 0.5, 1.75, None], 4))


def _padding_alone(draw: Draw) -> Inputs:
    """Draw a last rank with padding alone, a rank with factor 0, and one with a wrong sign."""
    return _whole(draw, 4, 5, 5, [0.0, -1.0, 1.0, 1.0])


# (got, want) of each rank; the twin's is one number shorter
_AWKWARD = [
    ([3.0, 0.0, 6.0], [1.0, 0.0, 2.0]), ([0.0, 2.003, 0.0], [0.0, 2.0, 0.0]), ([1e-4, 2e-4, 5e-8], [1e-4, 2e-4, 0.0]),
    ([4.0, 3.0, 0.0], [3.0, 4.0, 0.0]), ([0.01, 5e-4, 0.0], [1.0, 0.0, 0.0]), ([2.0, 0.003, 0.0], [2.0, 0.0, 0.0]),
    ([3e-4, 6e-4, 0.0], [1e-4, 2e-4, 0.0]), ([300.0, 0.2, 0.0], [100.0, 0.0, 0.0]),
    ([2.0, 0.0, 0.003], [1.0, 0.0, 0.0]),
]  # fmt: skip


def _awkward(draw: Draw) -> Inputs:
    want = torch.tensor([number for _, right in _AWKWARD for number in right])
    return {"got": [torch.tensor(mine) for mine, _ in _AWKWARD], "want": want[:-1]}


def _spoiled_padding(draw: Draw) -> Inputs:
    """Draw padding that is not 0, which makes a shard wrong."""
    inputs = _whole(draw, 3, 4, 2, [1.0, 2.0, 1.0])
    inputs["got"][2][-1] = 5.0
    return inputs


_TWO = {"got": [torch.tensor([1.0, 2.0]), torch.tensor([1.5, 0.0])], "want": torch.tensor([1.0, 2.0, 3.0])}
# a sign, an error that is small beside the part, no factor, padding that is not 0
_FOUR = {
    "got": [torch.tensor([-1.0, -2.0]), torch.tensor([4.0, 0.001]), torch.tensor([2.0, 1.0]), torch.tensor([3.0, 3.0])],
    "want": torch.tensor([1.0, 2.0, 4.0, 0.0, 1.0, 2.0, 3.0]),
}


SUSPECTS = Exercise(
    "suspects",
    reference=suspects,
    rtol=1e-2,
    atol=1e-6,
    cases=[
        Case("rank 0 is right, rank 1 has half, and one element of padding", _TWO),
        Case("a sign; 0.001 where 0 is right, beside 4; no factor; padding that is not 0", _FOUR),
        Case("four ranks", _some, hidden=True, fixed=[_awkward]),
        Case("padding, zeros, a sign", _padding_alone, hidden=True, fixed=[_spoiled_padding]),
    ],
    errors={"must match": "The shards may be longer than the twin's gradient: the last elements are padding, 0."},
    idea="Norms are of whole parts. Put the twin's gradient where the shards lie, padding too; then for each rank: "
    "which multiple comes nearest?",
    hint="Append zeros to want and split it as got is. Right, 1.0, if (g - w).norm() <= 1e-3 * w.norm(). Else factor = "
    "(g . w)/(w . w); nan if (g - factor w).norm() is not small beside (factor w).norm().",
)  # fmt: skip
