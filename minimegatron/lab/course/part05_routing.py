"""Lab 05, the first half: who goes where, how the load is evened out, and what a capacity drops.

References work in float64 on whatever was drawn. `probs` is [T, E], 0 where a token does not go; `map` says where it
goes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minimegatron.lab.exercises import Case, Draw, Exercise, Mistake

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

# ------------------------------------------------------------------------------------------------ balancing loss


def _drive_balance(exercise: Any, logits: Any, k: int, coeff: float) -> dict[str, Any]:
    import torch

    with torch.inference_mode():
        loss, grad = exercise.balance(logits.clone(), k, coeff)
    return {"loss": loss, "gradient": grad}


def _loss(logits: torch.Tensor, k: int, coeff: float) -> torch.Tensor:
    """The definition."""
    t, e = logits.shape
    paid = logits.softmax(-1).sum(0) * top(logits.detach(), k).sum(0)
    return coeff * e / (k * t * t) * paid.sum()


def balance(logits: torch.Tensor, k: int, coeff: float) -> dict[str, Any]:
    """Autograd on the definition, in float64."""
    x = logits.double().requires_grad_()
    loss = _loss(x, k, coeff)
    (grad,) = torch.autograd.grad(loss, x)
    return {"loss": loss.item(), "gradient": grad.to(logits.dtype)}


def _by_hand(logits: torch.Tensor, k: int, coeff: float, *, jacobian: str = "full") -> dict[str, Any]:
    right = balance(logits, k, coeff)
    t, e = logits.shape
    p, price = logits.double().softmax(-1), coeff * e / (k * t * t) * top(logits, k).sum(0).double()
    grads = {"none": price.expand(t, e), "half": p * price}
    return {**right, "gradient": grads[jacobian].to(logits.dtype)}


def _soft(logits: torch.Tensor, k: int, coeff: float) -> dict[str, Any]:
    """Counts taken from the probabilities, which then have a gradient too."""
    x = logits.double().requires_grad_()
    t, e = logits.shape
    mean = x.softmax(-1).mean(0)
    loss = coeff * e * (mean * mean).sum()
    (grad,) = torch.autograd.grad(loss, x)
    return {"loss": loss.item(), "gradient": grad.to(logits.dtype)}


def _times(factor: Callable[[int, int, int], float]) -> Callable[..., dict[str, Any]]:
    def answer(logits: torch.Tensor, k: int, coeff: float) -> dict[str, Any]:
        tokens, experts = logits.shape
        return balance(logits, k, coeff * factor(tokens, experts, k))

    return answer


def _some_logits(draw: Draw) -> dict[str, Any]:
    e = draw.integer(3, 9)
    return {"logits": 2 * draw.tensor(draw.integer(4, 20), e), "k": draw.integer(2, e - 1), "coeff": 0.5}


def _skewed(draw: Draw) -> dict[str, Any]:
    inputs = _some_logits(draw)
    inputs["logits"][:, 0] += 6
    return inputs


BALANCE = Exercise(
    "balance",
    reference=balance,
    drive=_drive_balance,
    rtol=1e-3,
    atol=1e-6,
    cases=[
        Case("two tokens, two experts, both to the first",
             {"logits": torch.tensor([[1.0, 0.0], [2.0, 0.0]]), "k": 1, "coeff": 1.0}),
        Case("other sizes", _some_logits, points=2, hidden=True),
        Case("a favourite expert", _skewed, hidden=True),
    ],
    mistakes=[
        Mistake(lambda **i: _by_hand(**i, jacobian="none"), "That is the gradient of p. The logits are behind a "
                "softmax: dlogits = p (dp - sum over experts of p dp)."),
        Mistake(lambda **i: _by_hand(**i, jacobian="half"), "The softmax's gradient has two terms: p dp, and minus p "
                "times the sum over experts of p dp."),
        Mistake(_soft, "n_e counts tokens, k for each. It is a number without a gradient, not a sum of probabilities."),
        Mistake(_times(lambda t, e, k: t), "Both the sum of p and n_e grow with the tokens: divide by T^2."),
        Mistake(_times(lambda t, e, k: 1 / e), "The factor is E / (k T^2): at an even load the loss is coeff, whatever "
                "E is."),
        Mistake(_times(lambda t, e, k: k), "The factor is E / (k T^2): every token counts for k experts."),
    ],
    hint="p = softmax(logits); n = how often each expert is among the k largest; price = coeff E / (k T^2) n. "
    "loss = sum(p * price); dlogits = p * (price - (p * price).sum(-1, keepdim=True)).",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------- expert bias


def _drive_bias(exercise: Any, scores: Any, bias: Any, k: int, counts: Any, rate: float) -> dict[str, Any]:
    probs, chosen = exercise.choose(scores, bias.clone(), k)
    return {"probs": probs, "map": chosen, "bias": exercise.move_bias(bias.clone(), counts, rate)}


def _biased(
    scores: torch.Tensor, bias: torch.Tensor, k: int, counts: torch.Tensor, rate: float, *, seen: str = "choice",
    how: str = "sign",
) -> dict[str, torch.Tensor]:  # fmt: skip
    """`seen`: where the bias enters. `how`: the way in which it moves."""
    s, b = scores.double(), bias.double()
    chosen = top(s if seen == "nowhere" else s + b, k)
    kept = (s + b if seen == "both" else s) * chosen
    gap = counts.double().mean() - counts.double()
    move = {"sign": gap.sign(), "down": -gap.sign(), "gap": gap, "share": gap / counts.sum()}[how]
    return {"probs": (kept / kept.sum(-1, keepdim=True)).float(), "map": chosen, "bias": (b + rate * move).float()}


def _some_scores(draw: Draw) -> dict[str, Any]:
    e = draw.integer(4, 8)
    counts = torch.tensor([draw.integer(0, 40) for _ in range(e)])
    counts[0], counts[1] = 50, 0  # never even
    return {
        "scores": draw.tensor(draw.integer(5, 12), e).sigmoid(), "bias": 0.5 * draw.tensor(e),
        "k": draw.integer(2, 3), "counts": counts, "rate": 0.01 * draw.integer(1, 9),
    }  # fmt: skip


_SCORES = {
    "scores": torch.tensor([[0.5, 0.25, 0.125], [0.5, 0.375, 0.25]]), "bias": torch.tensor([-0.5, 0.0, 0.25]), "k": 2,
    "counts": torch.tensor([2, 0, 1]), "rate": 0.5,
}  # fmt: skip

_BIAS_MISTAKES = [
    ({"seen": "both"}, "The bias has a say in who is chosen, not in what it counts: the weights are the *scores* of "
     "the chosen, over their sum."),
    ({"seen": "nowhere"}, "The choice is by score plus bias."),
    ({"how": "down"}, "An expert with fewer tokens than the mean needs a *larger* bias."),
    ({"how": "gap"}, "The bias moves by the rate, up or down: the sign of the gap, not the gap."),
    ({"how": "share"}, "The bias moves by the rate, up or down: the sign of the gap, not the gap."),
]  # fmt: skip


def _bias_mistake(how: dict[str, Any]) -> Callable[..., Any]:
    return lambda **inputs: _biased(**inputs, **how)


BIAS = Exercise(
    "expert_bias",
    reference=_biased,
    drive=_drive_bias,
    rtol=1e-3,
    cases=[
        Case("two tokens, three experts", _SCORES),
        Case("other sizes", _some_scores, points=3, hidden=True),
    ],
    mistakes=[Mistake(_bias_mistake(how), hint) for how, hint in _BIAS_MISTAKES],
    hint="choose: the k largest of scores + bias; weights = scores of those over their sum. "
    "move_bias: bias + rate * sign(mean of counts - counts).",
)

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
