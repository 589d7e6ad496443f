"""Checks of lab 07, fourth part: delayed scales over steps and ranks, ranks that disagree, the questions at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from labkit.compare import ANYTHING
from labkit.exercises import Answer, Case, Draw, Exercise

Inputs = list[dict[str, Any]]

# ----------------------------------------------------------------------------------------------------- delayed scaling


def _drive_delayed(exercise: Any, amaxes: Any, history: int, top: float, tp: Any) -> dict[str, Any]:
    """Run the learner's scales. `noted` says how `note` changed the tensors that it was given, "" for not at all."""
    import gc

    import torch as t

    scales = [exercise.DelayedScale(history, top) for _ in amaxes[0][0]]
    trace, sign, noted = [[float(s.scale) for s in scales]], -1.0, ""
    gc.freeze()  # what is there already is no longer listed
    for step in amaxes:
        for microbatch in step:
            for scale, a in zip(scales, microbatch, strict=True):
                x = t.zeros(16, 16)
                x[:2, :2] = sign * t.tensor([[a / 2, a], [0.0, -a / 3]])
                before, sign = x.clone(), -sign
                scale.note(x)
                if not t.equal(x.view(t.int32), before.view(t.int32)):
                    noted = noted or "note changes the tensor that it is given, which belongs to the model"
                del x, before
        alive = [one for one in gc.get_objects() if type(one) in (t.Tensor, t.nn.Parameter)]
        if any(one.untyped_storage().nbytes() >= 1024 for one in alive):
            noted = noted or "note keeps the tensor, or one as large, alive: keep one number"
        del alive
        exercise.update(scales, tp)
        trace.append([float(s.scale) for s in scales])
    gc.unfreeze()
    return {"scales": trace, "noted": noted}


def _nothing_else(answer: Answer) -> str | None:
    return next((one["noted"] for one in answer.value if one["noted"]), None)


def _told(of: Callable[[Inputs], list[list[list[float]]]]) -> Callable[[Inputs], list[dict[str, Any]]]:
    """Return an answer in the form of `_drive_delayed`, from traces of scales."""
    return lambda ranks: [{"scales": trace, "noted": ANYTHING} for trace in of(ranks)]


def _largest(amaxes: list[float]) -> float:
    """The largest of the amaxes; NaN where one of them is NaN."""
    return math.nan if any(math.isnan(a) for a in amaxes) else max(amaxes)


def delayed(ranks: Inputs) -> list[list[list[float]]]:
    """The scales of every step, by rank: equal on all of them."""
    h, top, steps = ranks[0]["history"], ranks[0]["top"], [one["amaxes"] for one in ranks]
    scale = [1.0] * len(steps[0][0][0])
    past: list[list[float]] = [[] for _ in scale]
    trace = [list(scale)]
    for step in range(len(steps[0])):
        for t in range(len(scale)):
            amax = _largest([microbatch[t] for of in steps for microbatch in of[step]])
            past[t] = [*past[t], amax if math.isfinite(amax) else 0.0][-h:]
            if math.isfinite(amax) and max(past[t]) > 0:
                scale[t] = top / max(past[t])
        trace.append(list(scale))
    return [trace] * len(ranks)


def _steps(history: tuple[int, int], ranks: tuple[int, int], microbatches: int = 1, odd: float | None = None) -> Any:
    def inputs(draw: Draw) -> Inputs:
        h, top, tensors, steps = draw.integer(*history), draw.choice([448.0, 57344.0]), draw.integer(2, 3), 7
        world = draw.integer(*ranks)

        def amax() -> float:
            return float(2.0 ** draw.integer(-6, 6) * draw.choice([1.0, 1.1, 1.5]))

        given = [[[[amax() for _ in range(tensors)] for _ in range(microbatches)] for _ in range(steps)]
                 for _ in range(world)]  # fmt: skip
        if odd is not None:
            for rank in range(world if odd == 0.0 else 1):
                given[rank][3][0][0] = odd
        return [{"amaxes": of, "history": h, "top": top} for of in given]

    return inputs


def _series(history: int, *tensors: Sequence[Sequence[float]]) -> Inputs:
    """Inputs of one rank: for each tensor and step the amax of each microbatch."""
    steps = [[list(microbatch) for microbatch in zip(*step, strict=True)] for step in zip(*tensors, strict=True)]
    return [{"amaxes": steps, "history": history, "top": 448.0}]


