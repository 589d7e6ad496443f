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


def delayed(
    ranks: Inputs, *, shared: bool = True, most: str = "largest", own: bool = True, last: bool = False,
    overflow: str = "leaves", nan: bool = True, zero: str = "history", together: str = "largest",
    decided: str = "together",
) -> list[list[list[float]]]:  # fmt: skip
    """The scales of every step, by rank. The keywords make mistakes.

    Args:
        overflow: a step that overflows "leaves" the scale and puts 0 into the history; or the scale "moves"; or the
            history "skips" the step, or "begins" anew with it; or the scale is "one" afterwards; or what is not finite
            is "dropped"; or each rank notes 0 for it before the ranks exchange ("local"); or it stops "all" tensors.
        most: what the scale follows: the "largest" or the "mean" of the history, the amax of the "step" alone, or the
            largest "ever".
        together: of the ranks' amaxes counts the "largest", the "sum" or the "mean".
        decided: whether a step overflowed is decided "together", by each rank for its "own" tensor, or together but
            the NaN of all ranks except the first is "lost".
        nan: whether it counts as not finite; else Python's `max` drops it.
        zero: the scale is left where the "history" is all zero, or already where the "step" is; or it becomes "one".
    """
    world, out = len(ranks), []
    for rank in range(world):
        h, top, amaxes = ranks[rank]["history"], ranks[rank]["top"], ranks[rank]["amaxes"]
        past: list[list[float]] = [[] for _ in amaxes[0][0]]
        scale = [1.0] * len(past)
        trace = [list(scale)]
        for step in range(len(amaxes)):
            who = range(world) if shared else [rank]
            for t in range(len(scale)):
                noted = [[m[t] for m in ranks[r]["amaxes"][step]] for r in who]
                seen = [a for row in noted for a in (row[-1:] if last else row)]
                if overflow == "local":
                    seen = [a if math.isfinite(_largest(row)) else 0.0 for row in noted for a in row]
                amax = _largest(seen if nan else [a for a in seen if not math.isnan(a)] or [0.0])
                if decided == "lost":
                    later = [a for row in noted[1:] for a in row if not math.isnan(_largest(row))]
                    amax = _largest([*noted[0], *later])
                if overflow == "dropped":
                    amax = max((a for a in seen if math.isfinite(a)), default=0.0)
                if together != "largest":
                    amax = sum(_largest(row) for row in noted) / (len(noted) if together == "mean" else 1)
                if overflow == "all" and not all(
                    math.isfinite(a) for r in who for m in ranks[r]["amaxes"][step] for a in m
                ):
                    amax = math.inf
                if overflow == "begins" and not math.isfinite(amax):
                    past[t] = []
                if decided == "own" and math.isnan(amax):
                    amax = math.inf
                judged = _largest([m[t] for m in ranks[rank]["amaxes"][step]]) if decided == "own" else amax
                if overflow != "skips" or math.isfinite(amax):
                    past[t] = [*past[t], amax if math.isfinite(judged) else 0.0]
                window = past[t][{"step": -1, "ever": 0}.get(most, -h) :]
                if not own:
                    window = past[t][-h - 1 : -1]
                follows = sum(window) / len(window) if most == "mean" and window else max(window, default=0.0)
                left = overflow != "moves" and not math.isfinite(judged)
                if follows > 0 and not left and not (zero == "step" and amax == 0):
                    scale[t] = top / follows
                if (overflow == "one" and left) or (zero == "one" and not left and follows == 0):
                    scale[t] = 1.0
            trace.append(list(scale))
        out.append(trace)
    return out


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
    hint="note: self.amax = torch.maximum(self.amax, x.abs().max()), which keeps NaN. update: stack the amaxes, with "
    "inf in the place of NaN, one all_reduce with op=MAX; append each to its history of at most H, set amax to 0. "
    "Where the new one is finite and "
    "the history's maximum is not 0: scale = top / maximum. One that is not finite goes into the history as 0.",
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
    peak: float, bandwidth: float, hidden: int, element_size: int, layers: int, growth: float
) -> dict[str, float]:
    ridge = peak / bandwidth
    tokens = ridge * element_size * hidden / (2 * hidden - 2 * ridge * element_size)
    return {
        "ridge": ridge, "tokens_for_arithmetic": math.ceil(tokens - 1e-9), "amax_bytes": 4 * 3 * 4 * layers,
        "cut_off": 1 - 1 / growth, "smallest_kept": 2.0**-9 / 448, "norm_microseconds": 1e6 * 2 * 8192 * hidden
        * element_size / bandwidth,
    }  # fmt: skip


def _run(draw: Draw) -> dict[str, Any]:
    bandwidth = 1e12 * draw.integer(1, 8)
    return {
        "peak": bandwidth * draw.integer(100, 350), "bandwidth": bandwidth, "hidden": 1024 * draw.integer(2, 16),
        "element_size": draw.choice([1, 2]), "layers": draw.integer(2, 96),
        "growth": draw.choice([1.5, 2.0, 8.0]),
    }  # fmt: skip


def _another(draw: Draw) -> dict[str, Any]:
    """Draw numbers of tokens that are not whole before they are rounded up."""
    while True:
        inputs = _run(draw)
        ridge, h, e = inputs["peak"] / inputs["bandwidth"], inputs["hidden"], inputs["element_size"]
        if 0.001 < ridge * e * h / (2 * h - 2 * ridge * e) % 1 < 0.999:
            return inputs


_SMALL = {"peak": 1.7e14, "bandwidth": 2e12, "hidden": 1536, "element_size": 4, "layers": 7, "growth": 3.0}


_H100 = {"peak": 989e12, "bandwidth": 3.35e12, "hidden": 4096, "element_size": 2, "layers": 32, "growth": 4.0}

ANSWERS = Exercise(
    "answers",
    reference=answers,
    cases=[Case("an H100, h = 4096", _H100), Case("other runs", _another, points=3, hidden=True,
                                                            fixed=[_SMALL])],
    idea="Write each number down with its units first: FLOP, bytes, seconds, numbers.",
    hint="ridge = peak / bandwidth. 2 n h² / (e (2 n h + h²)) = ridge, solved for n, rounded up. 4 linear layers x 3 "
    "tensors x 4 bytes a layer. 1 - 1/growth. E4M3's smallest number is 2^-9 and the scale 448/amax. 2 x 8192 x h x e "
    "bytes over the bandwidth.",
)  # fmt: skip
