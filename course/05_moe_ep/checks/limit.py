"""Lab 05: tokens that are dropped at the capacity of an expert.

`probs` is [T, E], 0 where a token does not go to an expert; `map` says where it goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise

from .routing import Pair, weights


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


def limit(probs: torch.Tensor, map: torch.Tensor, capacity: int) -> Pair:
    order = probs.masked_fill(~map, -1.0).argsort(dim=0, descending=True, stable=True)[:capacity]
    kept = torch.zeros_like(map).scatter(0, order, True) & map
    return probs * kept, kept


def _limited(
    way: Callable[[torch.Tensor, torch.Tensor, int], Pair], *, cut: bool = False
) -> Callable[..., dict[str, Any]]:
    """Return the answer of a capacity that keeps what `way` returns; with `cut` without a gradient."""

    def answer(probs: torch.Tensor, map: torch.Tensor, capacity: int, tied: bool = False) -> dict[str, Any]:
        leaf = probs.clone().requires_grad_()
        left, kept = way(leaf, map, capacity)
        (grad,) = torch.autograd.grad((left * (1 + left.detach())).sum(), leaf)
        left, grad = left.detach(), 0 * grad if cut else grad
        if tied:
            return {"tokens of each expert": kept.sum(0).tolist(), "weights": left.sort(0).values,
                    "kept of those that chose it": bool((kept <= map).all()),
                    "gradient of probs": grad.sort(0).values}  # fmt: skip
        return {"probs": left, "map": kept, "gradient of probs": grad}

    return answer


def _routing(draw: Draw, k: int = 2, capacity: int = 0) -> dict[str, Any]:
    t, e = draw.integer(8, 20), draw.integer(3, 6)
    logits = 2 * draw.tensor(t, e)
    logits[:, 0] += 2  # more want the first than it can take, and fewer the last
    logits[:, -1] -= 6
    probs, chosen = weights(logits, k)
    return {"probs": probs, "map": chosen, "capacity": capacity or draw.integer(2, 3)}


def _roomy(draw: Draw) -> dict[str, Any]:
    inputs = _routing(draw)
    return {**inputs, "capacity": len(inputs["map"])}


def _more_room_than_tokens(draw: Draw) -> dict[str, Any]:
    inputs = _routing(draw)
    return {**inputs, "capacity": len(inputs["map"]) + 3}


def _one_choice(draw: Draw) -> dict[str, Any]:
    """Draw inputs with k = 1: the softmax over one logit is 1, so all weights are equal."""
    return {**_routing(draw, 1), "tied": True}


def _weight_of_nothing(draw: Draw) -> dict[str, Any]:
    """Draw a weight that is 0. Where there is room its row is sent all the same."""
    inputs = _routing(draw)
    places = inputs["map"].nonzero()[::3]
    inputs["probs"][places[:, 0], places[:, 1]] = 0.0
    return {**inputs, "capacity": len(inputs["map"])}


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
    reference=_limited(limit),
    drive=_drive_limit,
    cases=[
        Case("three tokens, two experts with room for two each", _THREE),
        Case("room for all", _roomy, hidden=True, fixed=[_more_room_than_tokens, _weight_of_nothing]),
        Case("chosen with the weight 0, and there is room", _ROOM_FOR_ONE),
        Case("other sizes", _routing, points=2, hidden=True, draws=3, fixed=[
            _one_choice, _SECOND_CHOICE, lambda draw: _routing(draw, capacity=1), lambda draw: _routing(draw, 3, 5)]),
    ],
    errors={"out of range": "The capacity may be larger than the number of tokens."},
    idea="Each expert ranks the tokens that chose it.",
    hint="Sort each column by weight, largest first; the first C are kept, if they were chosen at all. The rest is 0.",
)  # fmt: skip
