"""Lab 02, one matrix over tp: column and row, a backward pass that overlaps, initial values that are parts of a whole.

Rank r of t holds rows (column) or columns (row) of W [o, i]. `_local_linear` is what a rank can do by itself; what is
right adds the one sum that is missing, y of a row layer or dx of a column layer, and what is wrong leaves it out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from labkit.checks import at_most, count, only
from labkit.exercises import Answer, Case, Draw, Exercise, Mistake
from labkit.wanted import ANYTHING

Inputs = list[dict[str, Any]]

# ----------------------------------------------------------------------------------------------- column and row


def _drive_linear(exercise: Any, x: Any, weight: Any, bias: Any, dy: Any, kind: str, tp: Any) -> dict[str, Any]:
    leaves = {"dx": x, "dw": weight, **({} if bias is None else {"db": bias})}
    for leaf in leaves.values():
        leaf.requires_grad_()
    y = getattr(exercise, kind)(x, weight, bias, tp)
    if y.shape == dy.shape:  # of another shape there is nothing to go back from; y says so
        y.backward(dy)
    return {"y": y.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def _local_linear(r: dict[str, Any]) -> dict[str, torch.Tensor]:
    """One rank's part of a linear layer, without any communication."""
    flat_dy, flat_x = r["dy"].flatten(0, 1), r["x"].flatten(0, 1)
    out = {"y": F.linear(r["x"], r["weight"], r["bias"]), "dx": r["dy"] @ r["weight"], "dw": flat_dy.t() @ flat_x}
    return out if r["bias"] is None else {**out, "db": flat_dy.sum(0)}


