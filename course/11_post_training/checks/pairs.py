"""Lab 11, DPO: the loss of a pair from logits, and its gradient with respect to them.

The reference takes autograd in float64; margins are large enough in some trials that a sigmoid rounds to 0.
"""

from __future__ import annotations

from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise

Tensor = torch.Tensor
NOT = -100  # the label of a token that does not count


def dpo(logits: Tensor, labels: Tensor, reference: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    z = logits.double().requires_grad_()
    answers = []
    for row in range(2):
        places = [t for t, label in enumerate(labels[row].tolist()) if label != NOT]
        taken = [z[row, t, labels[row, t]] - torch.logsumexp(z[row, t], 0) - reference[row, t].double() for t in places]
        answers.append(torch.stack(taken).sum())
    loss = torch.logaddexp(torch.zeros((), dtype=torch.float64), -beta * (answers[0] - answers[1]))
    (grad,) = torch.autograd.grad(loss, z)
    return loss.detach().to(logits.dtype), grad.to(logits.dtype)


def _case(logits: Any, labels: Any, reference: Any, beta: float) -> dict[str, Any]:
    return {"logits": torch.tensor(logits), "labels": torch.tensor(labels), "reference": torch.tensor(reference),
            "beta": beta}  # fmt: skip


_HALF = -0.6931472
_FIRST = _case([[[0.0, 0.0]], [[0.0, 0.0]]], [[0], [1]], [[_HALF], [_HALF]], 1.0)
_TWO = _case(
    [[[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]],
    [[NOT, 0, 1], [NOT, 1, NOT]],
    [[0.0, _HALF, 2 * _HALF], [0.0, _HALF, float("-inf")]], 1.0,
)  # fmt: skip


def _some(draw: Draw, beta: float = 0.0, far: float = 1.0) -> dict[str, Any]:
    """Prompts and padding do not count; a reference has no number of its own there."""
    s, v = draw.integer(5, 8), draw.integer(3, 6)
    labels, reference = torch.full((2, s), NOT), torch.full((2, s), float("-inf"))
    prompt = draw.integer(1, 2)
    for row, n in enumerate(draw.random.sample(range(1, s - prompt + 1), 2)):
        labels[row, prompt : prompt + n] = torch.tensor([draw.integer(0, v - 1) for _ in range(n)])
        reference[row, prompt : prompt + n] = -1.5 + 0.3 * draw.tensor(n)
    return {"logits": far * draw.tensor(2, s, v), "labels": labels, "reference": reference,
            "beta": beta or draw.choice([0.1, 0.5, 2.0])}  # fmt: skip


def _far(sign: float) -> dict[str, Any]:
    """A margin of +-300: the chosen answer is that much more, or less, likely than the reference says."""
    return _case([[[0.0, sign * 150.0]], [[0.0, -sign * 150.0]]], [[1], [1]], [[_HALF], [_HALF]], 2.0)


DPO = Exercise(
    "dpo",
    reference=dpo,
    outputs=("the loss", "the gradient"),
    cases=[
        Case("the example: one token each, at the first step", _FIRST),
        Case("two tokens and one, behind a prompt", _TWO),
        Case("other pairs", _some, points=2, hidden=True, fixed=[
            lambda draw: _some(draw, 0.1), lambda draw: _some(draw, 2.0), lambda draw: _some(draw, 0.5, 3.0)]),
        Case("pairs that are very sure of themselves", lambda draw: _some(draw, 2.0, 6.0), hidden=True, fixed=[
            _far(1.0), _far(-1.0)]),
    ],
    errors=dict.fromkeys(
        ("out of bounds", "must be non-negative"),
        "The label -100 marks a token that does not count: it is no column of the logits.",
    ),
    idea="The chain: loss to margin, margin to each answer's sum, sum to each token's log-probability, and that to its "
    "logits.",
    hint="d = (log p of the label - reference) where the label counts, else 0; margin = beta * (sum of d[0] - sum of "
    "d[1]); loss = -logsigmoid(margin). With w = beta * sigmoid(-margin) the gradient is -w * (onehot - p) in row 0, "
    "+w * (onehot - p) in row 1, and 0 where the label is -100.",
)  # fmt: skip
