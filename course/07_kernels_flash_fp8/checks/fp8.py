"""Checks of lab 07, third part: rounding to eight bits, scales of tiles, and a linear layer that is made of both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from labkit.checks import difference
from labkit.exercises import Answer, Case, Draw, Exercise, Mistake

E4M3: dict[str, Any] = {"digits": 3, "lowest": -6, "top": 448.0}
E5M2: dict[str, Any] = {"digits": 2, "lowest": -14, "top": 57344.0}
# Small formats that no dtype of torch has: what is rounded by asking torch is wrong there.
OTHERS = (
    {"digits": 1, "lowest": 0, "top": 6.0}, {"digits": 3, "lowest": 0, "top": 7.5},
    {"digits": 2, "lowest": -2, "top": 28.0}, {"digits": 4, "lowest": -2, "top": 15.5},
)  # fmt: skip

# --------------------------------------------------------------------------------------------------------- rounding


def grid(digits: int, lowest: int, top: float) -> torch.Tensor:
    """All numbers of a format that are not negative, ascending, float64. Even places have an even last digit."""
    steps = 2**digits
    numbers = [m / steps * 2.0**lowest for m in range(steps)]
    exponent = lowest
    while 2.0**exponent <= top:
        numbers += [(1 + m / steps) * 2.0**exponent for m in range(steps)]
        exponent += 1
    return torch.tensor([n for n in numbers if n <= top], dtype=torch.float64)


def to_fp8(x: torch.Tensor, digits: int, lowest: int, top: float) -> torch.Tensor:
    """By looking for the two neighbours in the grid, a way of its own; see `tests/course/test_lab07.py` for torch's."""
    numbers = grid(digits, lowest, top)
    a = x.double().abs().clamp(max=top).nan_to_num(0.0)
    above = torch.searchsorted(numbers, a.contiguous()).clamp(1, len(numbers) - 1)
    low, high = numbers[above - 1], numbers[above]
    up = (a - low > high - a) | ((a - low == high - a) & (above % 2 == 0))
    nearest = torch.where(up, high, low).to(torch.float32)
    return torch.where(x.isnan(), x.float(), torch.copysign(nearest, x.float()))


def _rounded(x: torch.Tensor, digits: int, lowest: int, top: float, how: Callable[[torch.Tensor], torch.Tensor],
             clamp: bool = True, small: str = "") -> torch.Tensor:  # fmt: skip
    """A wrong cast: another rounding, no clamp, or no numbers below the lowest exponent."""
    x = x.float()
    x = x.clamp(-top, top) if clamp else x
    exponent = (torch.frexp(x)[1] - 1).double()
    step = torch.exp2((exponent if small == "normal" else exponent.clamp(min=lowest)) - digits)
    y = (how(x.double() / step) * step).float()
    return torch.where(x.abs() < 2.0**lowest, torch.zeros_like(y), y) if small == "zero" else y


def _wrong(**how: Any) -> Callable[..., torch.Tensor]:
    return lambda **i: _rounded(**i, **{"how": torch.round, **how})


def _awkward(draw: Draw, digits: int, lowest: int, top: float) -> dict[str, Any]:
    """Ties, numbers below the lowest exponent, beyond the top, of both signs, and zeros."""
    numbers = grid(digits, lowest, top)
    ties = (numbers[1:] + numbers[:-1]) / 2
    pick = torch.randint(len(ties), (12,), generator=draw.generator)
    x = torch.cat((
        ties[pick].float(), draw.tensor(12).abs() * 2.0 ** (lowest - 1), draw.tensor(12) * 2.0 ** (lowest + 2),
        draw.tensor(6) * top, torch.tensor([top, 1.2 * top, 100 * top, 0.0, ties[0].item(), 3 * ties[0].item()]),
    ))  # fmt: skip
    signs = torch.randint(2, x.shape, generator=draw.generator) * 2 - 1
    order = torch.randperm(len(x), generator=draw.generator)
    return {"x": (x * signs)[order].view(4, -1), "digits": digits, "lowest": lowest, "top": top}


def _every(format: dict[str, Any]) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: _awkward(draw, **format)


_BY_HAND = torch.tensor([17.0, -19.0, 21.0, 0.3, -1.06, 447.0, 1000.0, 0.001])