_INF, _NAN = math.inf, math.nan
# The largest leaves the history in the step that overflows: the scale stays, all the same.
_OVERFLOWS = _series(
    3,
    [(8.0, 1.0), (4.0, 4.0), (2.0, 2.0), (_INF, 1.0), (1.0, 1.0), (0.5, 0.5)],
    [(8.0, 1.0), (4.0, 1.0), (2.0, 1.0), (1.0, _NAN), (1.0, 0.5), (4.0, 0.5)],
    [(4.0, 1.0), (1.0, 1.0), (2.0, 1.0), (_NAN, 2.0), (1.0, _INF), (0.5, 0.5)],
)
_ZEROS = _series(
    3,
    [(0.0,), (8.0,), (2.0,), (0.0,), (0.0,), (0.0,), (4.0,)],
    [(4.0,), (2.0,), (0.0,), (0.0,), (0.0,), (0.0,), (1.0,)],
)
# What overflows on one rank alone, on each in turn. Beside a NaN another rank has the largest number of all: a maximum
# over ranks that drops the NaN gives another scale.
_ON_ONE_RANK = [
    {"amaxes": [[list(of_step)] for of_step in steps], "history": 2, "top": 448.0}
    for steps in (
        [(2.0, 2.0, 4.0), (8.0, 16.0, _INF), (1.0, _NAN, 1.0), (0.5, 1.0, 0.5), (0.25, 0.5, 0.5)],
        [(4.0, 1.0, 2.0), (_INF, _NAN, 8.0), (2.0, 8.0, _NAN), (1.0, 0.5, 1.0), (0.5, 0.25, 0.25)],
        [(1.0, 4.0, 1.0), (2.0, 2.0, 2.0), (0.5, 0.5, 0.5), (4.0, 0.125, 2.0), (0.5, 0.5, 0.125)],
    )
]
_RANKS_IN_TURN = [
    {"amaxes": [[[8.0 if (step + tensor) % 3 == rank else 0.5 for tensor in range(4)]] for step in range(5)],
     "history": 2, "top": 57344.0}
    for rank in range(3)
]  # fmt: skip


def _one_message(answer: Answer) -> str | None:
    steps = len(answer.inputs[0]["amaxes"])
    for rank, one in enumerate(answer.evidence):
        if one.count() > steps:
            return f"rank {rank} sends {one.count()} messages in {steps} steps; one for all tensors together is enough"
    return None


_VECTOR = [{"amaxes": [[[a]] for a in (1.0, 1.0, 8.0, 1.0, 1.0, 1.0, 1.0, 1.0)], "history": 4, "top": 448.0}]

DELAYED = Exercise(
    "delayed_scaling",
    reference=_told(delayed),
    drive=_drive_delayed,
    axis="tp",
    accept=[_nothing_else],
    cases=[
        Case("one tensor that jumps once, history 4", _VECTOR),
        Case("several tensors, other histories", _steps((2, 5), (1, 1)), hidden=True),
        Case("a history of 1", _steps((1, 1), (1, 1)), hidden=True),
        Case("several microbatches a step", _steps((2, 4), (1, 1), 3), hidden=True),
        Case("a step in which a tensor is zero", _steps((1, 1), (1, 1), odd=0.0), hidden=True, fixed=[_ZEROS]),
        Case("a step that overflows leaves the scale, and puts 0 into the history",
             _steps((2, 4), (2, 2), odd=math.inf), hidden=True, fixed=[_OVERFLOWS, _ON_ONE_RANK, _ON_ONE_RANK[:2]]),
        Case("the same scales on every rank", _steps((2, 4), (2, 3)), hidden=True, points=2, fixed=[_RANKS_IN_TURN]),
        Case("one message a step", _steps((2, 4), (2, 2)), hidden=True, accept=[_one_message]),
    ],
    idea="Keep three things apart: the largest magnitude of this step, the history of steps, and the scale in use.",
    hint="note: self.amax = torch.maximum(self.amax, x.detach().abs().max()), which keeps NaN. update: stack the "
    "amaxes, with inf in the place of NaN (nan_to_num(torch.inf, torch.inf)): an all_reduce with op=MAX may "
    "lose a NaN, it keeps inf. One all_reduce; append each to its history of at most H, set amax to 0. Where "
    "the new one is finite and the history's maximum is not 0: scale = top / maximum. One that is not finite "
    "goes into the history as 0.",
)  # fmt: skip

# ---------------------------------------------------------------------------------------------------- ranks that differ


def shares(outs: list[torch.Tensor], parts: list[torch.Tensor]) -> list[list[float]]:
    """The factor of each part in each result, by least squares in float64."""
    columns = torch.stack([p.double().flatten() for p in parts], 1)
    return [torch.linalg.lstsq(columns, out.double().flatten()[:, None]).solution.flatten().tolist() for out in outs]


def _mixed(tp: tuple[int, int], noise: float = 0.0, equal: bool = False) -> Callable[[Draw], dict[str, Any]]:
    def inputs(draw: Draw) -> dict[str, Any]:
        t = draw.integer(*tp)
        parts = [draw.tensor(6, 8) for _ in range(t)]
        scales = [1.0 if equal else 2 ** (draw.integer(-8, 8) / 8) for _ in range(t)]
        outs = [sum((parts[j] * (scales[j] / scales[r]) for j in range(t)), torch.zeros(6, 8)) for r in range(t)]
        return {"outs": [o + noise * draw.tensor(6, 8) for o in outs], "parts": parts}

    return inputs


