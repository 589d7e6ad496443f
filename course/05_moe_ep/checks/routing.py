"""Lab 05: who goes where, and what a capacity drops.

References work in float64 on whatever was drawn. `probs` is [T, E], 0 where a token does not go; `map` says where it
goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise, Mistake

Pair = tuple[torch.Tensor, torch.Tensor]

# ------------------------------------------------------------------------------------------------------- router


def _drive_route(exercise: Any, x: Any, weight: Any, k: int, g: Any) -> dict[str, Any]:
    weight.requires_grad_()
    probs, chosen = exercise.route(x, weight, k)
    (probs * g).sum().backward()
    found = {"probs": probs.detach(), "map": chosen}
    return found if weight.dtype != g.dtype else {**found, "weight's gradient": weight.grad}


def top(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest of each row, [T, E] bool."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(k, -1).indices, True)


def _weights(logits: torch.Tensor, k: int) -> Pair:
    chosen = top(logits, k)
    return logits.masked_fill(~chosen, -torch.inf).softmax(-1), chosen


def _router(way: Callable[[torch.Tensor, int], Pair], dtype: torch.dtype = torch.float32) -> Callable[..., Any]:
    """The answer of a router that makes of logits what `way` says."""

    def answer(x: torch.Tensor, weight: torch.Tensor, k: int, g: torch.Tensor) -> dict[str, torch.Tensor]:
        w = weight.double().detach().requires_grad_()
        probs, chosen = way(x.double() @ w.T, k)
        found = {"probs": probs.detach().to(dtype), "map": chosen}
        if weight.dtype == g.dtype:
            grad = torch.zeros_like(w)
            if probs.requires_grad:
                (grad,) = torch.autograd.grad((probs * g).sum(), w)
            found["weight's gradient"] = grad.to(weight.dtype)
        return found

    return answer


def _rounded(x: torch.Tensor, weight: torch.Tensor, k: int, g: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits in the dtype of the tokens, softmax in fp32."""
    probs, chosen = _weights((x @ weight.T).double(), k)
    return {"probs": probs.float(), "map": chosen}


def _all_softmax(logits: torch.Tensor, k: int) -> Pair:
    return logits.softmax(-1) * top(logits, k), top(logits, k)


def _equal_weights(logits: torch.Tensor, k: int) -> Pair:
    return top(logits, k) / k, top(logits, k)


def _cut_off(logits: torch.Tensor, k: int) -> Pair:
    probs, chosen = _weights(logits, k)
    return probs.detach(), chosen


def _plain_exp(logits: torch.Tensor, k: int) -> Pair:
    best = logits.float().topk(k, -1)
    powers = best.values.exp()
    probs = torch.zeros_like(logits).scatter(1, best.indices, (powers / powers.sum(-1, keepdim=True)).double())
    return probs, top(logits, k)


def _tokens(draw: Draw) -> dict[str, Any]:
    t, h, e = draw.integer(3, 9), draw.integer(4, 9), draw.integer(4, 8)
    return {
        "x": draw.tensor(t, h), "weight": draw.tensor(e, h), "k": draw.integer(2, 3), "g": draw.tensor(t, e),
    }  # fmt: skip


def _large_logits(draw: Draw) -> dict[str, Any]:
    """About 200, all of them, with differences about 1."""
    inputs = _tokens(draw)
    inputs["x"][:, 0], inputs["weight"][:, 0] = 1.0, 200.0
    return inputs


def _half(draw: Draw) -> dict[str, Any]:
    return {"x": draw.tensor(200, 64, dtype=torch.bfloat16), "weight": draw.tensor(8, 64, dtype=torch.bfloat16),
            "g": draw.tensor(200, 8), "k": 2}  # fmt: skip


_TWO = {
    "x": torch.tensor([[1.0, 0.0], [0.0, 1.0]]), "weight": torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, -1.0]]), "k": 2,
    "g": torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]),
}  # fmt: skip

