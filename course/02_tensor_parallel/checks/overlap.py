"""Lab 02, the backward pass of a column layer: dx travels while dW is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from labkit.checks import at_most, count, only
from labkit.compare import ANYTHING
from labkit.exercises import Answer, Case, Draw, Exercise, Mistake

from .linear import Inputs, by_hand, column, in_whole_numbers, local_linear


def _drive_overlap(exercise: Any, dy: Any, x: Any, weight: Any, watch: bool, tp: Any) -> dict[str, Any]:
    """Run the learner's backward pass; with `watch` each product of dy and x is numbered, and the answer says which of
    them dW consists of.

    A product is known by its memory, whatever its form: `bmm` and a sum, or many outer products. A product that does
    not end up in dW does not count.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    made_of: dict[int, set[Any]] = {}
    alive: list[Any] = []  # all tensors, so that no address is used twice
    products: list[int] = []

    def memory(tensor: Any) -> int:
        alive.append(tensor)
        return int(getattr(tensor, "elem", tensor).untyped_storage()._cdata)  # `elem`: of one that waits by itself

    def tensors(values: Any) -> list[Any]:
        nested = [tensors(value) if isinstance(value, list | tuple) else [value] for value in values]
        return [one for some in nested for one in some if isinstance(one, torch.Tensor)]

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            parts = [made_of.get(memory(one), set()) for one in tensors([*args, *(kwargs or {}).values()])]
            union = set().union(*parts)
            if any("x" in a and "dy" in b and not {"x", "dy"} <= a & b for a in parts for b in parts):
                products.append(len(products))
                mark(f"product {products[-1]}")  # type: ignore[name-defined]  # noqa: F821
                union.add(products[-1])
            out = func(*args, **(kwargs or {}))
            written = [
                value
                for argument, value in zip(func._schema.arguments, args, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            for one in tensors([out, *written]):
                made_of[memory(one)] = made_of.get(memory(one), set()) | union
            return out

    if not watch:
        dx, dw = exercise.column_backward(dy, x, weight, tp)
        return {"dx": dx, "dw": dw}
    made_of[memory(dy)], made_of[memory(x)] = {"dy"}, {"x"}
    with Watch():
        dx, dw = exercise.column_backward(dy, x, weight, tp)
        dx.clone()  # waits for one that waits by itself
    return {"products of dw": [number for number in products if number in made_of.get(memory(dw), ())]}


def _gradients(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    return [{"dx": p["dx"], "dw": p["dw"]} for p in column([{**r, "bias": None} for r in ranks])]


def _own_gradients(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    parts = [local_linear({**r, "bias": None}) for r in ranks]
    return [{"dx": p["dx"], "dw": p["dw"]} for p in parts]


def _everything_summed(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    right = _gradients(ranks)
    total = torch.stack([one["dw"] for one in right]).sum(0)
    return [{"dx": one["dx"], "dw": total} for one in right]


def _rows_that_do_not_meet(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    """A mistaken answer: rows of dy are ordered by sequence, those of x by token."""
    pairs = [r["dy"].transpose(0, 1).flatten(0, 1).t() @ r["x"].flatten(0, 1) for r in ranks]
    return [{**one, "dw": dw} for one, dw in zip(_gradients(ranks), pairs, strict=True)]


def _backward_inputs(watch: bool = False, t: int = 2) -> Callable[[Draw], Inputs]:
    def inputs(draw: Draw) -> Inputs:
        s, b, i, o = draw.shape(4, 2, 9)
        x = draw.tensor(s, b, i)
        own = [(draw.tensor(s, b, o), draw.tensor(o, i)) for _ in range(t)]
        return [{"dy": dy, "x": x.clone(), "weight": weight, "watch": watch} for dy, weight in own]

    return inputs


def _backward_by_hand() -> Inputs:
    return [{**{name: r[name] for name in ("dy", "x", "weight")}, "watch": False} for r in by_hand("column_linear")]


def _travels_while_computing(answer: Answer) -> str | None:
    for rank, (value, one) in enumerate(zip(answer.value, answer.evidence, strict=True)):
        moments = dict(one.marks)
        products = [moments[f"product {number}"] for number in value["products of dw"]]
        sums = [call for call in one.calls if call.name == "all_reduce"]
        if not sums:
            return f"rank {rank} starts no all-reduce"
        if not products:
            return f"rank {rank}: the check cannot see where dW is computed from dy and x; use torch's operations"
        if sums[0].waited is None:
            return f"rank {rank} never waits for the all-reduce"
        if min(products) < sums[0].started:
            return f"rank {rank} computes dW before the all-reduce of dx has started"
        if max(products) > sums[0].waited:
            return f"rank {rank} waits for the all-reduce before it computes dW"
    return None


OVERLAP = Exercise(
    "column_backward",
    drive=_drive_overlap,
    axis="tp",
    cases=[
        Case("the 2 x 2 product of the lab, dy = 1: dx alone travels, once", _backward_by_hand(),
             fixed=[in_whole_numbers(_backward_inputs())], reference=_gradients,
             accept=[only("all_reduce"), count("all_reduce", 1), at_most("dx", lambda i: i[0]["x"].nbytes)]),
        Case("other sizes, 3 ranks: dx and dW", _backward_inputs(t=3), points=2, hidden=True, reference=_gradients),
        Case("dx travels while dW is computed", _backward_inputs(watch=True), points=3, hidden=True,
             accept=[_travels_while_computing]),
    ],
    mistakes=[
        Mistake(_own_gradients, "dx is still this rank's share: the sum over ranks was not made, or has not arrived."),
        Mistake(
            lambda ranks: [{**one, "dx": one["dx"] / len(ranks)} for one in _gradients(ranks)],
            "This is the mean of the ranks' shares of dx: x has the sum of them as its gradient.",
        ),
        Mistake(
            lambda ranks: [{"dx": own["dx"], "dw": one["dw"]} for own, one in zip(
                _own_gradients(ranks), _everything_summed(ranks), strict=True)],
            "The sum was made of dW. It belongs to this rank's rows; dx is what the ranks have shares of.",
        ),  # fmt: skip
        Mistake(
            lambda ranks: [{"dx": sum(each["dy"] for each in ranks) @ r["weight"], "dw": ANYTHING} for r in ranks],
            "You summed dy. It belongs to other features on each rank; what is summed are the products dy W.",
        ),
        Mistake(
            lambda ranks: [{**one, "dw": one["dw"].t()} for one in _gradients(ranks)],
            "dW is transposed: it has the shape of the weight, [out, in].",
        ),
        Mistake(
            lambda ranks: [{**one, "dw": one["dw"] / ranks[0]["dy"].shape[1]} for one in _gradients(ranks)],
            "This dW is a mean over sequences: the gradients of all tokens are summed.",
        ),
        Mistake(
            _rows_that_do_not_meet,
            "dW pairs dy of one token with x of another: flatten both in the same order.",
        ),
        Mistake(_everything_summed, "dW is summed over ranks, too: each rank's dW belongs to its own rows and is "
                "complete."),
    ],
    idea="Which of the two products do the other ranks wait for, and what can this rank do until the sum arrives?",
    hint="Four steps in this order: dx = dy @ weight; handle = dist.all_reduce(dx, group=tp.group, async_op=True); "
    "dW from dy and x; handle.wait().",
)  # fmt: skip
