"""Lab 11, the clipped loss of a token and its gradient, with a ratio for each token or one for the answer.

`policy` has the gradient in closed form. What the mask excludes is no number, as in a row that is padded.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise

Tensor = torch.Tensor


def _drive(
    exercise: Any, log_probs: Any, old: Any, advantages: Any, mask: Any, low: float, high: float, level: str, dy: Any
) -> dict[str, Any]:
    log_probs.requires_grad_()
    loss = exercise.policy_loss(log_probs, old, advantages, mask, low, high, level)
    if loss.shape == dy.shape and loss.requires_grad:
        loss.backward(dy)
    return {"loss": loss.detach(), "gradient": log_probs.grad}


def policy(
    log_probs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, low: float, high: float, level: str, dy: Tensor
) -> dict[str, Tensor]:
    loss, grad = torch.zeros_like(log_probs), torch.zeros_like(log_probs)
    for row in range(len(log_probs)):
        drawn = [t for t in range(log_probs.shape[1]) if mask[row, t] > 0]
        moved = {t: float(log_probs[row, t]) - float(old[row, t]) for t in drawn}
        if level == "sequence":
            moved = dict.fromkeys(drawn, math.fsum(moved.values()) / max(1, len(drawn)))
        for t in drawn:
            ratio, a = math.exp(moved[t]), float(advantages[row, t])
            free = ratio <= 1 + high if a > 0 else ratio >= 1 - low
            loss[row, t] = -a * min(max(ratio, 1 - low), 1 + high) if not free else -a * ratio
            if free:
                share = -a * ratio * float(dy[row, t])
                for other in drawn if level == "sequence" else [t]:
                    grad[row, other] += share / (len(drawn) if level == "sequence" else 1)
    return {"loss": loss, "gradient": grad}


_ONES = torch.ones(1, 3)
_FIRST: dict[str, Any] = {
    "log_probs": torch.tensor([[-9.0, -1.0, -2.0]]), "old": torch.tensor([[0.0, -1.0, -2.0]]),
    "advantages": 0.5 * _ONES, "mask": torch.tensor([[0.0, 1.0, 1.0]]), "low": 0.2, "high": 0.2, "level": "token",
    "dy": _ONES,
}  # fmt: skip
_DOUBLED: dict[str, Any] = {
    **_FIRST, "log_probs": torch.tensor([[-9.0, math.log(0.5), math.log(0.5)]]),
    "old": torch.tensor([[0.0, math.log(0.25), math.log(0.5)]]),
}  # fmt: skip


def _some(draw: Draw, level: str = "", sure: float = 0.0) -> dict[str, Any]:
    """Draw answers of several lengths behind prompts, some with a gap; outside of the mask there are no numbers."""
    b, s = draw.integer(3, 5), draw.integer(6, 8)
    mask = torch.zeros(b, s)
    for row in range(b):
        first = draw.integer(1, 2)
        mask[row, first : first + draw.integer(1, s - first)] = 1
        if draw.random.random() < 0.4:
            mask[row, first + 1] = 0
    level, sign = (
        level or draw.choice(["token", "sequence"]),
        torch.tensor([[draw.choice([-1.0, 1.0])] for _ in range(b)]),
    )
    log_probs = -draw.tensor(b, s).abs() - 0.1
    old = log_probs + 0.4 * draw.tensor(b, s) + sure
    nothing = torch.tensor(draw.choice([math.nan, -math.inf]))
    return {
        "log_probs": torch.where(mask > 0, log_probs, nothing), "old": torch.where(mask > 0, old, draw.tensor(b, s)),
        "advantages": sign * (0.5 + draw.tensor(b, s).abs()), "mask": mask, "low": draw.choice([0.1, 0.2]),
        "high": draw.choice([0.15, 0.28]), "level": level, "dy": draw.tensor(b, s),
    }  # fmt: skip


POLICY = Exercise(
    "policy_loss",
    reference=policy,
    drive=_drive,
    outputs=("loss", "gradient"),
    cases=[
        Case("the first step: two tokens behind one of the prompt", _FIRST),
        Case("the first token is twice as likely as it was", _DOUBLED, fixed=[
            {**_DOUBLED, "advantages": -0.5 * _ONES}]),
        Case("the same, one ratio for the answer", {**_DOUBLED, "level": "sequence", "high": 0.5}, fixed=[
            {**_DOUBLED, "level": "sequence"}]),
        Case("other answers, a ratio for each token", lambda draw: _some(draw, "token"), points=2, hidden=True, fixed=[
            lambda draw: _some(draw, "token", 0.3), lambda draw: _some(draw, "token", -0.3),
            lambda draw: _some(draw, "token")]),
        Case("other answers, one ratio each", lambda draw: _some(draw, "sequence"), points=2, hidden=True, fixed=[
            lambda draw: _some(draw, "sequence", 0.05), lambda draw: _some(draw, "sequence", -0.05),
            lambda draw: _some(draw, "sequence")]),
    ],
    idea="First make the log-ratio 0 where nothing was drawn, then think about the ratio. A factor of 0 behind exp is "
    "too late.",
    hint="moved = (log_probs - old).masked_fill(mask == 0, 0); for sequence: its sum over the row divided by the "
    "tokens drawn, for all of them. ratio = moved.exp(); loss = -min(ratio * A, clamp(ratio, 1 - low, 1 + high) * A); "
    "at the end 0 where the mask is.",
)  # fmt: skip
