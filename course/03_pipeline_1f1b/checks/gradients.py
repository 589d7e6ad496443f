"""Lab 03, gradients of a pipeline: a tied matrix, and which microbatches are in a sum.

Both are about sums that are easily incomplete: each of the two copies of a tied matrix has a part of its gradient, and
a broken schedule may keep one microbatch of a step. (W, which *adds* to a gradient, and later than B: `halves`.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from labkit.exercises import Answer, Case, Draw, Exercise

Inputs = list[dict[str, Any]]

# ------------------------------------------------------------------------------------------------- tied weights


def _drive_tied(exercise: Any, grad: Any) -> list[Any]:
    """Run two steps, as training does."""
    import torch as t

    grad = None if grad is None else grad.contiguous()  # as autograd keeps the gradient of a parameter
    later = None if grad is None else 3 * grad
    first = exercise.sync_tied(grad)
    first = first.clone() if isinstance(first, t.Tensor) else first
    return [first, exercise.sync_tied(later)]


def _in_two_steps(one: Callable[[Inputs], list[Any]]) -> Callable[[Inputs], list[list[Any]]]:
    return lambda ranks: [[t, None if t is None else 3 * t] for t in one(ranks)]


def _tied(ranks: Inputs) -> list[Any]:
    total = ranks[0]["grad"] + ranks[-1]["grad"]
    return [total if r["grad"] is not None else None for r in ranks]


def _on(ranks: int) -> Callable[[Draw], Inputs]:
    def inputs(draw: Draw) -> Inputs:
        shape = draw.shape(2, 2, 6)
        return [{"grad": draw.tensor(*shape) if r in (0, ranks - 1) else None} for r in range(ranks)]

    return inputs


def _nothing_else_moves(answer: Answer) -> str | None:
    bound = 2 * answer.inputs[0]["grad"].nbytes
    for rank, one in enumerate(answer.evidence):
        if answer.inputs[rank]["grad"] is None and (moved := sorted({c.name for c in one.calls})):
            return f"rank {rank} holds no copy of the matrix, yet it calls {', '.join(moved)}"
        if (sent := one.nbytes("all_reduce", "send")) > bound:
            return f"rank {rank} moves {sent} bytes; two steps of the size of the matrix is {bound}"
    return None


TIED = Exercise(
    "sync_tied",
    reference=_in_two_steps(_tied),
    drive=_drive_tied,
    changes=("grad",),  # `tied.grad = sync_tied(tied.grad)`: its caller has no other use for it
    cases=[
        Case("2 ranks: [1, 2] and [10, 20], then three times as much",
             [{"grad": torch.tensor([[1.0, 2.0]])}, {"grad": torch.tensor([[10.0, 20.0]])}]),
        Case("other tensors on 2 ranks", _on(2), hidden=True),
        Case("3 ranks: the one between has nothing to sum", _on(3), hidden=True),
        Case("4 ranks: those without a copy stay silent", _on(4), hidden=True, accept=[_nothing_else_moves]),
    ],
    errors={
        "Default process group": "There is no process group yet where the cell is imported, as in a real program.",
        "Invalid process group": "A rank between the two is in no group of theirs, and has no gradient: it must return "
        "before the sum.",
        "new_group([0, 1])": "The group is not that of the copies: they are on the first and the last rank.",
    },
    idea="Two calls are collective here, over different ranks: to create a group, and to sum in it. Who takes part in "
    "which?",
    hint="Every rank calls dist.new_group([0, p-1]), also those that are not in it: every rank creates every group. "
    "Then the first and the last rank all-reduce; the others return what they have.",
)  # fmt: skip

# --------------------------------------------------------------------------------------------- who has survived


def survivors(got: torch.Tensor, grads: list[torch.Tensor]) -> list[int]:
    """The indices i with got = sum of grads[i]."""
    columns = torch.stack([g.flatten().double() for g in grads], dim=1)
    weights = torch.linalg.lstsq(columns, got.flatten().double()[:, None]).solution[:, 0]
    return [i for i, w in enumerate(weights.tolist()) if w > 0.5]


def _some(
    chosen: Callable[[Draw, int], Sequence[int]], of: int = 0, alike: float = 0.0
) -> Callable[[Draw], dict[str, Any]]:
    """Return a draw of gradients and of the sum of some of them. The sums are exact: the fixed trials test what
    rounding does to an answer, the draws do not.

    Args:
        alike: how much of a gradient is common to all, as it is in training; then no product tells them apart.
    """

    def inputs(draw: Draw) -> dict[str, Any]:
        n, shape = of or draw.integer(3, 8), (draw.integer(5, 8), draw.integer(5, 8))
        common = alike * draw.tensor(*shape)
        grads = [((draw.tensor(*shape) + common) * 64).round() / 64 for _ in range(n)]
        picked = [grads[i] for i in chosen(draw, n)]
        return {"got": torch.stack(picked).sum(0), "grads": grads}

    return inputs


def _subset(draw: Draw, n: int) -> list[int]:
    return sorted(draw.random.sample(range(n), draw.integer(1, n - 1)))


def _these(of: int, *chosen: int, alike: float = 1.0) -> Callable[[Draw], dict[str, Any]]:
    return _some(lambda draw, n: chosen, of, alike)


def _rounded(scale: float, *chosen: int, of: int = 6) -> Callable[[Draw], dict[str, Any]]:
    """Return a draw of gradients of another size, whose sum is right up to rounding; in its first row it is near 0."""

    def inputs(draw: Draw) -> dict[str, Any]:
        grads = [draw.tensor(6, 7) + draw.tensor(6, 7).sign() / 4 for _ in range(of)]
        grads[chosen[-1]][0] = 1e-3 - torch.stack([grads[i] for i in chosen[:-1]]).sum(0)[0]
        grads = [scale * grad for grad in grads]
        total = torch.stack([grads[i].double() for i in chosen]).sum(0)  # no order of fp32 additions gives these bits
        return {"got": total.float(), "grads": grads}

    return inputs


def _one_row_apart(draw: Draw) -> dict[str, Any]:
    """Two gradients differ in their last row alone, and the second is in the sum; the first row of all of them is
    zero."""
    grads = [draw.tensor(6, 6) for _ in range(4)]
    grads[2][:-1] = grads[0][:-1]
    for grad in grads:
        grad[0] = 0
    return {"got": grads[1] + grads[2], "grads": grads}


def _nearly_the_sum(draw: Draw) -> dict[str, Any]:
    """A gradient that is not in the sum is nearer to it than either of the two that are."""
    a, b, c, d = (draw.tensor(6, 6) for _ in range(4))
    return {"got": a + b, "grads": [a, d, 0.9 * (a + b) + 0.3 * c, b]}


_BASIS = [torch.tensor(one) for one in ([1.0, 0, 0, 0], [-2.0, 1, 0, 0], [1.0, 1, 1, 0], [2.0, 1, 0, 1])]

SURVIVORS = Exercise(
    "survivors",
    reference=survivors,
    cases=[
        Case("all four of four", {"got": torch.tensor([2.0, 3.0, 1.0, 1.0]), "grads": _BASIS}),
        Case("the first and the third", {"got": torch.tensor([2.0, 1.0, 1.0, 0.0]), "grads": _BASIS}),
        Case("nothing is lost", _some(lambda draw, n: range(n)), hidden=True, fixed=[_these(5, *range(5))]),
        Case("only one is left", _some(lambda draw, n: [draw.integer(0, n - 1)]), hidden=True,
             fixed=[_these(6, 2, alike=0.0), *(_these(6, i) for i in range(6))]),
        Case("any of them; gradients may be tiny or large", _some(_subset), points=2, hidden=True, fixed=[
            _rounded(1, 0, 2, 3, 4), _rounded(1e-3, 1, 2, 3, 4), _rounded(1e-3, 0, 2, 3, 5),
            _rounded(1e3, 0, 1, 3, 4), _one_row_apart, _these(5, 1, 3), _nearly_the_sum, _these(6, 0, 2, 5),
            _these(7, 1, 2, 4, 6), _these(4, 0, 1, 3),
            _these(8, 0, 2, 3, 5, 6, 7), _these(8, 0, 1, 2, 4, 6), _these(8, 1, 2, 5, 7, alike=2.0)]),
    ],
    idea="Each microbatch is in the sum or is not: one unknown for each, and every entry of the tensor is an equation.",
    hint="got = sum of w_i grads[i] with each w_i 0 or 1, and any number of them 1. Solve for all weights together: a "
    "least-squares problem with a column for each microbatch. The weights come out right up to rounding: one of "
    "0.9999999 is a 1, one of 1e-8 a 0.",
)  # fmt: skip