TO_FP8 = Exercise(
    "to_fp8",
    reference=to_fp8,
    rtol=0.0,
    atol=0.0,
    cases=[
        Case("eight numbers in E4M3", {"x": _BY_HAND, **E4M3}),
        Case("E4M3: ties, tiny ones, too large ones", _every(E4M3), hidden=True, points=2),
        Case("E5M2", _every(E5M2), hidden=True),
        Case("other formats", lambda draw: _awkward(draw, **draw.choice(OTHERS)), hidden=True, points=2),
        Case("numbers of the format stay as they are", lambda draw: {
            "x": torch.cat((grid(**E4M3), -grid(**E4M3))).float(), **E4M3}, hidden=True),
    ],
    mistakes=[
        Mistake(_wrong(clamp=False), "Beyond the top: clamp to ±top first. (Some casts give NaN there.)"),
        Mistake(_wrong(how=lambda t: (t + 0.5 * t.sign()).trunc()), "Half-way goes to the *even* digit, not away from "
                "zero: torch.round does that."),
        Mistake(_wrong(how=lambda t: (t + 0.5).floor()), "Half-way goes to the *even* digit, not up: torch.round does "
                "that."),
        Mistake(_wrong(how=torch.trunc), "This cuts digits off. Round to the nearest."),
        Mistake(_wrong(how=torch.floor), "This rounds down. Round to the nearest."),
        Mistake(_wrong(small="normal"), "Below 2**lowest steps get no finer: the exponent is at least lowest."),
        Mistake(_wrong(small="zero"), "Below 2**lowest there are still numbers: multiples of 2**(lowest - digits)."),
        Mistake(lambda x, digits, lowest, top: x.clamp(-448, 448).to(torch.float8_e4m3fn).float(), "Other formats than "
                "E4M3 are asked too."),
    ],
    hint="x = clamp(x, ±top); e = the exponent of |x| (torch.frexp(x)[1] - 1), at least lowest; the steps there are "
    "2**(e - digits); the answer is round(x / step) * step.",
)  # fmt: skip

# ----------------------------------------------------------------------------------------------------- scales of tiles


def _amaxes(x: torch.Tensor, tile: Sequence[int]) -> torch.Tensor:
    m, n = tile
    rows = [x[i : i + m] for i in range(0, x.shape[0], m)]
    return torch.stack([torch.stack([r[:, j : j + n].abs().amax() for j in range(0, x.shape[1], n)]) for r in rows])


def tile_scales(x: torch.Tensor, tile: Sequence[int], top: float) -> torch.Tensor:
    a = _amaxes(x, tile).double()
    exponents = [[math.floor(math.log2(top / v)) if v > 0 else 0 for v in row] for row in a.tolist()]
    return torch.exp2(torch.tensor(exponents, dtype=torch.float64)).float()


def _tiles(draw: Draw) -> dict[str, Any]:
    tile = [draw.choice([1, 2, 3]), draw.integer(2, 5)]
    x = draw.tensor(tile[0] * draw.integer(2, 4), tile[1] * draw.integer(2, 4))
    return {"x": x * torch.exp(3 * draw.tensor(*x.shape)), "tile": tile, "top": draw.choice([448.0, 57344.0])}


def _ragged(draw: Draw) -> dict[str, Any]:
    inputs = _tiles(draw)
    return {**inputs, "x": inputs["x"][:, :-1].clone()}


def _with_zeros(draw: Draw) -> dict[str, Any]:
    inputs = _tiles(draw)
    inputs["x"][: inputs["tile"][0], : inputs["tile"][1]] = 0.0
    return inputs


def _negative(draw: Draw) -> dict[str, Any]:
    inputs = _tiles(draw)
    return {**inputs, "x": -inputs["x"].abs()}


