"""Lab 02, one matrix over tp: the column layer and the row layer.

Rank r of t holds rows (column) or columns (row) of W [o, i]. `local_linear` is what a rank can do by itself; what is
right adds the one sum that is missing, y of a row layer or dx of a column layer, and what is wrong leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from labkit.checks import at_most, count, only
from labkit.compare import ANYTHING
from labkit.exercises import Case, Draw, Exercise, Mistake

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


def _added_features(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    """A mistaken answer: g in place of f."""
    parts = [local_linear(r) for r in ranks]
    return [{**p, "y": torch.stack([one["y"] for one in parts]).sum(0)} for p in parts]


def _f_behind(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    """A mistaken answer: f stands behind the product, so the ranks sum dy, whose features differ from rank to rank."""
    total = torch.stack([r["dy"] for r in ranks]).sum(0)
    return [{**local_linear({**r, "dy": total}), "y": local_linear(r)["y"]} for r in ranks]


def _changed(right: Callable[[Inputs], Any], **parts: Callable[[Inputs, int], Any]) -> Callable[[Inputs], Any]:
    """Return the right answer with these parts of each rank replaced."""
    return lambda ranks: [
        {**one, **{name: part(ranks, r) for name, part in parts.items() if name in one}}
        for r, one in enumerate(right(ranks))
    ]


def _sum_of(name: str) -> Callable[[Inputs, int], torch.Tensor]:
    """Return the sum over the ranks of this part, as each rank computes it alone."""
    return lambda ranks, r: torch.stack([local_linear(one)[name] for one in ranks]).sum(0)


def _right_but(right: Callable[[Inputs], Any], *parts: str) -> Callable[[Inputs], Any]:
    """Return the right answer, in which these parts are not compared."""
    return lambda ranks: [{name: ANYTHING if name in parts else part for name, part in one.items()}
                          for one in right(ranks)]  # fmt: skip


def _row(
    ranks: Inputs, bias_times: float = 1, gradient_times: float = 1, y_times: float = 1
) -> list[dict[str, torch.Tensor]]:
    parts = [local_linear({**r, "bias": None}) for r in ranks]
    total, bias = torch.stack([p["y"] for p in parts]).sum(0), ranks[0]["bias"]
    y = y_times * total if bias is None else y_times * total + bias_times * bias
    out = []
    for r, p in zip(ranks, parts, strict=True):
        one = {"y": y, "dx": gradient_times * p["dx"], "dw": gradient_times * p["dw"]}
        out.append(one if bias is None else {**one, "db": r["dy"].sum((0, 1))})
    return out


def _with_bias(times: Callable[[int, int], float]) -> Callable[[Inputs], Any]:
    """Return the answer of the column layer that adds the bias `times(r, t)` times on rank r of t."""

    def y(ranks: Inputs, r: int) -> torch.Tensor:
        bias = ranks[r]["bias"]
        return local_linear({**ranks[r], "bias": None if bias is None else times(r, len(ranks)) * bias})["y"]

    return _changed(_right_but(column, "db"), y=y)


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
            accept=[only("all_reduce"), count("all_reduce", 1), at_most("dx", lambda i: i[0]["x"].nbytes)],
        ),
    ],
    mistakes=[
        Mistake(
            lambda ranks: [local_linear(r) for r in ranks],
            "dx is only this rank's share: x went into other work on every rank, so the shares must be summed.",
        ),
        Mistake(
            _added_features,
            "You added the ranks' results. They are other features, to be kept apart; what must be added is dx.",
        ),
        Mistake(_f_behind, "The sum came behind the product, on the gradient of y: f belongs before the product."),
        Mistake(
            _changed(column, dx=lambda ranks, r: _sum_of("dx")(ranks, r) + 2.0 * (len(ranks) - 1)),
            "You hook x itself. x is used beside the layer, too, and what comes back from there is now summed as well.",
        ),
        Mistake(
            _changed(column, dx=lambda ranks, r: _sum_of("dx")(ranks, r) / len(ranks)),
            "This is the mean of the ranks' shares of dx: x went into the work of all of them, so they are summed.",
        ),
        *(
            Mistake(_changed(column, **{name: _sum_of(name)}), f"{said} is summed over ranks, too: it belongs to this "
                    "rank's features and is complete.")
            for name, said in (("dw", "dW"), ("db", "The bias's gradient"))
        ),
        Mistake(
            lambda ranks: [{**one, "y": torch.cat([each["y"] for each in column(ranks)], -1), **dict.fromkeys(
                [name for name in one if name != "y"], ANYTHING)} for one in column(ranks)],
            "You gathered y: a column layer leaves each rank its own features.",
        ),  # fmt: skip
        Mistake(
            _changed(_right_but(column, "dx", "dw", "db"), y=lambda ranks, r: local_linear(
                {**ranks[r], "x": ranks[r]["x"] * len(ranks)})["y"]),
            "You summed x over ranks: it is the same on all of them, so the sum is t times x.",
        ),  # fmt: skip
        Mistake(_with_bias(lambda r, t: 1 / t), "The bias is divided by t: it belongs to this rank's features, and no "
                "other rank has them."),
        Mistake(_with_bias(lambda r, t: r == 0), "Only rank 0 adds its bias: each rank's belongs to its own features."),
        Mistake(_with_bias(lambda r, t: 0), "The bias is not added."),
        Mistake(
            _right_but(column, "db"),
            "Only the bias's gradient is wrong or missing: is your bias the one that autograd knows?",
        ),
        Mistake(_right_but(column, "dx"), "y is right, dx is not. What is summed over ranks on the way back, and how "
                "often?"),
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
            accept=[only("all_reduce"), count("all_reduce", 1), at_most("y", lambda i: i[0]["dy"].nbytes)],
        ),
    ],
    mistakes=[
        Mistake(lambda ranks: _row(ranks, bias_times=len(ranks)), "Each rank added the bias before the sum: t biases."),
        Mistake(lambda ranks: [local_linear(r) for r in ranks], "This is a partial sum of y, not yet added up."),
        Mistake(
            _right_but(lambda ranks: [local_linear(r) for r in ranks], "dx", "dw", "db"),
            "This is a partial sum of y, not yet added up: the ranks' shares must be summed forward.",
        ),
        Mistake(
            lambda ranks: _row(ranks, gradient_times=len(ranks)),
            "Summed once too often: dy is already the same on every rank.",
        ),
        Mistake(
            lambda ranks: _row(ranks, bias_times=1 / len(ranks), y_times=1 / len(ranks)),
            "This is the mean of the ranks' shares: y is their sum.",
        ),
        Mistake(
            lambda ranks: _row(ranks, y_times=1 / len(ranks)),
            "This is the mean of the ranks' shares: y is their sum.",
        ),
        Mistake(
            lambda ranks: _row(ranks, y_times=1 / len(ranks), gradient_times=1 / len(ranks)),
            "This is the mean of the ranks' shares: y is their sum.",
        ),
        *(
            Mistake(_changed(_row, **{name: _sum_of(name)}), f"{said} is summed over ranks: it belongs to this rank's "
                    "features of x and is complete.")
            for name, said in (("dx", "dx"), ("dw", "dW"))
        ),
        Mistake(
            lambda ranks: [{**one, "db": len(ranks) * one["db"]} if "db" in one else one for one in _row(ranks)],
            "The bias's gradient is summed over ranks: dy is the same on all of them, and each adds the bias once.",
        ),
        *(
            Mistake(
                lambda ranks, gone=gone: [{**one, "db": gone} if "db" in one else one for one in _row(
                    ranks, bias_times=0)],
                "The bias is not added.",
            )
            for gone in (None, ANYTHING)
        ),  # fmt: skip
        Mistake(_right_but(_row, "db"), "Only the bias's gradient is wrong: the bias is added once, after the sum, on "
                "every rank."),
        Mistake(
            _right_but(_row, "dx", "dw", "db"),
            "y is right, the gradients are not: look at what comes back through your sum.",
        ),
    ],
    idea="Look at the right end of the picture of f and g: what each rank has before the sum, and what may be added to "
    "it only afterwards.",
    hint="A partial product with this rank's columns, then g (an all-reduce whose backward does nothing), then the "
    "bias, once.",
)  # fmt: skip
