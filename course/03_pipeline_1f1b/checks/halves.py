"""Lab 03, a backward in two halves: what B returns, what W adds and when, and what is kept in between.

Values are compared with the chain rule in float64. What a stage keeps is what is alive after the call, in which it took
the steps of an order:

| inputs                                    | order       | a limit on what is kept finds                         |
|-------------------------------------------|-------------|-------------------------------------------------------|
| microbatches much larger than the weight  | all of it   | x, y, dy or dz that was not taken out                 |
| a weight much larger than all of them     | without W   | weight gradients, computed in B                       |
| the same                                  | all of it   | weight gradients that are collected, in place of added |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from labkit.compare import ANYTHING
from labkit.exercises import Answer, Case, Draw, Exercise


def _drive_stage(
    exercise: Any, weight: Any, xs: Any, dys: Any, ids: Any, order: Any, beside: bool = False
) -> dict[str, Any]:  # fmt: skip
    """Run the learner's stage; with `beside` a second stage on this rank takes the same steps with other numbers."""
    import torch as t

    stage = exercise.stage = exercise.SplitStage(weight)  # the module holds it: what it keeps is alive after the call
    other = exercise.SplitStage(-weight) if beside else None
    given = {"x": [x.clone() for x in xs], "dy": [dy.clone() for dy in dys]}
    ys: list[Any] = [None] * len(xs)
    returned, dxs, faults = [*ys], [*ys], []
    for word in order.split():
        kind, i = word[0], int(word[1:])
        before = stage.grad.clone()
        if kind == "F":
            ys[i] = stage.forward(ids[i], given["x"][i]).detach()
            returned[i] = ys[i].clone()
        elif kind == "B":
            dxs[i] = stage.backward(ids[i], given["dy"][i]).detach()
        else:
            stage.weights(ids[i])
        if kind != "W" and not t.equal(stage.grad, before):
            faults.append("grad")
        if other is not None:
            try:
                step = {"F": other.forward, "B": other.backward, "W": other.weights}[kind]
                step(ids[i], *{"F": [2 * xs[i]], "B": [-dys[i]], "W": []}[kind])
            except Exception:  # what it does to this stage is seen here
                other = None
    pairs = ("x", given["x"], xs), ("dy", given["dy"], dys), ("y", ys, returned)
    faults += [name for name, mine, of in pairs if not all(map(t.equal, mine, of))]
    dxs = [dx if dx is None else dx.clone() for dx in dxs]
    return {"y": returned, "dx": dxs, "grad": t.as_tensor(stage.grad).detach().clone(), "faults": faults}


def _halves(weight: torch.Tensor, xs: list, dys: list, ids: list, order: str, beside: bool = False) -> dict[str, Any]:
    """The reference: the chain rule in float64."""
    w = weight.double()
    ys = [torch.tanh(x.double() @ w) for x in xs]
    dzs = [dy.double() * (1 - y**2) for dy, y in zip(dys, ys, strict=True)]
    done = [int(word[1:]) for word in order.split() if word[0] == "W"]
    grad = sum((xs[i].double().T @ dzs[i] for i in done), start=torch.zeros_like(w))
    as_given = [t.to(weight.dtype) for t in ys], [(dz @ w.T).to(weight.dtype) for dz in dzs]
    return {"y": as_given[0], "dx": as_given[1], "grad": grad.to(weight.dtype), "faults": ANYTHING}


def _leaves_alone(answer: Answer) -> str | None:
    faults = answer.value["faults"]
    if "grad" in faults:
        return "the weight's gradient has changed before its W"
    if changed := [name for name in ("x", "dy") if name in faults]:
        return f"it changes {' and '.join(changed)}, which it was given: compute on a copy"
    return "it changes y after it has returned it: compute on a copy" if faults else None


def _nothing_kept(answer: Answer) -> str | None:
    """Check that what is alive in the end is smaller than any tensor of a microbatch, in cases with a small weight."""
    weight, kept = answer.inputs["weight"].nbytes, _kept(answer)
    least = min(t.nbytes for t in (*answer.inputs["xs"], *answer.inputs["dys"]))
    if kept >= least > 4 * weight:
        return f"after the last W {kept} bytes of the microbatches are still kept, and nothing will need them again"
    return None


def _b_alone(answer: Answer) -> str | None:
    """Check what B computes, in trials without W, and that no gradients are collected, in the others."""
    inputs, kept = answer.inputs, _kept(answer)
    n, weight = len(inputs["xs"]), inputs["weight"].nbytes
    tokens = sum(t.nbytes for t in (*inputs["xs"], *inputs["dys"]))
    if "W" in inputs["order"]:
        collected = kept > 2 * weight > 2 * tokens
        past = f"after the last W {kept} bytes are still kept beside self.grad: x.T @ dz of past microbatches"
        return past if collected else None
    made = sum(what == "matmul" for what, _ in answer.evidence[0].order)
    if made > 2 * n:
        return (f"{n} backwards make {made - n} matrix products; one product each is enough: B needs only dz @ W.T (F "
                "keeps y, and x.T @ dz belongs to W)")  # fmt: skip
    if kept > 3 * weight + 6 * tokens:
        return (f"after {n} B and before any W it holds {kept} bytes beside self.grad, about a weight for each "
                "microbatch: x.T @ dz was computed in B, and belongs to W")  # fmt: skip
    return None