ROUTE = Exercise(
    "route",
    reference=_router(_weights),
    drive=_drive_route,
    rtol=1e-3,
    cases=[
        Case("two tokens, three experts", _TWO),
        Case("other sizes", _tokens, hidden=True),
        Case("logits in the hundreds", _large_logits, hidden=True),
        Case("tokens and weights in bf16", _half, points=2, hidden=True),
    ],
    mistakes=[
        Mistake(_router(_all_softmax), "That is the softmax over all experts. Here it is over the k chosen ones: the "
                "weights of a token sum to 1."),
        Mistake(_router(lambda logits, k: (logits.softmax(-1), logits > -torch.inf)), "Every expert gets every token. "
                "Keep the k largest."),
        Mistake(_router(_equal_weights), "The weights are the softmax of the chosen logits; equal ones teach the "
                "router nothing."),
        Mistake(_router(_cut_off), "No gradient reaches the router's weight: the weights of the experts must stay "
                "differentiable."),
        Mistake(_router(_plain_exp), "exp of a large logit overflows; torch.softmax subtracts the largest first."),
        Mistake(_rounded, "The logits were rounded to bf16, and some tokens go elsewhere. Cast x and weight to fp32 "
                "*before* the product."),
        Mistake(_router(_weights, torch.bfloat16), "The weights must be fp32, whatever the tokens are."),
    ],
    hint="logits = x.float() @ weight.float().T; the k largest of each row; softmax over those; scatter into zeros.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------ capacity


def limit(probs: torch.Tensor, map: torch.Tensor, capacity: int) -> Pair:
    order = probs.masked_fill(~map, -1.0).argsort(dim=0, descending=True, stable=True)[:capacity]
    kept = torch.zeros_like(map).scatter(0, order, True) & map
    return probs * kept, kept


def _first_come(probs: torch.Tensor, map: torch.Tensor, capacity: int) -> Pair:
    kept = map & (map.cumsum(0) <= capacity)
    return probs * kept, kept


def _of_a_token(probs: torch.Tensor, map: torch.Tensor, capacity: int) -> Pair:
    kept = top(probs, min(capacity, probs.shape[1])) & map
    return probs * kept, kept


def _made_whole(probs: torch.Tensor, map: torch.Tensor, capacity: int) -> Pair:
    left, kept = limit(probs, map, capacity)
    return left / left.sum(-1, keepdim=True).clamp_min(1e-9), kept


def _same_map(probs: torch.Tensor, map: torch.Tensor, capacity: int) -> Pair:
    return limit(probs, map, capacity)[0], map


def _padded(probs: torch.Tensor, map: torch.Tensor, capacity: int) -> Pair:
    order = probs.argsort(dim=0, descending=True, stable=True)[:capacity]
    kept = torch.zeros_like(map).scatter(0, order, True)
    return probs * kept, kept


def _routing(draw: Draw) -> dict[str, Any]:
    t, e = draw.integer(8, 20), draw.integer(3, 6)
    logits = 2 * draw.tensor(t, e)
    logits[:, 0] += 2  # more want the first than it can take, and fewer the last
    logits[:, -1] -= 6
    probs, chosen = _weights(logits, 2)
    return {"probs": probs, "map": chosen, "capacity": draw.integer(2, 3)}


def _roomy(draw: Draw) -> dict[str, Any]:
    inputs = _routing(draw)
    return {**inputs, "capacity": len(inputs["map"])}


_THREE = {
    "probs": torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.7, 0.3]]), "map": torch.ones(3, 2, dtype=torch.bool),
    "capacity": 2,
}  # fmt: skip

LIMIT = Exercise(
    "limit",
    reference=limit,
    cases=[
        Case("three tokens, room for two", _THREE),
        Case("room for all", _roomy, hidden=True),
        Case("other sizes", _routing, points=2, hidden=True),
    ],
    mistakes=[
        Mistake(_first_come, "Those are the first to come. Keep the heaviest."),
        Mistake(_made_whole, "The weights of those that stay do not change: what is dropped is missing."),
        Mistake(_same_map, "`map` must say who is left: rows that are dropped do not travel."),
        Mistake(_padded, "Some expert gets tokens that did not choose it: kept means chosen *and* among the heaviest."),
        Mistake(_of_a_token, "That limits the experts of a token. The capacity limits the tokens of an *expert*: go "
                "down the columns."),
    ],
    hint="Sort each column by weight, largest first; the first C are kept, if they were chosen at all. The rest is 0.",
)  # fmt: skip
