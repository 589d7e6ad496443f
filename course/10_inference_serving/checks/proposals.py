"""Lab 10, proposed tokens: which are accepted, and what is drawn in place of the first that is not."""

from __future__ import annotations

from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise

Tensor = torch.Tensor


def _draw(weights: Tensor, number: float) -> int:
    mass = weights.cumsum(0)
    return int((mass <= number * mass[-1]).sum())


def verify(p: Tensor, q: Tensor, proposed: list[int], u: list[float], v: list[float]) -> list[int]:
    k = len(proposed)
    accepted = next((i for i, token in enumerate(proposed) if u[i] * float(q[i, token]) >= float(p[i, token])), k)
    weights = p[k] if accepted == k else (p[accepted] - q[accepted]).clamp(min=0)
    return [*proposed[:accepted], _draw(weights, v[accepted])]


def _apart(shares: Tensor) -> Tensor:
    """Shares that add up to 1, in fp64."""
    return shares.double() / shares.double().sum(-1, keepdim=True)


def _some(draw: Draw, k: int | None = None, near: float = 0.6, size: int = 6) -> dict[str, Any]:
    k = draw.integer(2, 4) if k is None else k
    p = _apart(draw.tensor(k + 1, size).exp())
    q = _apart(p[:k] * (near * draw.tensor(k, size)).exp())
    proposed = [draw.random.choices(range(size), q[i].tolist())[0] for i in range(k)]
    u, v = ([draw.random.random() for _ in range(n)] for n in (k, k + 1))
    return {"p": p, "q": q, "proposed": proposed, "u": u, "v": v}


def _refused(draw: Draw, at: int) -> dict[str, Any]:
    """All before place `at` are accepted, and the one there is not: the model cannot say it."""
    inputs = _some(draw, k=3)
    inputs["u"] = [0.0, 0.0, 0.0]
    p = inputs["p"].clone()
    p[at, inputs["proposed"][at]] = 0.0
    return {**inputs, "p": _apart(p)}


def _same_shares(draw: Draw) -> dict[str, Any]:
    """p = q: all are accepted, however large u is."""
    inputs = _some(draw, k=3)
    return {**inputs, "q": inputs["p"][:3].clone(), "u": [0.999, 0.9, 0.99]}


_P = torch.tensor([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25], [0.125, 0.375, 0.5]], dtype=torch.float64)
_Q = torch.tensor([[0.5, 0.5, 0.0], [0.75, 0.25, 0.0]], dtype=torch.float64)
_EXAMPLE = {"p": _P, "q": _Q, "proposed": [0, 0], "u": [0.9, 0.6], "v": [0.1, 0.4, 0.7]}
_ALL = {"p": _P, "q": _Q, "proposed": [0, 1], "u": [0.9, 0.6], "v": [0.1, 0.4, 0.7]}
_HALVES = {  # each is accepted with the chance 1/2, the second whatever became of the first
    "p": torch.tensor([[0.25, 0.75], [0.25, 0.75], [0.5, 0.5]], dtype=torch.float64),
    "q": torch.full((2, 2), 0.5, dtype=torch.float64), "proposed": [0, 0], "u": [0.4, 0.4], "v": [0.5, 0.5, 0.3],
}  # fmt: skip
_APART = {  # the second is rejected; every number but v[1] would draw another token in its place
    "p": _apart(torch.tensor([[4.0, 4, 4, 4, 4], [1, 3, 4, 5, 7], [4, 4, 4, 4, 4]])),
    "q": _apart(torch.tensor([[8.0, 8, 8, 8, 8], [34, 2, 2, 1, 1]])),
    "proposed": [2, 0], "u": [0.05, 0.5], "v": [0.2, 0.1, 0.9],
}  # fmt: skip


VERIFY = Exercise(
    "verify",
    reference=verify,
    cases=[
        Case("the example: the second proposal is rejected", _EXAMPLE),
        Case("both are accepted", _ALL),
        Case("other proposals", _some, points=2, hidden=True, draws=12, fixed=[
            _HALVES, _APART,
            lambda draw: _refused(draw, 0), lambda draw: _refused(draw, 1), lambda draw: _refused(draw, 2),
            lambda draw: _some(draw, k=1), lambda draw: _some(draw, k=4, near=2.0), lambda draw: _some(draw, k=0),
            {"p": _P, "q": _Q, "proposed": [1, 1], "u": [0.55, 0.1], "v": [0.5, 0.2, 0.3]}]),
        Case("a proposer that is as good as the model", _same_shares, hidden=True),
    ],
    errors={"IndexError": "There is one row of p more than proposals; q, proposed and u have one for each."},
    idea="One place after the other; at the first rejection the answer ends with one token of the model's own.",
    hint="For each i: accept if u[i] * q[i, token] < p[i, token]; else return what you have and draw((p[i] - q[i])"
    ".clamp(min=0), v[i]). At the end: draw(p[k], v[k]).",
)  # fmt: skip