def _kept(answer: Answer) -> int:
    """Bytes that are alive after the call, without `self.grad`."""
    return answer.evidence[0].alive - int(answer.inputs["weight"].nbytes)


def _stage_inputs(
    order: Callable[[int, Draw], str], n: int = 0, rows: int = 0, columns: int = 0, tokens: int = 0,
    ids: Sequence[int] = (), dtype: torch.dtype = torch.float32,
) -> Callable[[Draw], dict[str, Any]]:  # fmt: skip
    """Return a draw of inputs; a size that is 0 is drawn."""

    def sizes(draw: Draw) -> dict[str, Any]:
        count, high, wide = n or draw.integer(2, 4), rows or draw.integer(2, 5), columns or draw.integer(2, 5)
        xs = [draw.tensor(tokens or draw.integer(1, 4), high, dtype=dtype) for _ in range(count)]
        dys = [draw.tensor(len(x), wide, dtype=dtype) for x in xs]
        names = list(ids) or draw.random.sample(range(20), count)
        weight = draw.tensor(high, wide, dtype=dtype)
        return {"weight": weight, "xs": xs, "dys": dys, "ids": names, "order": order(count, draw)}

    return sizes


def _two_stages(draw: Draw) -> dict[str, Any]:
    """Inputs of two stages with the same ids: a store that they share returns the other stage's tensors."""
    return {**_stage_inputs(_w_last, n=3)(draw), "beside": True}


def _w_last(n: int, draw: Draw) -> str:
    return " ".join(f"{kind}{i}" for kind in "FBW" for i in range(n))


def _no_w(n: int, draw: Draw) -> str:
    return " ".join(f"{kind}{i}" for kind in "FB" for i in range(n))


def _mixed(n: int, draw: Draw) -> str:
    order = [f"F{i}" for i in range(n)] + [f"{k}{i}" for i in reversed(range(n)) for k in "BW"]
    return " ".join(order)


def _one_w(n: int, draw: Draw) -> str:
    """The order in which the second microbatch's W is done and the others' are not yet."""
    return " ".join([*(f"F{i}" for i in range(n)), *(f"B{i}" for i in range(n)), "W1"])


def _one_by_one(n: int, draw: Draw) -> str:
    return " ".join(f"{kind}{i}" for i in range(n) for kind in "FBW")


_ONE = {  # the example by hand of the lab
    "weight": torch.eye(2), "xs": [torch.ones(1, 2)], "dys": [torch.ones(1, 2)], "ids": [0], "order": "F0 B0 W0",
}  # fmt: skip
_TWO = {
    "weight": torch.tensor([[1.0, 2.0], [0.0, 1.0]]),
    "xs": [torch.tensor([[0.5, 0.0]]), torch.tensor([[0.25, 0.25]])],
    "dys": [torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 2.0]])],
    "ids": [0, 1], "order": "F0 F1 B0 W0 B1 W1",
}  # fmt: skip
_LONG: dict[str, Any] = {"n": 3, "rows": 3, "columns": 4, "tokens": 64}  # a microbatch is far larger than the weight
_WIDE: dict[str, Any] = {"n": 12, "rows": 48, "columns": 40, "tokens": 1}  # the weight is larger than all of them

STAGE = Exercise(
    "split_stage",
    function="SplitStage",
    drive=_drive_stage,
    reference=_halves,
    accept=[_leaves_alone],
    cases=[
        Case("one microbatch, weight 1 on the diagonal; two, weight [[1, 2], [0, 1]]", _ONE, fixed=[_TWO]),
        Case("several microbatches, each with its W; then nothing is kept", _stage_inputs(_w_last), points=2,
             hidden=True, accept=[_nothing_kept], fixed=[
                _stage_inputs(_w_last, **_LONG), _stage_inputs(_one_by_one, **_LONG, ids=[4, 7, 4]),
                _stage_inputs(_mixed, **_LONG), _stage_inputs(_w_last, dtype=torch.float64)]),
        Case("the last microbatch goes back first", _stage_inputs(_mixed), hidden=True, fixed=[
            _stage_inputs(_one_w, n=3), _stage_inputs(_one_by_one, n=3, ids=[2, 0, 2]), _two_stages]),
        Case("B computes the input's half and nothing else", _stage_inputs(_w_last), hidden=True,
             accept=[_b_alone], fixed=[_stage_inputs(_no_w, **_WIDE), _stage_inputs(_w_last, **_WIDE)]),
    ],
    errors={"KeyError": "Under this microbatch's number nothing is kept any more, or not yet: what F keeps, B and W "
                        "both need."},
    idea="Which tensors does B need, which does W need, and which call is the last to need each of them?",
    hint="Keep x and y by microbatch. With dz = dy * (1 - y*y): B returns dz @ W.T, W *adds* x.T @ dz to self.grad, "
    "and takes the microbatch out of what is kept.",
)  # fmt: skip
