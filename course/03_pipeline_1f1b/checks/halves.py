"""Lab 03, a backward in two halves: what B returns, what W adds and when, and what is kept in between.

Values are compared with the chain rule in float64. A dispatch mode in the drive measures what a stage keeps: it knows
every tensor that was made and is still alive, whatever holds it:

| inputs                                    | a limit on what is kept finds                              |
|-------------------------------------------|------------------------------------------------------------|
| microbatches much larger than the weight  | after the last W: x, y, dy or dz that was not taken out    |
| a weight much larger than all of them     | before the first W: weight gradients, computed in B        |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from labkit.compare import difference
from labkit.exercises import Answer, Case, Draw, Exercise


def _drive_stage(
    exercise: Any, weight: Any, xs: Any, dys: Any, ids: Any, order: Any, beside: bool = False
) -> dict[str, Any]:  # fmt: skip
    """Run the learner's stage; with `beside` a second stage on this rank takes the same steps with other numbers."""
    import gc
    import weakref

    import torch as t
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        """Counts matrix products, and the bytes of all tensors that were made while it is active and are still
        alive."""

        def __init__(self):
            super().__init__()
            self.products, self.bytes = 0, {}

        def add(self, tensor, counts=True):
            storage = tensor.untyped_storage()
            address = storage._cdata
            if address not in self.bytes:
                self.bytes[address] = storage.nbytes() if counts else 0
                weakref.finalize(storage, self.bytes.pop, address, None).atexit = False

        def held(self):
            gc.collect()
            return sum(self.bytes.values())

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            flat = [a for a in t.utils._pytree.tree_leaves((args, kwargs or {})) if isinstance(a, t.Tensor)]
            for one in flat:
                self.add(one, counts=False)
            result = func(*args, **(kwargs or {}))
            for one in t.utils._pytree.tree_leaves(result):
                if isinstance(one, t.Tensor):
                    self.add(one)
            name = func._schema.name.split("::")[1]
            self.products += name in ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "matmul", "linear")
            return result

    gc.freeze()  # what was there before is left out of every collection
    stage, watch = exercise.SplitStage(weight), Watch()
    other = exercise.SplitStage(-weight) if beside else None
    n = len(xs)
    given = [[x.clone() for x in xs], [dy.clone() for dy in dys]]
    for one in (*given[0], *given[1]):
        watch.add(one)
    ys, dxs, early, made, halfway = [None] * n, [None] * n, 0.0, {"F": 0, "B": 0, "W": 0}, 0
    returned: list[Any] = [None] * n
    for word in order.split():
        kind, i = word[0], int(word[1:])
        before, counted = stage.grad.clone(), watch.products
        if kind == "W" and not made["W"]:
            made["W"], halfway = 1, watch.held()
        with watch:
            if kind == "F":
                ys[i] = stage.forward(ids[i], given[0][i]).detach()
            elif kind == "B":
                dxs[i] = stage.backward(ids[i], given[1][i]).detach()
            else:
                stage.weights(ids[i])
        if other is not None:
            try:
                second = {"F": other.forward, "B": other.backward, "W": other.weights}[kind]
                second(ids[i], *({"F": [2 * xs[i]], "B": [-dys[i]], "W": []}[kind]))
            except Exception:  # what it does to this stage is seen here
                other = None
        if kind == "F":
            returned[i] = t.as_tensor(ys[i]).clone()
        made[kind] += watch.products - counted
        if kind != "W":
            early = max(early, float((stage.grad - before).abs().max()))
    pairs = ("x", given[0], xs), ("dy", given[1], dys), ("y", ys, returned)
    changed = [name for name, mine, of in pairs if not all(map(t.equal, mine, of))]
    said = {"y": [y if y is None else y.clone() for y in ys], "dx": [d if d is None else d.clone() for d in dxs]}
    grad = t.as_tensor(stage.grad).detach().clone()
    watch.bytes.pop(stage.grad.untyped_storage()._cdata, None)
    del ys, returned, dxs, given, pairs, one, before
    return {
        **said,
        "grad": grad,
        "early": early,
        "products": made,
        "changed": changed,
        "halfway": halfway,
        "held": watch.held(),
    }


def _halves(
    weight: torch.Tensor, xs: list, dys: list, ids: list, order: str, beside: bool = False
) -> dict[str, Any]:  # fmt: skip
    """The reference: the chain rule in float64."""
    w = weight.double()
    ys = [torch.tanh(x.double() @ w) for x in xs]
    dzs = [dy.double() * (1 - y**2) for dy, y in zip(dys, ys, strict=True)]
    done = [int(word[1:]) for word in order.split() if word[0] == "W"]
    grad = sum((xs[i].double().T @ dzs[i] for i in done), start=torch.zeros_like(w))
    as_given = [t.to(weight.dtype) for t in ys], [(dz @ w.T).to(weight.dtype) for dz in dzs]
    return {"y": as_given[0], "dx": as_given[1], "grad": grad.to(weight.dtype)}


