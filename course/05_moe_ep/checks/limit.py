"""Lab 05: tokens that are dropped at the capacity of an expert.

`probs` is [T, E], 0 where a token does not go to an expert; `map` says where it goes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise

from .routing import weights


def _drive_limit(exercise: Any, probs: Any, map: Any, capacity: int, tied: bool = False) -> Any:
    """Run the learner's capacity; with `tied` any of the tokens with equal weights may be kept, and only what the
    choices have in common is compared."""
    leaf, copy = probs.clone().requires_grad_(), map.clone()
    left, kept = exercise.limit(probs, map, capacity)
    again, _ = exercise.limit(leaf * 1, copy, capacity)  # for the gradient: of copies, which it may spoil
    if again.requires_grad:
        (again * (1 + again.detach())).sum().backward()
    grad = 0 * leaf.detach() if leaf.grad is None else leaf.grad
    if tied:
        return {
            "tokens of each expert": kept.sum(0).tolist(),
            "weights": left.sort(0).values,
            "kept of those that chose it": bool((kept <= map).all()),
            "gradient of probs": grad.sort(0).values,
        }
    return {"probs": left, "map": kept, "gradient of probs": grad}


def limit(probs: torch.Tensor, map: torch.Tensor, capacity: int, tied: bool = False) -> dict[str, Any]:
    kept = torch.zeros_like(map)
    for e, column in enumerate(map.T):
        chose = column.nonzero().flatten()
        kept[chose[probs[chose, e].argsort(descending=True, stable=True)][:capacity], e] = True
    left, grad = probs * kept, (1 + probs) * kept  # the gradient of sum(left (1 + left)), its second left held fixed
    if tied:
        return {"tokens of each expert": kept.sum(0).tolist(), "weights": left.sort(0).values,
                "kept of those that chose it": True, "gradient of probs": grad.sort(0).values}  # fmt: skip
    return {"probs": left, "map": kept, "gradient of probs": grad}


def _routing(draw: Draw, k: int = 2, capacity: int = 0) -> dict[str, Any]:
    t, e = draw.integer(8, 20), draw.integer(3, 6)
    logits = 2 * draw.tensor(t, e)
    logits[:, 0] += 2  # more want the first than it can take, and fewer the last
    logits[:, -1] -= 6
    probs, chosen = weights(logits, k)
    return {"probs": probs, "map": chosen, "capacity": capacity or draw.integer(2, 3)}


def _roomy(draw: Draw, more: int = 0) -> dict[str, Any]:
    inputs = _routing(draw)
    return {**inputs, "capacity": len(inputs["map"]) + more}


def _everywhere(draw: Draw) -> dict[str, Any]:
    """Draw a routing of every token to every expert, with just as much room: nothing is dropped."""
    probs = draw.tensor(draw.integer(5, 9), 3).softmax(-1)
    return {"probs": probs, "map": torch.ones_like(probs, dtype=torch.bool), "capacity": len(probs)}


def _one_choice(draw: Draw) -> dict[str, Any]:
    """Draw inputs with k = 1: the softmax over one logit is 1, so all weights are equal."""
    return {**_routing(draw, 1), "tied": True}


def _weight_of_nothing(draw: Draw) -> dict[str, Any]:
    """Draw a weight that is 0. Where there is room its row is sent all the same."""
    inputs = _roomy(draw)
    places = inputs["map"].nonzero()[::3]
    inputs["probs"][places[:, 0], places[:, 1]] = 0.0
    return inputs


# Each expert but the first is chosen by one token, with the weight 0: there is room for it.
_ROOM_FOR_ONE = {
    "probs": torch.tensor([[0.75, 0.0, 0.0, 0.0], [0.5, 0.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]),
    "map": torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]], dtype=torch.bool), "capacity": 1,
}  # fmt: skip

# Expert 0 is the second choice of the token that weighs more there, and the first of the other.
_SECOND_CHOICE = {
    "probs": torch.tensor([[0.45, 0.55, 0.0], [0.4, 0.3, 0.3]]),
    "map": torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool), "capacity": 1,
}  # fmt: skip

_THREE = {
    "probs": torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.7, 0.3]]), "map": torch.ones(3, 2, dtype=torch.bool),
    "capacity": 2,
}  # fmt: skip

LIMIT = Exercise(
    "limit",
    reference=limit,
    drive=_drive_limit,
    cases=[
        Case("three tokens, two experts with room for two each", _THREE),
        Case("room for all", _roomy, hidden=True, fixed=[
            partial(_roomy, more=3), _weight_of_nothing, _everywhere]),
        Case("chosen with the weight 0, and there is room", _ROOM_FOR_ONE),
        Case("other sizes", _routing, points=2, hidden=True, draws=3, fixed=[
            _one_choice, _SECOND_CHOICE, partial(_routing, capacity=1), partial(_routing, k=3, capacity=5)]),
    ],
    errors={"out of range": "The capacity may be larger than the number of tokens."},
    idea="Each expert ranks the tokens that chose it.",
    hint="Sort each column by weight, largest first; the first C are kept, if they were chosen at all. The rest is 0.",
)  # fmt: skip