def _scales(of: Callable[[torch.Tensor, float], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, tile, top: of(_amaxes(x, tile).double(), top).float()


TILE_SCALES = Exercise(
    "tile_scales",
    reference=tile_scales,
    rtol=0.0,
    atol=0.0,
    cases=[
        Case("2 x 4, tiles of 1 x 2", {"x": torch.tensor([[1.0, -2.0, 0.1, 0.2], [3.0, 0.0, 448.0, 449.0]]),
             "tile": [1, 2], "top": 448.0}),
        Case("the whole tensor as one tile", lambda draw: {**(i := _tiles(draw)), "tile": list(i["x"].shape)},
             hidden=True),
        Case("other tiles", _tiles, hidden=True, points=2),
        Case("a last tile that is not full", _ragged, hidden=True),
        Case("negative numbers; a tile of zeros", _negative, hidden=True),
        Case("a tile of zeros gets the scale 1", _with_zeros, hidden=True),
    ],
    mistakes=[
        Mistake(lambda **i: 1 / tile_scales(**i), "This is the inverse. x is *multiplied* by the scale."),
        Mistake(_scales(lambda a, top: torch.where(a > 0, top / a, 1.0)), "Round it down to a power of two."),
        Mistake(_scales(lambda a, top: torch.where(a > 0, torch.exp2((top / a).log2().ceil()), 1.0)),
                "Rounded up, the largest number of the tile goes beyond the top. Round down."),
        Mistake(_scales(lambda a, top: torch.where(a > 0, torch.exp2((top / a).log2().round()), 1.0)),
                "Rounded to the nearest power, some tiles go beyond the top. Round down."),
        Mistake(lambda x, tile, top: tile_scales(x.clamp(min=0), tile, top), "The largest *magnitude*: abs first."),
    ],
    hint="For each tile amax = largest |x|; scale = 2 ** floor(log2(top / amax)), or 1 where amax is 0. Cut rows with "
    "x.split(m), columns with .split(n, dim=1): the last piece may be smaller.",
)  # fmt: skip

# ----------------------------------------------------------------------------------------------------- a linear layer


def _drive_linear(exercise: Any, x: Any, weight: Any, dy: Any, scales: Any, later: Any) -> dict[str, Any]:
    import torch as t

    class Scale:
        def __init__(self, scale):
            self.scale, self.noted = scale, []

        def note(self, tensor):
            self.noted.append(float(tensor.detach().abs().max()))

    states = [Scale(s) for s in scales]
    x, weight = x.requires_grad_(), weight.requires_grad_()
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with t.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = exercise.Fp8Linear.apply(x, weight, *states)
    for state, scale in zip(states, later, strict=True):
        state.scale = scale
    y.backward(dy)
    noted = [max(state.noted, default=0.0) for state in states]
    return {"y": y, "dx": x.grad, "dw": weight.grad, "noted": noted, "kept": sum(s.nbytes() for s in kept.values())}


def fp8_linear(x: Any, weight: Any, dy: Any, scales: Any, later: Any, gradient: dict[str, Any] = E5M2,
               stale: bool = False) -> dict[str, Any]:  # fmt: skip
    """`kept` is not compared here."""
    sx, sw, sdy = scales
    used = later[2]  # the gradient is cast when it comes
    qx, qw, qdy = (to_fp8(t * s, **f).double() for t, s, f in ((x, sx, E4M3), (weight, sw, E4M3), (dy, used, gradient)))
    bx, bw = (later[0], later[1]) if stale else (sx, sw)
    amaxes = [float(t.detach().abs().max()) for t in (x, weight, dy)]
    return {
        "y": (qx @ qw.T / (sx * sw)).float(), "dx": (qdy @ qw / (used * bw)).float(),
        "dw": (qdy.T @ qx / (used * bx)).float(), "noted": amaxes,
    }  # fmt: skip


def _plain(**i: Any) -> dict[str, Any]:
    x, w, dy = i["x"], i["weight"], i["dy"]
    return {**fp8_linear(**i), "y": x @ w.T, "dx": dy @ w, "dw": dy.T @ x}


def _linear_right(answer: Answer) -> str | None:
    i, got = answer.inputs, dict(answer.value)
    got.pop("kept")
    want = fp8_linear(**i)
    if got["y"].dtype != torch.float32:
        return f"y has the dtype {str(got['y'].dtype).removeprefix('torch.')}; return float32"
    if not (phrase := difference(got, want)):
        return None
    for wrong, why in (
        (fp8_linear(**i, gradient=E4M3), "dy goes to E5M2: gradients need range more than digits"),
        (fp8_linear(**i, stale=True), "between forward and backward the scales moved on: dequantise with the scales "
                                      "that x and W were cast with"),
        (_plain(**i), "nothing is rounded to FP8 here"),
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
            return f"{name} is off by one factor everywhere: a scale, or its inverse, is missing or there twice"
    return f"{phrase.split(':')[0]} is wrong"


def _kept(answer: Answer) -> str | None:
    i, kept = answer.inputs, answer.value["kept"]
    most = i["x"].numel() + i["weight"].numel()
    return f"{kept} bytes are kept for the backward pass; {most} are enough, one a number" if kept > most else None


def _linear(move: float = 1.0, exact: bool = False) -> Callable[[Draw], dict[str, Any]]:
    def inputs(draw: Draw) -> dict[str, Any]:
        n, i, o = draw.integer(2, 5), draw.integer(2, 6), draw.integer(2, 6)
        x, w, dy = draw.tensor(n, i), draw.tensor(o, i) / 8, draw.tensor(n, o) / 1000
        dy[0, 0] = 0.9 / 1000 * 1e-4  # what E4M3 has no number for
        tops = ((x, 448.0), (w, 448.0), (dy, 57344.0))
        scales = (
            [1.0] * 3 if exact else [float(2.0 ** math.floor(math.log2(t / v.abs().max().item()))) for v, t in tops]
        )
        return {"x": x, "weight": w, "dy": dy, "scales": scales, "later": [s * move for s in scales[:2]] + scales[2:]}

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
        Case("other sizes, scales that fill the range", _linear(), hidden=True, points=2),
        Case("backward, after the scales have moved on", _linear(0.25), hidden=True),
        Case("one byte a number is kept", _linear(), hidden=True, accept=[_kept]),
    ],
    hint="forward: note both, qx = E4M3(x sx), qw = E4M3(W sw), y = qx qw^T / (sx sw). Keep qx, qw as float8 tensors, "
    "and both scales as they are now. backward: note dy, qdy = E5M2(dy sdy), dx = qdy qw / (sdy sw), dW = qdy^T qx / "
    "(sdy sx). Compute with .float() of them.",
)  # fmt: skip
