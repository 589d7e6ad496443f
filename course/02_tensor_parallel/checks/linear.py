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

Inputs = list[dict[str, Any]]

# ----------------------------------------------------------------------------------------------- column and row


def _drive_linear(exercise: Any, x: Any, weight: Any, bias: Any, dy: Any, kind: str) -> dict[str, Any]:
    from minimegatron.comm.mesh import Axis

    leaves = {"dx": x, "dw": weight, **({} if bias is None else {"db": bias})}
    for leaf in leaves.values():
        leaf.requires_grad_()
    y = getattr(exercise, kind)(x, weight, bias, Axis.world("tp"))
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


def _row(ranks: Inputs, bias_times: float = 1, gradient_times: float = 1) -> list[dict[str, torch.Tensor]]:
    parts = [_local_linear({**r, "bias": None}) for r in ranks]
    total, bias = torch.stack([p["y"] for p in parts]).sum(0), ranks[0]["bias"]
    y = total if bias is None else total + bias_times * bias
    out = []
    for r, p in zip(ranks, parts, strict=True):
        one = {"y": y, "dx": gradient_times * p["dx"], "dw": gradient_times * p["dw"]}
        out.append(one if bias is None else {**one, "db": r["dy"].sum((0, 1))})
    return out


def _linear_inputs(kind: str, bias: bool = True) -> Callable[[Draw], Inputs]:
    def inputs(draw: Draw) -> Inputs:
        t, s, b = draw.integer(2, 4), draw.integer(2, 5), draw.integer(1, 3)
        i, o = draw.integer(2, 6), draw.integer(2, 6)
        x, dy, shared = draw.tensor(s, b, i), draw.tensor(s, b, o), draw.tensor(o) if bias else None
        out = []
        for _ in range(t):
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
    cases=[
        Case("y and all gradients", _linear_inputs("column_linear"), points=2, hidden=True),
        Case("without a bias", _linear_inputs("column_linear", bias=False), hidden=True),
        Case(
            "one message: dx", _linear_inputs("column_linear"), hidden=True,
            accept=[only("all_reduce"), count("all_reduce", 1), at_most("dx", lambda i: i[0]["x"].nbytes)],
        ),
    ],
    mistakes=[
        Mistake(
            lambda ranks: [_local_linear(r) for r in ranks],
            "dx is only this rank's share: x went into other work on every rank, so the shares must be summed (f).",
        ),
    ],
    hint="F.linear with this rank's rows, behind f: nothing travels forward, dx is summed backward. Do not gather y: "
    "the row layer wants it cut.",
)  # fmt: skip

