"""Lab 03, gradients of a pipeline: a backward in two halves, tied weights, which microbatches have survived.

Each is about a sum that is easily incomplete: W *adds* to the weight's gradient, and later than B; the two copies of a
tied matrix have a part of its gradient each; of a step's microbatches a broken schedule may keep one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from labkit.checks import at_most
from labkit.exercises import Answer, Case, Draw, Exercise, Mistake

Inputs = list[dict[str, Any]]

# ---------------------------------------------------------------------------------------------- two halves of B


def _drive_stage(exercise: Any, weight: Any, xs: Any, dys: Any, order: Any) -> dict[str, Any]:
    import torch as t
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        """Counts matrix products."""

        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func._schema.name.split("::")[1]
            self.count += name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "matmul", "linear")
            return func(*args, **(kwargs or {}))

    stage = exercise.SplitStage(weight.clone())
    ys, dxs, early, made = [None] * len(xs), [None] * len(xs), 0.0, {"F": 0, "B": 0, "W": 0}
    for word in order.split():
        kind, i = word[0], int(word[1:])
        before = stage.grad.clone()
        with Products() as products:
            if kind == "F":
                ys[i] = stage.forward(i, xs[i].clone()).detach()
            elif kind == "B":
                dxs[i] = stage.backward(i, dys[i].clone()).detach()
            else:
                stage.weights(i)
        made[kind] += products.count
        if kind != "W":
            early = max(early, float((stage.grad - before).abs().max()))
    grad = t.as_tensor(stage.grad).detach()
    return {"y": ys, "dx": dxs, "grad": grad, "early": early, "products": made}


def _halves(weight: torch.Tensor, xs: list, dys: list, order: str) -> dict[str, Any]:
    """In float64, by the chain rule."""
    w = weight.double()
    ys = [torch.tanh(x.double() @ w) for x in xs]
    dzs = [dy.double() * (1 - y**2) for dy, y in zip(dys, ys, strict=True)]
    done = [int(word[1:]) for word in order.split() if word[0] == "W"]
    grad = sum((xs[i].double().T @ dzs[i] for i in done), start=torch.zeros_like(w))
    as_given = [t.to(weight.dtype) for t in ys], [(dz @ w.T).to(weight.dtype) for dz in dzs]
    return {"y": as_given[0], "dx": as_given[1], "grad": grad.to(weight.dtype)}


def _right_halves(answer: Answer) -> str | None:
    want, got = _halves(**answer.inputs), answer.value
    for name, what in (("y", "the output"), ("dx", "the gradient of the input"), ("grad", "the weight's gradient")):
        pairs = zip(got[name], want[name], strict=True) if name != "grad" else [(got[name], want[name])]
        for i, (one, other) in enumerate(pairs):
            if one is None or one.shape != other.shape or not torch.allclose(one, other, rtol=1e-4, atol=1e-5):
                return f"{what} is wrong" + (f", first for microbatch {i}" if name != "grad" else "")
    return None


def _not_early(answer: Answer) -> str | None:
    return "the weight's gradient has changed before its W" if answer.value["early"] > 0 else None


def _b_alone(answer: Answer) -> str | None:
    n, made = len(answer.inputs["xs"]), answer.value["products"]["B"]
    return f"{n} backwards make {made} matrix products; one each is B, the other is W" if made > n else None


def _stage_inputs(order: Callable[[int, Draw], str]) -> Callable[[Draw], dict[str, Any]]:
    def sizes(draw: Draw) -> dict[str, Any]:
        n, rows, columns = draw.integer(2, 4), draw.integer(2, 5), draw.integer(2, 5)
        xs = [draw.tensor(draw.integer(1, 4), rows) for _ in range(n)]
        dys = [draw.tensor(len(x), columns) for x in xs]
        return {"weight": draw.tensor(rows, columns), "xs": xs, "dys": dys, "order": order(n, draw)}

    return sizes


def _w_last(n: int, draw: Draw) -> str:
    return " ".join(f"{kind}{i}" for kind in "FBW" for i in range(n))


def _mixed(n: int, draw: Draw) -> str:
    order = [f"F{i}" for i in range(n)] + [f"{k}{i}" for i in reversed(range(n)) for k in "BW"]
    return " ".join(order)


def _b_only(n: int, draw: Draw) -> str:
    return " ".join(f"{kind}{i}" for kind in "FB" for i in range(n))


_ONE = {"weight": torch.eye(2), "xs": [torch.ones(1, 2)], "dys": [torch.ones(1, 2)], "order": "F0 B0 W0"}

STAGE = Exercise(
    "split_stage",
    function="SplitStage",
    drive=_drive_stage,
    accept=[_not_early, _right_halves],
    cases=[
        Case("one microbatch: F0 B0 W0", _ONE),
        Case("several, every W at the end", _stage_inputs(_w_last), points=2, hidden=True),
        Case("the last microbatch goes back first", _stage_inputs(_mixed), hidden=True),
        Case("B computes the input's half and nothing else", _stage_inputs(_b_only), hidden=True, accept=[_b_alone]),
    ],
    hint="Keep x and y by microbatch. With dz = dy * (1 - y*y): B returns dz @ W.T, W *adds* x.T @ dz to self.grad.",
)

# ------------------------------------------------------------------------------------------------- tied weights


def _tied(ranks: Inputs) -> list[Any]:
    total = ranks[0]["grad"] + ranks[-1]["grad"]
    return [total if r["grad"] is not None else None for r in ranks]


def _ends(draw: Draw) -> Inputs:
    n, shape = draw.integer(3, 4), (draw.integer(2, 5), draw.integer(2, 5))
    return [{"grad": draw.tensor(*shape) if r in (0, n - 1) else None} for r in range(n)]


def _two_ends(draw: Draw) -> Inputs:
    shape = draw.integer(2, 5), draw.integer(2, 5)
    return [{"grad": draw.tensor(*shape)} for _ in range(2)]


def _middle_is_quiet(answer: Answer) -> str | None:
    for rank, one in enumerate(answer.evidence[1:-1], 1):
        if moved := sorted({c.name for c in one.calls if c.name != "barrier"}):
            return f"rank {rank} holds no copy of the matrix, yet it calls {', '.join(moved)}"
    return None


def _one_matrix(inputs: Inputs) -> float:
    return float(inputs[0]["grad"].nbytes)


TIED = Exercise(
    "sync_tied",
    reference=_tied,
    cases=[
        Case("2 ranks", [{"grad": torch.tensor([[1.0, 2.0]])}, {"grad": torch.tensor([[10.0, 20.0]])}]),
        Case("other tensors on 2 ranks", _two_ends, hidden=True),
        Case("3 or 4 ranks: those between have nothing to sum", _ends, hidden=True),
        Case(
            "ranks without a copy stay silent",
            _ends,
            hidden=True,
            accept=[_middle_is_quiet, at_most("the size of the matrix", _one_matrix, "all_reduce", "send")],
        ),
    ],
    mistakes=[
        Mistake(
            lambda ranks: [None if r["grad"] is None else t / 2 for r, t in zip(ranks, _tied(ranks), strict=True)],
            "Both are gradients of one matrix, from its two uses. They add up; nothing is divided.",
        ),
        Mistake(
            lambda ranks: [r["grad"] for r in ranks],
            "Each copy still has the gradient of its own use only; after one step the two matrices differ.",
        ),
    ],
    hint="Every rank calls dist.new_group([0, p-1]), also those that are not in it. Then the two members all-reduce; "
    "the others return what they have.",
)

# --------------------------------------------------------------------------------------------- who has survived


def survivors(got: torch.Tensor, grads: list[torch.Tensor]) -> list[int]:
    """Indices i with got = sum of grads[i]."""
    columns = torch.stack([g.flatten().double() for g in grads], dim=1)
    weights = torch.linalg.lstsq(columns, got.flatten().double()[:, None]).solution[:, 0]
    return [i for i, w in enumerate(weights.tolist()) if w > 0.5]


def _some(chosen: Callable[[Draw, int], Sequence[int]]) -> Callable[[Draw], dict[str, Any]]:
    def inputs(draw: Draw) -> dict[str, Any]:
        n, shape = draw.integer(3, 8), (draw.integer(5, 8), draw.integer(5, 8))
        grads = [draw.tensor(*shape) for _ in range(n)]
        picked = [grads[i] for i in chosen(draw, n)]
        return {"got": torch.stack(picked).sum(0), "grads": grads}

    return inputs


def _subset(draw: Draw, n: int) -> list[int]:
    return sorted(draw.random.sample(range(n), draw.integer(1, n - 1)))


_BASIS = [torch.tensor([1.0, 0.0, 0.0]), torch.tensor([-2.0, 1.0, 0.0]), torch.tensor([1.0, 1.0, 1.0])]

SURVIVORS = Exercise(
    "survivors",
    reference=survivors,
    cases=[
        Case("all three of three", {"got": torch.tensor([0.0, 2.0, 1.0]), "grads": _BASIS}),
        Case("the first and the last", {"got": torch.tensor([2.0, 1.0, 1.0]), "grads": _BASIS}),
        Case("nothing is lost", _some(lambda draw, n: range(n)), hidden=True),
        Case("only one is left", _some(lambda draw, n: [draw.integer(0, n - 1)]), hidden=True),
        Case("any of them", _some(_subset), points=2, hidden=True),
    ],
    mistakes=[
        Mistake(lambda got, grads: list(range(len(grads))), "You count them all. Some did not survive."),
        Mistake(lambda got, grads: [len(grads) - 1], "Not always the last one: find out which."),
        Mistake(
            lambda got, grads: [i for i, g in enumerate(grads) if torch.allclose(g, got)],
            "This finds a single survivor. Several may be in the sum.",
        ),
        Mistake(
            lambda got, grads: [i for i, g in enumerate(grads) if (g * got).sum() > 0],
            "A positive product is no proof: gradients are not orthogonal. Solve for all weights together.",
        ),
    ],
    hint="got = sum of w_i grads[i] with each w_i 0 or 1: a least-squares problem with a column for each microbatch.",
)
