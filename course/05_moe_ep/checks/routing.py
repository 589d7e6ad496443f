"""Lab 05: the router's choice of experts.

References work in float64 on whatever was drawn. `probs` is [T, E], 0 where a token does not go to an expert; `map`
says where it goes.
"""

from __future__ import annotations

from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise

Pair = tuple[torch.Tensor, torch.Tensor]

# ------------------------------------------------------------------------------------------------------- router


def _drive_route(exercise: Any, x: Any, weight: Any, k: int, g: Any, tied: bool = False) -> dict[str, Any]:
    """Run the learner's router; with `tied` any k of the best are right, and only what they have in common is
    compared."""
    import torch

    x.requires_grad_()
    weight.requires_grad_()
    probs, chosen = exercise.route(x, weight, k)
    for name, one in (("probs", probs), ("map", chosen)):
        if isinstance(one, torch.Tensor) and one.shape != g.shape:
            t, e = g.shape
            raise ValueError(f"`{name}` has the shape {list(one.shape)}, not [T, E], here [{t}, {e}]")
    if tied:
        chosen = chosen.bool()
        scores = (x.float() @ weight.float().T).masked_fill(~chosen, float("-inf"))
        return {
            "experts of each token": chosen.sum(1).tolist(),
            "the best": scores.sort(1, descending=True).values[:, :k],
            "weights": probs.sort(1, descending=True).values,
            "weights elsewhere": probs.masked_fill(chosen, 0).sum(),
        }
    if probs.requires_grad:
        (probs * g).sum().backward()
    found = {"probs": probs.detach(), "map": chosen}
    for name, given in (("x's gradient", x), ("weight's gradient", weight)):
        if given.dtype == g.dtype:
            found[name] = torch.zeros_like(given) if given.grad is None else given.grad
    return found


def top(scores: torch.Tensor, k: int) -> torch.Tensor:
    """The k largest of each row, as [T, E] bool."""
    return torch.zeros_like(scores, dtype=torch.bool).scatter(1, scores.topk(k, -1).indices, True)


def weights(logits: torch.Tensor, k: int) -> Pair:
    chosen = top(logits, k)
    return logits.masked_fill(~chosen, -torch.inf).softmax(-1), chosen


def route(x: torch.Tensor, weight: torch.Tensor, k: int, g: torch.Tensor, tied: bool = False) -> dict[str, Any]:
    a, w = (t.double().detach().requires_grad_() for t in (x, weight))
    logits = a @ w.T
    probs, chosen = weights(logits, k)
    probs = probs.float()
    if tied:
        best = logits.masked_fill(~chosen, -torch.inf).sort(1, descending=True).values[:, :k]
        return {"experts of each token": chosen.sum(1).tolist(), "the best": best.float(),
                "weights": probs.sort(1, descending=True).values, "weights elsewhere": 0.0}  # fmt: skip
    of_x, of_weight = torch.autograd.grad((probs * g).sum(), (a, w))
    found = {"probs": probs.detach(), "map": chosen}
    for name, given, grad in (("x's gradient", x, of_x), ("weight's gradient", weight, of_weight)):
        if given.dtype == g.dtype:
            found[name] = grad.to(given.dtype)
    return found


def clear(scores: torch.Tensor, k: int, gap: float = 1e-3) -> torch.Tensor:
    """As [T] bool, the tokens whose choice of k experts does not depend on the rounding of a sum."""
    best = scores.double().sort(-1, descending=True).values
    return (best[:, k - 1] - best[:, k] > gap) if k < best.shape[1] else torch.ones(len(best), dtype=torch.bool)