def _any_factors(draw: Draw) -> dict[str, Any]:
    """Draw parts that have much in common, and arbitrary factors."""
    common = draw.tensor(6, 8)
    parts = [common + 0.5 * draw.tensor(6, 8) for _ in range(3)]
    factors = [[0.5, 2.0, -1.0], [0.0, 3.0, 0.25], [1.5, 0.5, 0.75]]
    outs = [sum((c * part for c, part in zip(row, parts, strict=True)), torch.zeros(6, 8)) for row in factors]
    return {"outs": outs, "parts": parts}


_PARTS = [torch.tensor([[1.0, 0.0], [2.0, 0.0]]), torch.tensor([[0.0, 1.0], [1.0, 0.0]])]
_FOUR = {"outs": [0.5 * _PARTS[0] + 2 * _PARTS[1], _PARTS[0] + 0.25 * _PARTS[1]], "parts": _PARTS}

SHARES = Exercise(
    "shares",
    reference=shares,
    rtol=0.05,
    atol=0.02,
    cases=[
        Case("two ranks, four numbers", _FOUR),
        Case("two ranks", lambda draw: _mixed((2, 2))(draw), hidden=True),
        Case("two to four ranks", _mixed((2, 4)), hidden=True, fixed=[_any_factors]),
        Case("with the noise of FP8", _mixed((2, 4), 0.02), hidden=True, points=2),
        Case("ranks that agree", _mixed((2, 3), 0.01, True), hidden=True),
    ],
    idea="Each output is a sum of known parts with unknown factors: few unknowns, and one equation for each number.",
    hint="For each rank: out = c_0 part_0 + c_1 part_1 + ... Flatten, stack the parts as columns, torch.linalg.lstsq.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------------- explain


def answers(
    peak: float, bandwidth: float, hidden: int, element_size: int, layers: int, growth: float, tokens: int,
    launch: float,
) -> dict[str, float]:  # fmt: skip
    ridge = peak / bandwidth
    enough = ridge * element_size * hidden / (2 * hidden - 2 * ridge * element_size)
    one = tokens * hidden * element_size / bandwidth
    eager = sum(max(launch, passes * one) for passes in (2, 1, 0, 0, 2, 2))
    return {
        "tokens_for_arithmetic": math.ceil(enough - 1e-9), "fused_microseconds": 1e6 * max(launch, 2 * one),
        "eager_microseconds": 1e6 * eager, "amax_bytes": 4 * 3 * 4 * layers, "cut_off": 1 - 1 / growth,
        "smallest_kept": 2.0**-9 / 448,
    }  # fmt: skip


def _run(draw: Draw) -> dict[str, Any]:
    bandwidth = 1e12 * draw.integer(1, 8)
    run = {
        "peak": bandwidth * draw.integer(100, 350), "bandwidth": bandwidth, "hidden": 1024 * draw.integer(2, 16),
        "element_size": draw.choice([1, 2]), "layers": draw.integer(2, 96), "growth": draw.choice([1.5, 2.0, 8.0]),
        "tokens": draw.integer(4000, 9000),
    }  # fmt: skip
    one = run["tokens"] * run["hidden"] * run["element_size"] / bandwidth
    return {**run, "launch": one * draw.choice([0.1, 1.5, 3.0])}


def _another(draw: Draw) -> dict[str, Any]:
    """Draw numbers of tokens that are not whole before they are rounded up."""
    while True:
        inputs = _run(draw)
        ridge, h, e = inputs["peak"] / inputs["bandwidth"], inputs["hidden"], inputs["element_size"]
        if 0.001 < ridge * e * h / (2 * h - 2 * ridge * e) % 1 < 0.999:
            return inputs


_SMALL = {
    "peak": 1.7e14, "bandwidth": 2e12, "hidden": 1536, "element_size": 4, "layers": 7, "growth": 3.0, "tokens": 8,
    "launch": 4e-6,
}  # fmt: skip
_BETWEEN = {**_SMALL, "tokens": 1000, "launch": 4.5e-6}  # a pass is shorter than a launch, two are longer
_H100 = {
    "peak": 989e12, "bandwidth": 3.35e12, "hidden": 4096, "element_size": 2, "layers": 32, "growth": 4.0,
    "tokens": 8192, "launch": 5e-6,
}  # fmt: skip

ANSWERS = Exercise(
    "answers",
    reference=answers,
    cases=[Case("an H100, h = 4096, 8192 tokens", _H100), Case("other runs", _another, points=3, hidden=True,
                                                               fixed=[_SMALL, _BETWEEN])],
    idea="Write each number down with its units first: FLOP, bytes, seconds, numbers.",
    hint="2 n h² / (e (2 n h + h²)) = peak / bandwidth, solved for n, rounded up. One pass takes tokens x h x e over "
    "the bandwidth; fused: max(launch, 2 passes). Eager, a maximum with the launch for each of six: pow 2 passes, mean "
    "1, add and rsqrt none, mul 2 and 2. 4 linear layers x 3 tensors x 4 bytes a layer. 1 - 1/growth. E4M3's smallest "
    "number is 2^-9 and the scale 448/amax.",
)  # fmt: skip
