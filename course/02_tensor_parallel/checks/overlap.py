"""Lab 02, the backward pass of a column layer: dx travels while dW is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from labkit.checks import sends
from labkit.exercises import Answer, Case, Draw, Exercise

from .linear import Inputs, by_hand, column, in_whole_numbers


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
             accept=[sends("all_reduce", times=1, at_most=("dx", lambda i: i[0]["x"].nbytes))]),
        Case("other sizes, 3 ranks: dx and dW", _backward_inputs(t=3), points=2, hidden=True, reference=_gradients),
        Case("dx travels while dW is computed", _backward_inputs(watch=True), points=3, hidden=True,
             accept=[_travels_while_computing]),
    ],
    idea="Which of the two products do the other ranks wait for, and what can this rank do until the sum arrives?",
    hint="Four steps in this order: dx = dy @ weight; handle = dist.all_reduce(dx, group=tp.group, async_op=True); "
    "dW from dy and x; handle.wait().",
)  # fmt: skip