def _input_half(x: torch.Tensor, y: torch.Tensor, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (dy * (1 - y**2)) @ w.T


def _weight_half(x: torch.Tensor, y: torch.Tensor, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.T @ (dy * (1 - y**2))


_OF_DX = {  # what B returns in place of dz @ W.T
    "this is dy @ W.T; the slope of tanh is missing": lambda x, y, dy, w: dy @ w.T,
    "the slope of tanh is 1 - y², not 1 - y": lambda x, y, dy, w: (dy * (1 - y)) @ w.T,
    "the slope of tanh is 1 - y², of the output; this takes x or z": lambda x, y, dy, w: (dy - dy * (x @ w) ** 2) @ w.T,
    "the slope of tanh is 1 - y², of the output; this takes x": lambda x, y, dy, w: (dy * (1 - x**2)) @ w.T,
    "this is dz @ W; the weight is to be transposed": lambda x, y, dy, w: (dy * (1 - y**2)) @ w,
    "this is dz; the product with the weight is missing": lambda x, y, dy, w: dy * (1 - y**2),
}  # fmt: skip
_OF_GRAD = {  # what a W adds in place of x.T @ dz
    "it adds up x.T @ dy; the slope of tanh is missing": lambda x, y, dy, w: x.T @ dy,
    "it adds up dz.T @ x, which is the gradient transposed": lambda x, y, dy, w: (dy * (1 - y**2)).T @ x,
    "the slope of tanh is 1 - y², not 1 - y": lambda x, y, dy, w: x.T @ (dy * (1 - y)),
    "it adds up y.T @ dz; the input x belongs there": lambda x, y, dy, w: y.T @ (dy * (1 - y**2)),
    "each W divides by the number of tokens; nothing is averaged": lambda x, y, dy, w: x.T @ (dy * (1 - y**2)) / len(x),
}


def _recognised(name: str, answer: Answer, i: int) -> str | None:
    """Name the mistake that leads to this dx of the i-th microbatch, or to this gradient."""
    inputs, got = answer.inputs, answer.value
    w = inputs["weight"].double()
    given = [
        (x.double(), torch.tanh(x.double() @ w), dy.double()) for x, dy in zip(inputs["xs"], inputs["dys"], strict=True)
    ]
    if name == "dx":
        if known := next((said for said, wrong in _OF_DX.items() if _gives(wrong, [given[i]], w, got["dx"][i])), None):
            return known
        other = [(x, y, given[i][2]) for j, (x, y, _) in enumerate(given) if j != i]
        if any(_gives(_input_half, [one], w, got["dx"][i]) for one in other):
            return "it is computed with y of another microbatch; several are under way"
    if name == "grad":
        places = [int(word[1:]) for word in inputs["order"].split() if word[0] == "W"]
        done = [given[place] for place in places]
        if not got["grad"].any():
            return "self.grad is still 0, and each W *adds* to it"
        if len(done) > 1 and _gives(_weight_half, done[-1:], w, got["grad"]):
            return "it is that of the last W alone; each W *adds* its part"
        ids = inputs["ids"]
        first = [given[place] for place in places if ids.index(ids[place]) == place]
        if len(first) < len(done) and _gives(_weight_half, first, w, got["grad"]):
            return "a microbatch of the next batch, with a number that was there before, is left out"
        others = [one for i, one in enumerate(given) if i not in places]
        if len(done) == 1 and any(_gives(_weight_half, [one], w, got["grad"]) for one in others):
            return "it is that of another microbatch than the one that W was called with"
        if len(done) > 1 and any(
            _gives(_weight_half, [(x, y, dy) for x, _, _ in done], w, got["grad"]) for _, y, dy in given
        ):
            return "every W multiplies with the dz of one and the same microbatch; each has its own"
        return next((said for said, wrong in _OF_GRAD.items() if _gives(wrong, done, w, got["grad"])), None)
    return None


def _gives(wrong: Callable[..., torch.Tensor], given: list[tuple], w: torch.Tensor, got: torch.Tensor) -> bool:
    """Whether the sum of a formula over these (x, y, dy) equals `got`; False where the formula's shapes do not fit."""
    try:
        total = sum((wrong(*one, w) for one in given), start=torch.zeros((), dtype=w.dtype))
    except RuntimeError:
        return False
    return difference(got, total.to(got.dtype)) is None


def _right_halves(answer: Answer) -> str | None:
    want, got = _halves(**answer.inputs), answer.value
    if answer.inputs.get("beside") and any(difference(got[name], want[name]) for name in ("y", "dx", "grad")):
        return ("with a second stage on the same rank, whose microbatches have the same numbers, it is wrong: what is "
                "kept belongs to each stage (`self`), not to the class")  # fmt: skip
    for name, what in (("y", "the output"), ("dx", "the gradient of the input"), ("grad", "the weight's gradient")):
        pairs = zip(got[name], want[name], strict=True) if name != "grad" else [(got[name], want[name])]
        for i, (one, other) in enumerate(pairs):
            if phrase := difference(one, other):
                if known := _recognised(name, answer, i):
                    return f"{what} is wrong: {known}"
                where = f", first for microbatch {answer.inputs['ids'][i]}" if name != "grad" else ""
                return f"{what} is wrong{where}: {phrase}"
    return None


def _not_early(answer: Answer) -> str | None:
    return "the weight's gradient has changed before its W" if answer.value["early"] > 0 else None


def _leaves_its_inputs(answer: Answer) -> str | None:
    changed = [name for name in answer.value["changed"] if name != "y"]
    if changed:
        return f"it changes {' and '.join(changed)}, which it was given: compute on a copy"
    return "it changes y after it has returned it: compute on a copy" if answer.value["changed"] else None


def _b_alone(answer: Answer) -> str | None:
    n, made = len(answer.inputs["xs"]), answer.value["products"]["B"]
    if made > n:
        return (f"{n} backwards make {made} matrix products; one product each is enough: B needs only dz @ W.T (F "
                "keeps y, and x.T @ dz belongs to W)")  # fmt: skip
    weight = answer.inputs["weight"].nbytes
    room = 4 * weight + 6 * _tokens(answer.inputs)
    if answer.value["halfway"] > room:
        return (f"after {n} B and before any W it holds {answer.value['halfway']} bytes, about a weight for each "
                "microbatch: x.T @ dz was computed in B, and belongs to W")  # fmt: skip
    return None


def _no_gradients_kept(answer: Answer) -> str | None:
    """Check that after the last W less than two weights are alive beside `self.grad`: gradients are added, not
    collected."""
    inputs, held = answer.inputs, answer.value["held"]
    if held > 2 * inputs["weight"].nbytes > 2 * _tokens(inputs):
        return f"after the last W {held} bytes are still kept beside self.grad: x.T @ dz of past microbatches"
    return None


def _nothing_kept(answer: Answer) -> str | None:
    """Check that what is alive in the end is smaller than any tensor of a microbatch, in cases with a small weight."""
    inputs, held = answer.inputs, answer.value["held"]
    least = min(t.nbytes for t in (*inputs["xs"], *inputs["dys"]))
    if held >= least and least > 4 * inputs["weight"].nbytes:
        return f"after the last W {held} bytes of the microbatches are still kept, and nothing will need them again"
    return None


def _tokens(inputs: dict[str, Any]) -> int:
    """Bytes of all x and dy."""
    return sum(t.nbytes for t in (*inputs["xs"], *inputs["dys"]))


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
    """Two stages with the same ids: a store that they share returns the other stage's tensors, without a KeyError."""
    return {**_stage_inputs(_w_last, n=3)(draw), "beside": True}


def _w_last(n: int, draw: Draw) -> str:
    return " ".join(f"{kind}{i}" for kind in "FBW" for i in range(n))


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
_WIDE: dict[str, Any] = {
    "n": 12,
    "rows": 48,
    "columns": 40,
    "tokens": 1,
}  # the weight is far larger than all microbatches

STAGE = Exercise(
    "split_stage",
    function="SplitStage",
    drive=_drive_stage,
    accept=[_not_early, _leaves_its_inputs, _right_halves],
    cases=[
        Case("one microbatch, weight 1 on the diagonal; two, weight [[1, 2], [0, 1]]", _ONE, fixed=[_TWO],
             errors={"KeyError": "Under this microbatch's number nothing is kept any more, or not yet: what F keeps, B "
                                 "and W both need."}),
        Case("several microbatches, each with its W; then nothing is kept", _stage_inputs(_w_last), points=2,
             hidden=True, accept=[_nothing_kept], fixed=[
                _stage_inputs(_w_last, **_LONG), _stage_inputs(_one_by_one, **_LONG, ids=[4, 7, 4]),
                _stage_inputs(_mixed, **_LONG), _stage_inputs(_w_last, dtype=torch.float64)]),
        Case("the last microbatch goes back first", _stage_inputs(_mixed), hidden=True, fixed=[
            _stage_inputs(_one_w, n=3), _stage_inputs(_one_by_one, n=3, ids=[2, 0, 2]), _two_stages]),
        Case("B computes the input's half and nothing else", _stage_inputs(_w_last), hidden=True,
             accept=[_b_alone, _no_gradients_kept],
             fixed=[_stage_inputs(_w_last, **_WIDE)]),
    ],
    idea="Which tensors does B need, which does W need, and which call is the last to need each of them?",
    hint="Keep x and y by microbatch. With dz = dy * (1 - y*y): B returns dz @ W.T, W *adds* x.T @ dz to self.grad, "
    "and takes the microbatch out of what is kept.",
)  # fmt: skip
