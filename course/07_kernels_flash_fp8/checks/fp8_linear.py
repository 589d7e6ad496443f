"""Checks of lab 07, third part: a linear layer in FP8, the tensors that it keeps for its backward pass, and its
scales."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from labkit.compare import difference
from labkit.exercises import Answer, Case, Draw, Exercise

from .fp8 import E4M3, E5M2, to_fp8


def _drive_linear(exercise: Any, x: Any, weight: Any, dy: Any, scales: Any, later: Any,
                  views: str = "") -> dict[str, Any]:  # fmt: skip
    """Run the learner's layer. `kept` counts the bytes that are alive after the forward pass and were not before,
    including inputs that only the layer keeps. `views` names those of x and dy that are transposed views."""
    import gc
    import weakref

    import torch as t

    class Scale:
        def __init__(self, scale):
            self.scale, self.noted = scale, []

        def note(self, tensor):
            self.noted.append(float(tensor.detach().abs().max()))

    def storages(tensors):
        return {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}

    def numbers(value, seen):
        """The bytes of plain numbers and arrays that an object refers to through lists, dicts and cells."""
        if id(value) in seen:
            return 0
        seen.add(id(value))
        if isinstance(value, dict):
            return sum(numbers(one, seen) for one in value.values())
        if isinstance(value, list | tuple | set):
            return sum(8 if isinstance(one, float) else numbers(one, seen) for one in value)
        if isinstance(value, bytes | bytearray):
            return len(value)
        return int(value.nbytes) if type(value).__module__ == "numpy" and hasattr(value, "nbytes") else 0

    x, dy = (tensor.T.contiguous().T if name in views.split() else tensor for name, tensor in (("x", x), ("dy", dy)))
    states = [Scale(s) for s in scales]
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    inner = [leaf * 1.0 for leaf in leaves]  # as a layer's inputs are: made by what comes before, and free afterwards
    given = [(weakref.ref(one), storages([one])) for one in inner]
    packed = {}

    def pack(tensor):
        packed.update(storages([tensor]))
        return tensor

    gc.freeze()  # what is there already is no longer listed
    names = {"x": 0, "weight": 1}
    with t.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = exercise.Fp8Linear.apply(*inner, *states)
    changed = [name for name, i in names.items() if not t.equal(inner[i], leaves[i])]
    del inner
    kept = {**packed, **storages(one for one in gc.get_objects() if type(one) in (t.Tensor, t.nn.Parameter))}
    gc.unfreeze()
    for alive, storage in given:
        kept.update(storage if alive() is not None else {})
    kept.pop(y.untyped_storage().data_ptr(), None)
    module = {name: one for name, one in vars(exercise).items() if not name.startswith("__")}
    seen: set[int] = set()
    plain = numbers(vars(y.grad_fn) if hasattr(y.grad_fn, "__dict__") else {}, seen) + numbers(module, seen)
    for state, scale in zip(states, later, strict=True):
        state.scale = scale
    y.backward(dy)
    noted = [max(state.noted, default=0.0) for state in states]
    kept_bytes = sum(kept.values()) + plain
    return {"y": y, "dx": leaves[0].grad, "dw": leaves[1].grad, "noted": noted, "kept": kept_bytes, "changed": changed}


def fp8_linear(x: Any, weight: Any, dy: Any, scales: Any, later: Any, gradient: dict[str, Any] = E5M2,
               stale: bool = False, of_x: dict[str, Any] = E4M3, of_w: dict[str, Any] = E4M3, views: str = "",
               ) -> dict[str, Any]:  # fmt: skip
    """The right answer; `kept` and `changed` are not compared here. `gradient`, `of_x` and `of_w` are formats; where
    x and dy lie in memory (`views`) changes no number."""
    sx, sw, sdy = scales
    used = later[2]  # the gradient is cast when it comes
    formats = ((x, sx, of_x), (weight, sw, of_w), (dy, used, gradient))
    qx, qw, qdy = (to_fp8(t * s, **f).double() for t, s, f in formats)
    bx, bw = (later[0], later[1]) if stale else (sx, sw)
    amaxes = [float(t.detach().abs().max()) for t in (x, weight, dy)]
    return {
        "y": (qx @ qw.T / (sx * sw)).float(), "dx": (qdy @ qw / (used * bw)).float(),
        "dw": (qdy.T @ qx / (used * bx)).float(), "noted": amaxes,
    }  # fmt: skip


def _dy_early(**i: Any) -> dict[str, Any]:
    """A mistake: dy is cast with the scale that its state had in the forward pass."""
    return fp8_linear(**{**i, "later": [*i["later"][:2], i["scales"][2]]})


def _current(*names: str, **i: Any) -> dict[str, Any]:
    """A mistake: those of x, W and dy that are named are cast with current scales."""
    tops = {"x": 448.0, "weight": 448.0, "dy": 57344.0}
    own = {name: top / i[name].detach().abs().max().item() for name, top in tops.items() if name in names}
    scales = [own.get(name, scale) for name, scale in zip(tops, i["scales"], strict=True)]
    return fp8_linear(**{**i, "scales": scales, "later": [*i["later"][:2], own.get("dy", i["later"][2])]})


def _linear_right(answer: Answer) -> str | None:
    i, got = answer.inputs, dict(answer.value)
    got.pop("kept")
    if changed := got.pop("changed"):
        return f"it changes its input `{changed[0]}`, which belongs to the caller: compute on a copy"
    want = fp8_linear(**i)
    made = answer.evidence[0].notes.get("product", [])
    if len(made) != 3:
        return f"`product` is called {len(made)} times; forward has one product, backward two"
    if got["y"].dtype != torch.float32:
        return f"y has the dtype {str(got['y'].dtype).removeprefix('torch.')}; return float32"
    if not (phrase := difference(got, want)):
        return None
    if any(one is not None and not one.isfinite().all() for one in (got["y"], got["dx"], got["dw"])):
        return "there is infinity or NaN: some numbers lie beyond the top here, where to_fp8 gives ±top"
    for wrong, why in (
        (fp8_linear(**i, gradient=E4M3), "dy goes to E5M2: gradients need range more than precision"),
        (fp8_linear(**i, of_x=E5M2), "x goes to E4M3: it needs precision more than range"),
        (fp8_linear(**i, of_w=E5M2), "W goes to E4M3: it needs precision more than range"),
        (fp8_linear(**i, of_x=E5M2, of_w=E5M2), "x and W go to E4M3: they need precision more than range"),
        (fp8_linear(**i, stale=True), "between forward and backward the scales moved on: divide by the scales "
                                      "that x and W were cast with"),
        (_dy_early(**i), "dy is cast with the scale that sdy has when dy comes, not with that of the forward pass"),
        (_current("x", "weight", **i), "x and W are cast with scales of their own amax here; take .scale of their "
                                       "states"),
        (_current("x", **i), "x is cast with a scale of its own amax here; take .scale of its state"),
        (_current("weight", **i), "W is cast with a scale of its own amax here; take .scale of its state"),
        (_current("dy", **i), "dy is cast with a scale of its own amax here; take .scale of its state"),
        ({**want, "noted": got["noted"]}, "note(x), note(weight), note(dy): each of the tensors before it is scaled"),
    ):  # fmt: skip
        if not difference(got, wrong):
            return why
    for name in ("y", "dx", "dw"):
        a, b = got[name], want[name]
        if a is None or a.shape != b.shape:
            return f"{name} has not the shape {list(b.shape)}"
        if not difference(a, b):
            continue
        ratio = (a / b)[b.abs() > 1e-3 * b.abs().max()]
        if len(ratio) and (ratio - ratio[0]).abs().max() < 1e-3 * ratio[0].abs():
            return f"{name} is off by one factor everywhere: a scale is missing, there twice, or another tensor's"
    return f"{phrase.split(':')[0]} is wrong"


def _kept(answer: Answer) -> str | None:
    """Check the bytes that are kept; two scales and the like may be tensors of 64 bytes."""
    i, kept = answer.inputs, answer.value["kept"]
    most = i["x"].numel() + i["weight"].numel()
    if kept <= most + 64:
        return None
    return (f"{kept} bytes are kept for the backward pass, on ctx or elsewhere; {most} are enough, one a number: keep "
            "one FP8 copy of each, and neither x nor W")  # fmt: skip


def _linear(
    move: float = 1.0, of_dy: float = 1.0, sizes: Sequence[int] = (), grown: float = 1.0, views: str = ""
) -> Callable[[Draw], dict[str, Any]]:
    def inputs(draw: Draw) -> dict[str, Any]:
        n, i, o = sizes or (draw.integer(2, 5), draw.integer(2, 6), draw.integer(2, 6))
        x, w, dy = draw.tensor(n, i), draw.tensor(o, i) / 8, draw.tensor(n, o) / 1000
        dy[0, 0] = 0.9 / 1000 * 1e-4  # what E4M3 has no number for
        tops = ((x, 448.0), (w, 448.0), (dy, 57344.0))
        scales = [grown * float(2.0 ** math.floor(math.log2(t / v.abs().max().item()))) for v, t in tops]
        moved = [s * by for s, by in zip(scales, (move, move / 2, of_dy), strict=True)]
        later = moved if move != 1.0 else scales
        return {"x": x, "weight": w, "dy": dy, "scales": scales, "later": later, **({"views": views} if views else {})}

    return inputs


_HALVES = {
    "x": torch.tensor([[1.0, 2.0], [-0.5, 300.0]]), "weight": torch.tensor([[1.0, -1.0], [0.1, 0.25], [2.0, 0.0]]),
    "dy": torch.tensor([[0.5, 1.0, -2.0], [0.3, 0.0, 1.0]]), "scales": [1.0, 2.0, 4.0], "later": [1.0, 2.0, 4.0],
}  # fmt: skip

FP8_LINEAR = Exercise(
    "fp8_linear",
    drive=_drive_linear,
    accept=[_linear_right],
    cases=[
        Case("2 x 2 times 3 x 2", _HALVES),
        Case("other sizes; x or dy a transposed view; scales that fill the range, and too large ones", _linear(),
             hidden=True, points=2, fixed=[
            _linear(sizes=(5, 3, 2)), _linear(sizes=(2, 4, 7)), _linear(sizes=(4, 4, 3), grown=4.0),
            _linear(sizes=(3, 5, 4), views="dy"), _linear(sizes=(4, 3, 6), views="x dy")]),
        Case("backward, after the scales have moved on", _linear(0.25, 2.0**-9), hidden=True, fixed=[
            _linear(0.25, 4.0, (4, 3, 5))]),
        Case("one byte a number is kept", _linear(sizes=(16, 24, 20)), hidden=True, accept=[_kept], fixed=[
            _linear(0.5, 0.5, (24, 12, 16))]),
    ],
    idea="Write down the shapes of the three products, and for each factor which of its dims is the sum's: that dim "
    "must come last in memory.",
    hint="forward: note both; qx = E4M3(x sx), qw = E4M3(W sw) as float8 tensors, and .contiguous(): a view that is "
    "cast lies in memory as before; y = product(qx, qw) / (sx sw). Keep qx.T.contiguous() and qw.T.contiguous(), "
    "and both scales as they are now. backward: note dy, qdy = E5M2(dy sdy), contiguous again; dx = product(qdy, "
    "qwT) / (sdy sw), dW = product(qdy.T.contiguous(), qxT) / (sdy sx).",
)  # fmt: skip
