"""Lab 03, a tied matrix: each of its two copies, on the first and the last rank, has a part of its gradient."""

from __future__ import annotations

from collections.abc import Callable
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
            return f"rank {rank} moves {sent} bytes in two steps; the matrix has {bound // 2}; once a step is enough"
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