def _column(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    parts = [_local_linear(r) for r in ranks]
    total = torch.stack([p["dx"] for p in parts]).sum(0)
    return [{**p, "dx": total} for p in parts]


def _added_features(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    """g in the place of f."""
    parts = [_local_linear(r) for r in ranks]
    return [{**p, "y": torch.stack([one["y"] for one in parts]).sum(0)} for p in parts]


def _f_behind(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    """f behind the product: dy, of other features on each rank, is summed."""
    total = torch.stack([r["dy"] for r in ranks]).sum(0)
    return [{**_local_linear({**r, "dy": total}), "y": _local_linear(r)["y"]} for r in ranks]


def _right_but(right: Callable[[Inputs], Any], *parts: str) -> Callable[[Inputs], Any]:
    """The right answer, but that these parts may be anything."""
    return lambda ranks: [{**one, **dict.fromkeys(parts, ANYTHING)} for one in right(ranks)]


def _row(ranks: Inputs, bias_times: float = 1, gradient_times: float = 1) -> list[dict[str, torch.Tensor]]:
    parts = [_local_linear({**r, "bias": None}) for r in ranks]
    total, bias = torch.stack([p["y"] for p in parts]).sum(0), ranks[0]["bias"]
    y = total if bias is None else total + bias_times * bias
    out = []
    for r, p in zip(ranks, parts, strict=True):
        one = {"y": y, "dx": gradient_times * p["dx"], "dw": gradient_times * p["dw"]}
        out.append(one if bias is None else {**one, "db": r["dy"].sum((0, 1))})
    return out


def _by_hand(kind: str) -> Inputs:
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
    """The same with small whole numbers, for a case that is shown."""

    def rounded(value: Any) -> Any:
        if isinstance(value, list):
            return [rounded(one) for one in value]
        return (2 * value).round() + 0.0 if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return lambda draw: [{name: rounded(value) for name, value in one.items()} for one in inputs(draw)]


def _linear_inputs(kind: str, t: int = 0, bias: bool = True) -> Callable[[Draw], Inputs]:
    """On `t` ranks, by default 2 to 4; all sizes differ, so that none can stand for another."""

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
    reference=_column,
    drive=_drive_linear,
    axis="tp",
    cases=[
        Case("the 2 x 2 product of the lab: rank 0 has (5 7), rank 1 (6 8); dy = 1", _by_hand("column_linear"),
             fixed=[in_whole_numbers(_linear_inputs("column_linear", 2, bias=False))]),
        Case("other sizes, 3 ranks: y and all gradients", _linear_inputs("column_linear", 3), points=2, hidden=True),
        Case(
            "right numbers, and dx alone travels, once", _linear_inputs("column_linear"), hidden=True,
            accept=[only("all_reduce"), count("all_reduce", 1), at_most("dx", lambda i: i[0]["x"].nbytes)],
        ),
    ],
    mistakes=[
        Mistake(
            lambda ranks: [_local_linear(r) for r in ranks],
            "dx is only this rank's share: x went into other work on every rank, so the shares must be summed.",
        ),
        Mistake(
            _added_features,
            "You added the ranks' results. They are other features, to be kept apart; what must be added is dx.",
        ),
        Mistake(_f_behind, "The sum came behind the product, on the gradient of y: f belongs before the product."),
        Mistake(
            _right_but(_column, "db"),
            "Only the bias's gradient is wrong or missing: is your bias the one that autograd knows?",
        ),
        Mistake(_right_but(_column, "dx"), "y is right, dx is not. What is summed over ranks on the way back, and how "
                "often?"),
    ],
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
             _by_hand("row_linear"), fixed=[in_whole_numbers(_linear_inputs("row_linear", 2, bias=False))]),
        Case("other sizes, 3 ranks: y and all gradients", _linear_inputs("row_linear", 3), points=2, hidden=True),
        Case(
            "right numbers, and y alone travels, once", _linear_inputs("row_linear"), hidden=True,
            accept=[only("all_reduce"), count("all_reduce", 1), at_most("y", lambda i: i[0]["dy"].nbytes)],
        ),
    ],
    mistakes=[
        Mistake(lambda ranks: _row(ranks, bias_times=len(ranks)), "Each rank added the bias before the sum: t biases."),
        Mistake(lambda ranks: [_local_linear(r) for r in ranks], "This is a partial sum of y, not yet added up."),
        Mistake(
            _right_but(lambda ranks: [_local_linear(r) for r in ranks], "dx", "dw", "db"),
            "This is a partial sum of y, not yet added up: the ranks' shares must be summed forward.",
        ),
        Mistake(
            lambda ranks: _row(ranks, gradient_times=len(ranks)),
            "Summed once too often: dy is already the same on every rank.",
        ),
        Mistake(_right_but(_row, "db"), "Only the bias's gradient is wrong: the bias is added once, after the sum, on "
                "every rank."),
    ],
    idea="Look at the right end of the picture of f and g: what each rank has before the sum, and what may be added to "
    "it only afterwards.",
    hint="A partial product with this rank's columns, then g (an all-reduce whose backward does nothing), then the "
    "bias, once.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------ overlap


def _drive_overlap(exercise: Any, dy: Any, x: Any, weight: Any, watch: bool, tp: Any) -> dict[str, Any]:
    """Watched: each product of dy and x is marked with its number, and the answer says which of them dW is made of.

    What a tensor is made of is known by its memory: of dy, of x, of numbered products of both. So a product may have
    any form, `bmm` and a sum or many outer products, and one that is thrown away does not count.
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
    return [{"dx": p["dx"], "dw": p["dw"]} for p in _column([{**r, "bias": None} for r in ranks])]


def _own_gradients(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    parts = [_local_linear({**r, "bias": None}) for r in ranks]
    return [{"dx": p["dx"], "dw": p["dw"]} for p in parts]


def _everything_summed(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    right = _gradients(ranks)
    total = torch.stack([one["dw"] for one in right]).sum(0)
    return [{"dx": one["dx"], "dw": total} for one in right]


def _backward_inputs(watch: bool = False, t: int = 2) -> Callable[[Draw], Inputs]:
    def inputs(draw: Draw) -> Inputs:
        s, b, i, o = draw.shape(4, 2, 9)
        x = draw.tensor(s, b, i)
        own = [(draw.tensor(s, b, o), draw.tensor(o, i)) for _ in range(t)]
        return [{"dy": dy, "x": x.clone(), "weight": weight, "watch": watch} for dy, weight in own]

    return inputs


def _backward_by_hand() -> Inputs:
    return [{**{name: r[name] for name in ("dy", "x", "weight")}, "watch": False} for r in _by_hand("column_linear")]


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
        Mistake(_everything_summed, "dW is summed over ranks, too: each rank's dW belongs to its own rows and is "
                "complete."),
    ],
    idea="Which of the two products do the other ranks wait for, and what can this rank do until the sum arrives?",
    hint="Four steps in this order: dx = dy @ weight; handle = dist.all_reduce(dx, group=tp.group, async_op=True); "
    "dW from dy and x; handle.wait().",
)  # fmt: skip

# ----------------------------------------------------------------------------------------------- initial values


def initial_part(shape: list[int], dim: int | None, tp_rank: int, tp_size: int, seed: int, std: float) -> torch.Tensor:
    whole = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * std
    return whole if dim is None else whole.chunk(tp_size, dim)[tp_rank].contiguous()


def _local_draw(by_rank: Callable[[int, int], int]) -> Callable[..., torch.Tensor]:
    def answer(shape: list[int], dim: int | None, tp_rank: int, tp_size: int, seed: int, std: float) -> torch.Tensor:
        local = [n // tp_size if i == dim else n for i, n in enumerate(shape)]
        own = seed if dim is None else by_rank(seed, tp_rank)
        return torch.randn(*local, generator=torch.Generator().manual_seed(own)) * std

    return answer


def _next_numbers(shape: list[int], dim: int | None, tp_rank: int, tp_size: int, seed: int, std: float) -> torch.Tensor:
    """The numbers of the serial matrix in the order in which they are drawn, dealt out in runs."""
    local = [n // tp_size if i == dim else n for i, n in enumerate(shape)]
    numbers = initial_part(shape, None, 0, 1, seed, std).flatten()
    return numbers.unflatten(0, (-1, *local))[0 if dim is None else tp_rank]


def _a_matrix(dim: int | None) -> Callable[[Draw], dict[str, Any]]:
    def inputs(draw: Draw) -> dict[str, Any]:
        t = draw.choice([2, 4])
        shape = [t * draw.integer(1, 6), t * draw.integer(1, 6)]
        return {
            "shape": shape, "dim": dim, "tp_rank": draw.integer(1, t - 1), "tp_size": t,
            "seed": draw.integer(0, 10**6), "std": draw.integer(1, 9) / 100,
        }  # fmt: skip

    return inputs


INITIAL = Exercise(
    "initial_part",
    reference=initial_part,
    cases=[
        Case("a matrix [4, 2] cut along dim 0, rank 1 of 2: its rows 2 and 3",
             {"shape": [4, 2], "dim": 0, "tp_rank": 1, "tp_size": 2, "seed": 1, "std": 0.02}),
        Case("cut along dim 0", _a_matrix(0), hidden=True),
        Case("cut along dim 1", _a_matrix(1), hidden=True),
        Case("replicated", _a_matrix(None), hidden=True),
    ],
    mistakes=[
        Mistake(
            _local_draw(lambda seed, rank: seed),
            "Every rank draws the same numbers, as in the careless version: all shards are equal.",
        ),
        Mistake(
            _local_draw(lambda seed, rank: seed + rank),
            "The shards differ now, but they are no parts of the serial matrix: the model changes with tp.",
        ),
        Mistake(
            _next_numbers,
            "Each rank continues where the one before it stopped: that is right along dim 0 only.",
        ),
    ],
    idea="What does one process draw, and which block of it does this rank hold?",
    hint="Draw the whole matrix from the seed on every rank, times std, and keep this rank's block along dim.",
)  # fmt: skip
