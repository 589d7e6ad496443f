"""Lab 05: on how many machines a token's experts lie, and a choice that keeps them on few.

Machine m of M holds the experts [m E/M, (m + 1) E/M).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise

from .routing import clear, top


def _drive_machines(
    exercise: Any, experts: int, k: int, machines: int, scores: Any, most: int, tied: bool = False
) -> dict[str, Any]:
    """Run both functions; with `tied` several choices are right, and only what they have in common is compared."""
    mean, chosen = exercise.machines_of_a_token(experts, k, machines), exercise.near(scores, k, machines, most)
    if not tied:
        return {"machines_of_a_token's result": mean, "near's map": chosen}
    met = chosen.unflatten(1, (machines, -1)).any(-1).sum(-1)
    return {"machines_of_a_token's result": mean, "how many experts near gives a token": chosen.sum(1).tolist(),
            "how many machines near gives a token": met.clamp(min=most).tolist()}  # fmt: skip


def machines(
    experts: int, k: int, machines: int, scores: torch.Tensor, most: int, tied: bool = False
) -> dict[str, Any]:
    """The mean machine by machine, the choice token by token."""
    missed = math.comb(experts - experts // machines, k) / math.comb(experts, k)
    mean = machines * (1 - missed)
    if tied:
        return {"machines_of_a_token's result": mean, "how many experts near gives a token": [k] * len(scores),
                "how many machines near gives a token": [most] * len(scores)}  # fmt: skip
    return {"machines_of_a_token's result": mean, "near's map": top(_allowed(scores, k, machines, most), k)}


def _worth(scores: torch.Tensor, k: int, machines: int, most: int) -> torch.Tensor:
    """[T, M] in double: the sum of the k/most highest scores of each machine."""
    return scores.double().unflatten(1, (machines, -1)).sort(-1, descending=True).values[..., : k // most].sum(-1)


def _allowed(scores: torch.Tensor, k: int, machines: int, most: int) -> torch.Tensor:
    """The scores, minus infinity where the machine is not among the best."""
    best = top(_worth(scores, k, machines, most), most).repeat_interleave(scores.shape[1] // machines, 1)
    return scores.double().masked_fill(~best, -torch.inf)


def _of(machines: int, local: int, most: int, each: int, shift: float, draw: Draw) -> dict[str, Any]:
    """Draw scores whose choice does not depend on rounding; k is `most` times `each`, `local` experts a machine."""
    k, scores = most * each, draw.tensor(40, machines * local) + shift
    fits = clear(_worth(scores, k, machines, most), most) & clear(_allowed(scores, k, machines, most), k)
    return {"experts": machines * local, "k": k, "machines": machines, "scores": scores[fits][:12], "most": most}


def _some(draw: Draw) -> dict[str, Any]:
    machines, each = draw.integer(3, 6), draw.integer(2, 3)
    return _of(machines, draw.integer(each + 1, 7), draw.integer(2, machines - 1), each, draw.choice([-1.0, 0.5]), draw)


# Machine 0 has the best expert, machine 1 the best pair, machine 2 the largest sum of all three.
_THREE = {
    "experts": 9, "k": 2, "machines": 3, "most": 1,
    "scores": torch.tensor([[0.9, 0.1, 0.1, 0.7, 0.6, 0.0, 0.5, 0.5, 0.5]]),
}  # fmt: skip
# The text's table: machine 1 is worth most, and gives four of the six.
_TABLE = {
    "experts": 12, "k": 6, "machines": 3, "most": 2,
    "scores": torch.tensor([[0.9, 0.4, 0.2, 0.1, 0.7, 0.6, 0.5, 0.3, 0.8, 0.3, 0.1, 0.0]]),
}  # fmt: skip
# The text's mean; all scores are below 0, as they are where biases are.
_PAIRS = {
    "experts": 4, "k": 2, "machines": 2, "most": 1, "scores": torch.tensor([[-0.1, -0.9, -0.2, -0.3]]),
}  # fmt: skip
_NEW_ROUTER = {"experts": 12, "k": 4, "machines": 4, "most": 2, "scores": torch.zeros(5, 12), "tied": True}
# All machines are worth the same, and only two of them may be used.
_EQUAL_WORTH = {
    **_NEW_ROUTER,
    "scores": torch.tensor([[2.0, 0, 0, 1, 1, 0, 1, 1, 0, 2, 0, 0], [0, 0, 2, 1, 0, 1, 0, 2, 0, 1, 1, 0]]),
}  # fmt: skip
_LARGE = partial(_of, 8, 32, 4, 2, 0.0)

MACHINES = Exercise(
    "machines",
    reference=machines,
    drive=_drive_machines,
    rtol=1e-4,
    cases=[
        Case("the text's 4 experts on 2 machines; one token, at most 1 machine", _PAIRS),
        Case("9 experts on 3 machines, at most 1 machine; the text's table, at most 2", _THREE, fixed=[_TABLE]),
        Case("other sizes", _some, points=3, hidden=True, draws=3, fixed=[
            partial(_of, 4, 3, 4, 1, -2.0), partial(_of, 5, 2, 3, 2, 0.0), partial(_of, 1, 6, 1, 2, 0.0),
            partial(_of, 5, 6, 2, 3, 0.0), _LARGE, _NEW_ROUTER, _EQUAL_WORTH]),
    ],
    idea="The mean of a sum is the sum of the means: what is the chance that one given machine holds none of the k? "
    "And before a token may choose experts it chooses machines.",
    hint="A machine holds none of them in C(E - E/M, k) of C(E, k) cases; the mean is M (1 - that). near: [T, M, E/M]; "
    "topk(k // most) of each machine, summed; the topk(most) machines; the rest to -inf; topk(k).",
)  # fmt: skip