ROW = Exercise(
    "row_linear",
    reference=_row,
    drive=_drive_linear,
    cases=[
        Case("y and all gradients", _linear_inputs("row_linear"), points=2, hidden=True),
        Case("without a bias", _linear_inputs("row_linear", bias=False), hidden=True),
        Case(
            "one message: y", _linear_inputs("row_linear"), hidden=True,
            accept=[only("all_reduce"), count("all_reduce", 1), at_most("y", lambda i: i[0]["dy"].nbytes)],
        ),
    ],
    mistakes=[
        Mistake(lambda ranks: _row(ranks, bias_times=len(ranks)), "Each rank added the bias before the sum: t biases."),
        Mistake(lambda ranks: [_local_linear(r) for r in ranks], "This is a partial sum of y: nobody has added them."),
        Mistake(
            lambda ranks: _row(ranks, gradient_times=len(ranks)),
            "Summed once too often: dy is already the same on every rank (g does nothing backward).",
        ),
    ],
    hint="A partial product with this rank's columns, then g (an all-reduce whose backward does nothing), then the "
    "bias, once.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------ overlap


def _drive_overlap(exercise: Any, dy: Any, x: Any, weight: Any, watch: bool) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    from minimegatron.comm.mesh import Axis

    order = []
    real = dist.all_reduce

    class Handle:
        def __init__(self, work):
            self.work = work

        def wait(self, *args):
            order.append("wait")
            return self.work.wait(*args)

    def all_reduce(*args, **kwargs):
        order.append("start")
        work = real(*args, **kwargs)
        if work is None:
            order.append("wait")
        return None if work is None else Handle(work)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            name = func._schema.name
            if name in ("aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm") and isinstance(out, torch.Tensor):
                order.append({weight.numel(): "dw", x.numel(): "dx"}.get(out.numel(), "other"))
            return out

    dist.all_reduce = all_reduce
    with Watch():
        dx, dw = exercise.column_backward(dy, x, weight, Axis.world("tp"))
    return {"order": order} if watch else {"dx": dx, "dw": dw}


def _gradients(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    return [{"dx": p["dx"], "dw": p["dw"]} for p in _column([{**r, "bias": None} for r in ranks])]


def _own_gradients(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    parts = [_local_linear({**r, "bias": None}) for r in ranks]
    return [{"dx": p["dx"], "dw": p["dw"]} for p in parts]


def _everything_summed(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    right = _gradients(ranks)
    total = torch.stack([one["dw"] for one in right]).sum(0)
    return [{"dx": one["dx"], "dw": total} for one in right]


def _backward_inputs(watch: bool) -> Callable[[Draw], Inputs]:
    def inputs(draw: Draw) -> Inputs:
        s, b, i, o = draw.integer(2, 3), draw.integer(2, 3), draw.integer(3, 6), draw.integer(10, 14)  # o != s*b
        x, shapes = draw.tensor(s, b, i), ((s, b, o), (o, i))
        both = [[draw.tensor(*shape) for shape in shapes] for _ in range(2)]
        return [{"dy": dy, "x": x.clone(), "weight": weight, "watch": watch} for dy, weight in both]

    return inputs


def _travels_while_computing(answer: Answer) -> str | None:
    for rank, value in enumerate(answer.value):
        order = value["order"]
        if "start" not in order:
            return f"rank {rank} starts no dist.all_reduce"
        if "dw" not in order:
            return f"rank {rank} computes no matrix product of the shape of dW"
        start, dw = order.index("start"), order.index("dw")
        if dw < start:
            return f"rank {rank} computes dW before the all-reduce of dx has started"
        if "wait" not in order:
            return f"rank {rank} never waits for the all-reduce"
        if order.index("wait") < dw:
            return f"rank {rank} waits for the all-reduce before it computes dW"
    return None


OVERLAP = Exercise(
    "column_backward",
    drive=_drive_overlap,
    cases=[
        Case("dx and dW", _backward_inputs(False), points=2, hidden=True, reference=_gradients),
        Case("only dx travels", _backward_inputs(False), hidden=True, reference=_gradients,
             accept=[only("all_reduce"), count("all_reduce", 1), at_most("dx", lambda i: i[0]["x"].nbytes)]),
        Case("dx travels while dW is computed", _backward_inputs(True), points=3, hidden=True,
             accept=[_travels_while_computing]),
    ],
    mistakes=[
        Mistake(_own_gradients, "dx is a share: sum it over ranks."),
        Mistake(_everything_summed, "Each rank's dW belongs to its own rows: it is complete, do not sum it."),
    ],
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
        Case("a column layer, rank 1 of 2",
             {"shape": [4, 2], "dim": 0, "tp_rank": 1, "tp_size": 2, "seed": 1, "std": 0.02}),
        Case("cut along dim 0", _a_matrix(0), hidden=True),
        Case("cut along dim 1", _a_matrix(1), hidden=True),
        Case("replicated", _a_matrix(None), hidden=True),
    ],
    mistakes=[
        Mistake(_local_draw(lambda seed, rank: seed), "The same seed and the same shape on every rank: equal shards."),
        Mistake(
            _local_draw(lambda seed, rank: seed + rank),
            "The shards differ now, but they are no parts of the serial matrix: the model changes with tp.",
        ),
    ],
    hint="Draw the whole matrix from the seed on every rank, times std, and keep this rank's block along dim.",
)  # fmt: skip