def _clear_tokens(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same inputs without the tokens whose choice is not clear: about one in a thousand."""
    x, weight, k = inputs["x"], inputs["weight"], inputs["k"]
    kept = clear(x.double() @ weight.double().T, k)
    return {**inputs, "x": x[kept], "g": inputs["g"][kept]}


def _tokens(draw: Draw, k: int = 0, experts: int = 0) -> dict[str, Any]:
    t, h, e = draw.integer(6, 12), draw.integer(4, 9), experts or draw.integer(4, 8)
    x, weight, g = draw.tensor(t, h), draw.tensor(e, h), draw.tensor(t, e)
    return _clear_tokens({"x": x, "weight": weight, "k": k or draw.integer(2, 3), "g": g})


def _large_logits(draw: Draw) -> dict[str, Any]:
    """Draw logits of about 200 with differences of about 1, and of about -200 for every second token. No gradients are
    compared: 200 times the rounding of a weight is more than the gradient that remains."""
    inputs = _tokens(draw)
    inputs["x"][:, 0], inputs["weight"][:, 0] = 1.0, 200.0
    inputs["x"][1::2, 0] = -1.0
    return _clear_tokens({**inputs, "g": inputs["g"].double()})


def _half(draw: Draw, x: torch.dtype = torch.bfloat16, weight: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """Draw inputs in 16 bits: of many tokens 200 whose choice is clear in fp32, and for some of them is not in bf16."""
    given = {"x": draw.tensor(400, 64).bfloat16().to(x), "weight": draw.tensor(8, 64).bfloat16().to(weight),
             "g": draw.tensor(400, 8), "k": 2}  # fmt: skip
    found = _clear_tokens(given)
    half = found["x"].bfloat16() @ found["weight"].bfloat16().T
    moved = (top(half.float(), 2) != top(found["x"].float() @ found["weight"].float().T, 2)).any(1)
    order = moved.int().argsort(descending=True, stable=True)[:200]
    return {**found, "x": found["x"][order], "g": found["g"][order]}


def _tied(draw: Draw) -> dict[str, Any]:
    """Draw whole numbers with each expert twice, as in a model that grows by copies of its experts."""
    t, h, e = 6, 3, 3
    x = torch.tensor([[draw.integer(-3, 3) for _ in range(h)] for _ in range(t)], dtype=torch.float32)
    weight = torch.tensor([[draw.integer(-3, 3) for _ in range(h)] for _ in range(e)], dtype=torch.float32)
    return {"x": x, "weight": weight.repeat(2, 1), "k": 3, "g": draw.tensor(t, 2 * e), "tied": True}


_NEW_ROUTER = {
    "x": torch.ones(3, 2), "weight": torch.zeros(5, 2), "k": 2, "g": torch.ones(3, 5), "tied": True,
}  # fmt: skip

_TWO = {
    "x": torch.tensor([[1.0, 0.0], [0.0, 1.0]]), "weight": torch.tensor([[0.0, 1.0], [1.0, 0.0], [2.0, -1.0]]), "k": 2,
    "g": torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]),
}  # fmt: skip

# A softmax of logits more than 104 apart holds zeros in fp32; no choice among the zeros is right for all three tokens.
_FAR_APART = {
    "x": torch.eye(3), "weight": torch.tensor([[300.0, 0.0, 100.0], [100.0, 300.0, 0.0], [0.0, 100.0, 300.0]]),
    "k": 2, "g": torch.ones(3, 3),
}  # fmt: skip

ROUTE = Exercise(
    "route",
    reference=route,
    drive=_drive_route,
    rtol=1e-3,
    cases=[
        Case("two tokens, three experts", _TWO),
        Case("other sizes", _tokens, hidden=True, draws=3, fixed=[
            lambda draw: _tokens(draw, 1), lambda draw: _tokens(draw, 5, 7), lambda draw: _tokens(draw, 4, 4),
            _tied, _NEW_ROUTER]),
        Case("logits in the hundreds", _large_logits, hidden=True, fixed=[_large_logits, _FAR_APART]),
        Case("tokens and weights in bf16", _half, points=2, hidden=True, fixed=[
            _half, lambda draw: _half(draw, weight=torch.float32), lambda draw: _half(draw, x=torch.float32)]),
    ],
    errors={
        "not [T, E]": "There is a column for each expert, also for those that are not chosen: their weight is 0.",
    },
    idea="Four steps: the product in fp32, the k largest, their softmax, and a place for each in a table of zeros.",
    hint="logits = x.float() @ weight.float().T; the k largest of each row; softmax over those; scatter into zeros.",
)  # fmt: skip
