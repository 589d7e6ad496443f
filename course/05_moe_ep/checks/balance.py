"""Lab 05: two ways to an even load, a loss on the router and a bias beside it.

References work in float64 on whatever was drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise

from .routing import clear, top

# ------------------------------------------------------------------------------------------------ balancing loss


def _drive_balance(exercise: Any, logits: Any, k: int, coeff: float, tied: bool = False) -> dict[str, Any]:
    """Run the learner's loss; with `tied` all logits are equal, and the gradient depends on which experts count; its
    sum over a token is 0 in any case."""
    import torch

    with torch.inference_mode():
        loss, grad = exercise.balance(logits, k, coeff)
    if tied and isinstance(grad, torch.Tensor) and grad.ndim == 2:
        return {"loss": loss, "the gradient's sum over each token": grad.sum(-1)}
    return {"loss": loss, "gradient": grad}


def balance(logits: torch.Tensor, k: int, coeff: float, tied: bool = False) -> dict[str, Any]:
    """The loss and its gradient, by autograd on the definition, in float64."""
    (t, e), x = logits.shape, logits.double().requires_grad_()
    loss = coeff * e / (k * t * t) * (x.softmax(-1).sum(0) * top(logits, k).sum(0)).sum()
    (grad,) = torch.autograd.grad(loss, x)
    grad = grad.to(logits.dtype)
    if tied:
        return {"loss": loss.item(), "the gradient's sum over each token": grad.sum(-1)}
    return {"loss": loss.item(), "gradient": grad}


def _some_logits(draw: Draw) -> dict[str, Any]:
    e = draw.integer(3, 9)
    return {"logits": 2 * draw.tensor(draw.integer(4, 20), e), "k": draw.integer(2, e - 1),
            "coeff": 0.25 * draw.integer(1, 9)}  # fmt: skip


def _skewed(draw: Draw) -> dict[str, Any]:
    inputs = _some_logits(draw)
    inputs["logits"][:, 0] += 6
    return inputs


def _with_logits(experts: int, k: int, coeff: float, shift: float = 0.0) -> Callable[[Draw], dict[str, Any]]:
    """Return a draw with a favourite expert, and one that is never chosen, the last."""

    def inputs(draw: Draw) -> dict[str, Any]:
        logits = 2 * draw.tensor(11, experts)
        logits[:, 0] += 3
        logits[:, -1] -= 20
        logits[::2] += shift
        return {"logits": logits, "k": k, "coeff": coeff}

    return inputs


def _in_double(draw: Draw) -> dict[str, Any]:
    inputs = _some_logits(draw)
    return {**inputs, "logits": inputs["logits"].double()}


_NEW_ROUTER = {"logits": torch.zeros(4, 8), "k": 2, "coeff": 0.5, "tied": True}


BALANCE = Exercise(
    "balance",
    reference=balance,
    drive=_drive_balance,
    rtol=1e-3,
    atol=1e-6,
    cases=[
        Case("the text's two tokens that both prefer expert 0",
             {"logits": torch.tensor([[0.8, 0.2], [0.8, 0.2]]).log(), "k": 1, "coeff": 1.0}),
        Case("two tokens, four experts, k = 3",
             {"logits": torch.tensor([[1.0, 0.0, -1.0, 0.5], [2.0, 0.0, 0.5, -1.0]]), "k": 3, "coeff": 0.5}),
        Case("other sizes", _some_logits, hidden=True, draws=3, fixed=[
            _with_logits(5, 1, 0.01), _with_logits(8, 5, 3.0), _with_logits(6, 3, 1.0, 200.0), _in_double]),
        Case("a favourite expert; a new router, whose logits are all 0", _skewed, hidden=True, fixed=[_NEW_ROUTER]),
    ],
    errors={
        "does not require grad": "There is no autograd here: write the formula of the gradient.",
        "Inference tensors": "There is no autograd here: write the formula of the gradient.",
    },
    idea="Write the loss as a sum over tokens of what each of them pays, and ask what one logit changes of it.",
    hint="p = softmax(logits); n = how often each expert is among the k largest; price = coeff E / (k T^2) n. "
    "loss = sum(p * price); dlogits = p * (price - (p * price).sum(-1, keepdim=True)).",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------- expert bias


def _drive_bias(
    exercise: Any, scores: Any, bias: Any, k: int, counts: Any, rate: float, tied: bool = False
) -> dict[str, Any]:
    """Run the learner's router with a bias; with `tied` any k of the best are right, and only what they have in common
    is compared. The gradient is taken in a call of its own, on copies, so that a change of the inputs is reported as
    such."""
    leaf, copy = scores.clone().requires_grad_(), bias.clone()
    probs, chosen = exercise.choose(scores, bias, k)
    found = {"probs": probs, "map": chosen}
    if tied:
        found = {"experts of each token": chosen.sum(1).tolist(), "weights": probs.sort(1, descending=True).values}
    else:
        again, _ = exercise.choose(leaf * 1, copy, k)
        if again.requires_grad:
            (again * (1 + again.detach())).sum().backward()
        found["gradient of scores"] = leaf.detach() * 0 if leaf.grad is None else leaf.grad
    return {**found, "bias": exercise.move_bias(bias, counts, rate)}


def _biased(
    scores: torch.Tensor, bias: torch.Tensor, k: int, counts: torch.Tensor, rate: float, tied: bool = False
) -> dict[str, Any]:  # fmt: skip
    s, b = scores.double().requires_grad_(), bias.double()
    chosen = top(scores.double() + b, k)
    probs = (s * chosen / (s * chosen).sum(-1, keepdim=True)).float()
    (grad,) = torch.autograd.grad((probs * (1 + probs.detach())).sum(), s)
    moved = (b + rate * (counts.double().mean() - counts).sign()).float()
    if tied:
        weights = probs.detach().sort(1, descending=True).values
        return {"experts of each token": chosen.sum(1).tolist(), "weights": weights, "bias": moved}
    return {"probs": probs.detach(), "map": chosen, "gradient of scores": grad.float(), "bias": moved}


def _some_scores(draw: Draw) -> dict[str, Any]:
    e = draw.integer(4, 8)
    counts = torch.tensor([draw.integer(0, 40) for _ in range(e)])
    counts[0], counts[1] = 50, 0  # never even
    k, scores, bias = draw.integer(2, 3), draw.tensor(draw.integer(8, 14), e).sigmoid(), 0.5 * draw.tensor(e)
    scores = scores[clear(scores.double() + bias.double(), k)]
    return {"scores": scores, "bias": bias, "k": k, "counts": counts, "rate": 0.01 * draw.integer(1, 9)}


def _of_k(k: int, experts: int, scale: float = 1.0) -> Callable[[Draw], dict[str, Any]]:
    """Return a draw of counts whose median, middle and mean differ; of 6 experts the mean is 26.33."""

    def inputs(draw: Draw) -> dict[str, Any]:
        bias = 0.5 * draw.tensor(experts)
        scores = scale * draw.tensor(9, experts).sigmoid()
        counts = torch.tensor([0, 13, 26, 15, 16, 88, 12, 17, 2][:experts])
        return {"scores": scores[clear(scores.double() + bias.double(), k)], "bias": bias, "k": k, "counts": counts,
                "rate": 0.25}  # fmt: skip

    return inputs


_SATURATED = {
    "scores": torch.tensor([[1.0, 1.0, 1.0, 1.0], [0.5, 0.5, 0.25, 0.5]]), "bias": torch.zeros(4), "k": 2,
    "counts": torch.tensor([3, 1, 0, 0]), "rate": 0.5, "tied": True,
}  # fmt: skip


# The counts: the mean is 2, the median 0; expert 2 has the mean.
_SCORES = {
    "scores": torch.tensor([[0.5, 0.25, 0.125, 0.0625], [0.5, 0.375, 0.25, 0.0625]]),
    "bias": torch.tensor([-0.5, 0.0, 0.25, 0.0]), "k": 2, "counts": torch.tensor([6, 0, 2, 0]), "rate": 0.5,
}  # fmt: skip


BIAS = Exercise(
    "expert_bias",
    reference=_biased,
    drive=_drive_bias,
    rtol=1e-3,
    cases=[
        Case("two tokens, four experts", _SCORES),
        Case("other sizes", _some_scores, points=3, hidden=True, draws=3, fixed=[
            _of_k(1, 6), _of_k(3, 7), _of_k(5, 9), _of_k(4, 8, 1e-3), _SATURATED]),
    ],
    idea="The bias decides who is chosen, the scores what each of the chosen weighs. In a step a bias moves by the "
    "rate, up or down, or not at all.",
    hint="choose: the k largest of scores + bias; weights = scores of those over their sum. "
    "move_bias: bias + rate * sign(mean of counts - counts).",
)  # fmt: skip
