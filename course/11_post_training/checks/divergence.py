"""Lab 11, three estimates of a divergence: what each is on average, and where its gradient leads on average.

The reference draws every token as often as the policy would, and lets autograd differentiate each estimate alone.
"""

from __future__ import annotations

from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise

Tensor = torch.Tensor
NAMES = ("k1", "k2", "k3")


def kl_estimates(policy: Tensor, reference: Tensor) -> dict[str, list[Tensor]]:
    chances, found = policy.double().softmax(0), {}
    for name in NAMES:
        value, slope = torch.zeros((), dtype=torch.float64), torch.zeros(len(policy), dtype=torch.float64)
        for token, chance in enumerate(chances):
            z = policy.double().requires_grad_()
            d = reference.double().log_softmax(0)[token] - z.log_softmax(0)[token]
            estimate = {"k1": -d, "k2": d.square() / 2, "k3": d.exp() - d - 1}[name]
            (grad,) = torch.autograd.grad(estimate, z)
            value, slope = value + chance * estimate.detach(), slope + chance * grad
        found[name] = [value.to(policy.dtype), (slope.round(decimals=12) + 0.0).to(policy.dtype)]  # 0 is 0
    return found


def _case(policy: list[float], reference: list[float]) -> dict[str, Any]:
    return {"policy": torch.tensor(policy).log(), "reference": torch.tensor(reference).log()}


def _some(draw: Draw) -> dict[str, Any]:
    v = draw.integer(3, 7)
    return {"policy": draw.tensor(v), "reference": draw.tensor(v)}


KL = Exercise(
    "kl_estimates",
    reference=kl_estimates,
    cases=[
        Case("the example: 1/2, 1/2 beside 1/4, 3/4", _case([0.5, 0.5], [0.25, 0.75])),
        Case("three tokens", _case([0.5, 0.25, 0.25], [0.25, 0.25, 0.5])),
        Case("logits that are not normalised", _some, points=3, hidden=True, fixed=[
            lambda draw: {"policy": draw.tensor(4), "reference": torch.zeros(4)},
            lambda draw: {"policy": 3 + draw.tensor(5), "reference": draw.tensor(5) - 2}]),
    ],
    idea="The draw is over when the loss is computed: differentiate the estimate of one token, then take the mean over "
    "the draws.",
    hint="p = softmax(policy), d = log ref - log p. The gradient of log p(x) in the logits is onehot(x) - p. "
    "Each estimate is a function of d: multiply its slope, -d(estimate)/dd, by that gradient and by p(x); sum over x.",
)  # fmt: skip
