"""Lab 02, one matrix over tp: the column layer and the row layer.

Rank r of t holds rows (column) or columns (row) of W [o, i]. `local_linear` is what a rank can do by itself; the sum
that is missing is y of a row layer, or dx of a column layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from labkit.checks import sends
from labkit.exercises import Case, Draw, Exercise

Inputs = list[dict[str, Any]]


def _drive_linear(exercise: Any, x: Any, weight: Any, bias: Any, dy: Any, kind: str, tp: Any) -> dict[str, Any]:
    """Run the learner's layer. x is also used beside the layer, as by a residual connection; that gradient is not the
    layer's."""
    import torch

    leaves = {"dx": x, "dw": weight, **({} if bias is None else {"db": bias})}
    for leaf in leaves.values():
        leaf.requires_grad_()
    y = getattr(exercise, kind)(x, weight, bias, tp)
    if y.shape == dy.shape:  # of another shape there is nothing to go back from; y says so
        torch.autograd.backward([y, 2.0 * x], [dy, torch.ones_like(x)])
        x.grad -= 2.0
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def local_linear(r: dict[str, Any]) -> dict[str, torch.Tensor]:
    """One rank's part of a linear layer, without any communication."""
    flat_dy, flat_x = r["dy"].flatten(0, 1), r["x"].flatten(0, 1)
    out = {"y": F.linear(r["x"], r["weight"], r["bias"]), "dx": r["dy"] @ r["weight"], "dw": flat_dy.t() @ flat_x}
    return out if r["bias"] is None else {**out, "db": flat_dy.sum(0)}


def column(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    parts = [local_linear(r) for r in ranks]
    total = torch.stack([p["dx"] for p in parts]).sum(0)
    return [{**p, "dx": total} for p in parts]


def _row(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    parts, bias = [local_linear({**r, "bias": None}) for r in ranks], ranks[0]["bias"]
    y = torch.stack([p["y"] for p in parts]).sum(0)
    if bias is None:
        return [{**p, "y": y} for p in parts]
    return [{**p, "y": y + bias, "db": r["dy"].sum((0, 1))} for r, p in zip(ranks, parts, strict=True)]


def by_hand(kind: str) -> Inputs:
    """The product of the lab's picture, 19 22 / 43 50, cut in the way of this layer; dy is 1 everywhere."""
    x, out = torch.tensor([[[1.0, 2.0]], [[3.0, 4.0]]]), []
    a = torch.tensor([[5.0, 7.0], [6.0, 8.0]])  # as PyTorch stores it: [out, in]
    for r in range(2):
        if kind == "column_linear":
            mine = {"x": x.clone(), "weight": a[r : r + 1].clone(), "bias": None, "dy": torch.ones(2, 1, 1)}
        else:
            bias = torch.tensor([100.0, 200.0])
            mine = {"x": x[..., r : r + 1].clone(), "weight": a[:, r : r + 1].clone(), "bias": bias,
                    "dy": torch.ones(2, 1, 2)}  # fmt: skip
        out.append({**mine, "kind": kind})
    return out


def in_whole_numbers(inputs: Callable[[Draw], Inputs]) -> Callable[[Draw], Inputs]:
    """Return the same inputs in small whole numbers, for a case that is shown to the learner."""

    def rounded(value: Any) -> Any:
        if isinstance(value, list):
            return [rounded(one) for one in value]
        return (2 * value).round() + 0.0 if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return lambda draw: [{name: rounded(value) for name, value in one.items()} for one in inputs(draw)]


def _linear_inputs(kind: str, t: int = 0, bias: bool = True) -> Callable[[Draw], Inputs]:
    """Draw inputs on `t` ranks, by default 2 to 4; all sizes differ, so that none can stand for another."""

    def inputs(draw: Draw) -> Inputs:
        s, b, i, o = draw.shape(4, 2, 7)
        x, dy, shared = draw.tensor(s, b, i), draw.tensor(s, b, o), draw.tensor(o) if bias else None
        out = []
        for _ in range(t or draw.integer(2, 4)):
            mine = {"weight": draw.tensor(o, i), "kind": kind}
            if kind == "column_linear":
                own = draw.tensor(o) if bias else None
                out.append({**mine, "x": x.clone(), "bias": own, "dy": draw.tensor(s, b, o)})
            else:
                own = shared.clone() if shared is not None else None
                out.append({**mine, "x": draw.tensor(s, b, i), "bias": own, "dy": dy.clone()})
        return out

    return inputs


COLUMN = Exercise(
    "column_linear",
    reference=column,
    drive=_drive_linear,
    axis="tp",
    cases=[
        Case("the 2 x 2 product of the lab: rank 0 has (5 7), rank 1 (6 8); dy = 1", by_hand("column_linear"),
             fixed=[in_whole_numbers(_linear_inputs("column_linear", 2, bias=False))]),
        Case("other sizes, 3 ranks: y and all gradients", _linear_inputs("column_linear", 3), points=2, hidden=True),
        Case(
            "right numbers, and dx alone travels, once", _linear_inputs("column_linear"), hidden=True,
            accept=[sends("all_reduce", times=1, at_most=("dx", lambda i: i[0]["x"].nbytes))],
        ),
    ],
    errors={"shapes cannot be multiplied": "The weight is stored as [out, in]: the product takes it transposed."},
    idea="Look at the left end of the picture of f and g: what happens to x there, and what to dx?",
    hint="F.linear with this rank's rows, behind f: nothing travels forward, dx is summed backward. Do not gather y: "
    "the row layer wants it cut.",
)  # fmt: skip

ROW = Exercise(
    "row_linear",
    reference=_row,
    drive=_drive_linear,
    axis="tp",
    cases=[
        Case("the 2 x 2 product of the lab: rank 0 has (5 6), rank 1 (7 8); bias (100 200), dy = 1",
             by_hand("row_linear"), fixed=[in_whole_numbers(_linear_inputs("row_linear", 2, bias=False))]),
        Case("other sizes, 3 ranks: y and all gradients", _linear_inputs("row_linear", 3), points=2, hidden=True),
        Case(
            "right numbers, and y alone travels, once", _linear_inputs("row_linear"), hidden=True,
            accept=[sends("all_reduce", times=1, at_most=("y", lambda i: i[0]["dy"].nbytes))],
        ),
    ],
    idea="Look at the right end of the picture of f and g: what each rank has before the sum, and what may be added to "
    "it only afterwards.",
    hint="A partial product with this rank's columns, then g (an all-reduce whose backward does nothing), then the "
    "bias, once.",
)  # fmt: skip
