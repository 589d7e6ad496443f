"""Checks of lab 07, fourth part: delayed scales over steps and ranks, ranks that disagree, the questions at the end."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from labkit.compare import ANYTHING
from labkit.exercises import Answer, Case, Draw, Exercise, Mistake, instead

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


def _wrong(**how: Any) -> Callable[[Inputs], list[dict[str, Any]]]:
    return _told(lambda ranks: delayed(ranks, **how))


def _maxima(ranks: Inputs) -> Inputs:
    """The inputs of a program that takes the largest number in place of the largest magnitude: `_drive_delayed` turns
    signs."""

    def one(amaxes: Any) -> Any:
        sign = itertools.cycle((1 / 3, 1.0))
        return [[[next(sign) * a for a in microbatch] for microbatch in step] for step in amaxes]

    return [{**rank, "amaxes": one(rank["amaxes"])} for rank in ranks]


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
# What overflows on one rank alone, on each in turn: rank 0 of these sees numbers only, and so does rank 1.
_ON_ONE_RANK = [
    {"amaxes": [[list(of_step)] for of_step in steps], "history": 2, "top": 448.0}
    for steps in (
        [(2.0, 2.0, 4.0), (8.0, 1.0, _INF), (1.0, _NAN, 1.0), (0.5, 1.0, 0.5), (0.25, 0.5, 0.5)],
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
    mistakes=[
        Mistake(_wrong(shared=False), "Each rank saw a part of the tensor: the largest of all counts."),
        Mistake(_wrong(most="step"), "The largest of the last `history` steps, not of the last one."),
        Mistake(_wrong(most="ever"), "Something older than the last `history` steps still counts: an "
                "amax that stays in the history, or one that is not 0 when a new step begins."),
        Mistake(_wrong(most="mean"), "This follows the mean of the history. With it the largest of them "
                "would be cut off: the largest counts."),
        Mistake(_told(lambda r: delayed(_maxima(r))), "The largest *magnitude*: a negative number counts, too."),
        Mistake(_wrong(overflow="one"), "A step that overflows leaves the scale as it is; here it "
                "becomes 1 again."),
        Mistake(_wrong(overflow="begins"), "A step that overflows does not empty the history: it joins "
                "it as 0."),
        Mistake(_wrong(own=False), "The step that ends now belongs to the history."),
        Mistake(_wrong(last=True), "A step has several microbatches: keep the largest of them."),
        Mistake(_wrong(overflow="moves"), "A step that overflows leaves the scale as it is, also when "
                "the largest has just left the history."),
        Mistake(_wrong(overflow="skips"), "A step that overflows belongs to the history, too: as 0, so "
                "that the oldest step leaves."),
        Mistake(_wrong(overflow="local"), "A rank that makes 0 of its infinity hides it from the others: "
                "the step overflowed on all of them."),
        Mistake(_wrong(overflow="dropped"), "The infinity or NaN is dropped here, and with it the news "
                "that the step overflowed."),
        Mistake(_wrong(overflow="all"), "Each tensor has a scale of its own: where one overflows, the "
                "others move on."),
        Mistake(_wrong(together="sum"), "The ranks' amaxes are added up here; the largest of them "
                "counts."),
        Mistake(_wrong(together="mean"), "This is the mean of the ranks' amaxes; the largest of them "
                "counts."),
        Mistake(_wrong(zero="one"), "Where all of the history is 0 the scale is left; here it becomes "
                "1."),
        Mistake(_wrong(nan=False), "NaN is lost: a step with NaN has overflowed, too. (Python's max(a, "
                "nan) is a.)"),
        Mistake(_wrong(decided="lost"), "A NaN of another rank than the first is lost: a maximum "
                "over ranks may drop it. Send infinity in its place."),
        Mistake(_wrong(decided="own"), "Each rank decides by its own tensor whether the step "
                "overflowed: decide by what all of them have."),
        Mistake(_wrong(zero="step"), "A tensor that is zero in one step alone is no reason to leave the "
                "scale: the largest of the history counts."),
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


def _own_part_whole(outs: list[torch.Tensor], parts: list[torch.Tensor]) -> list[list[float]]:
    """A mistake: each rank takes the factor of its own part as 1, and computes only the others."""
    rest = [shares([out - parts[r]], parts[:r] + parts[r + 1 :])[0] for r, out in enumerate(outs)]
    return [[*of[:r], 1.0, *of[r:]] for r, of in enumerate(rest)]


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
    mistakes=[
        Mistake(_own_part_whole, "A rank's own part has an unknown factor, too: it is not always 1."),
        Mistake(lambda outs, parts: [[float(o.norm() / p.norm()) for p in parts] for o in outs],
                "A norm is of the whole output: it does not say which part it comes from."),
        Mistake(lambda outs, parts: [list(col) for col in zip(*shares(outs, parts), strict=True)],
                "[r][j]: a list a rank, and in it the factor of each rank's part."),
        Mistake(lambda outs, parts: [[1.0] * len(parts) for _ in outs], "Find out; do not assume."),
        Mistake(lambda outs, parts: [[float((o * p).sum() / (p * p).sum()) for p in parts] for o in outs],
                "The parts are not orthogonal: one factor at a time takes in some of the others."),
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

_instead = partial(instead, answers)

_H100 = {"peak": 989e12, "bandwidth": 3.35e12, "hidden": 4096, "element_size": 2, "layers": 32, "growth": 4.0}

ANSWERS = Exercise(
    "answers",
    reference=answers,
    cases=[Case("an H100, h = 4096", _H100), Case("other runs", _another, points=3, hidden=True,
                                                            fixed=[_SMALL])],
    mistakes=[
        Mistake(_instead(ridge=lambda bandwidth, peak, **_: bandwidth / peak), "FLOP per byte: peak over bandwidth."),
        Mistake(_instead(tokens_for_arithmetic=lambda peak, bandwidth, element_size, **_: math.ceil(
            peak / bandwidth * element_size / 2)), "x and y move too, not W alone."),
        Mistake(_instead(amax_bytes=lambda layers, **_: 4 * 4 * layers), "x, W *and* dy: three numbers a linear "
                "layer."),
        Mistake(_instead(tokens_for_arithmetic=lambda peak, bandwidth, **_: math.ceil(peak / bandwidth)),
                "The intensity of this product is not n: it is its FLOP over the bytes of x, W and y."),
        Mistake(_instead(tokens_for_arithmetic=lambda peak, bandwidth, element_size, hidden, **_: math.ceil(
            peak / bandwidth * element_size * hidden / (2 * hidden - peak / bandwidth * element_size))),
                "One of x and y is not counted: x and W are read, and y is written."),
        Mistake(_instead(tokens_for_arithmetic=lambda peak, bandwidth, element_size, hidden, **_: math.ceil(
            peak / bandwidth * element_size * hidden / (hidden - 2 * peak / bandwidth * element_size))),
                "A multiplication and an addition are two FLOP: x·Wᵀ takes 2 n h² of them."),
        Mistake(_instead(norm_microseconds=lambda bandwidth, hidden, **_: 1e6 * 2 * 8192 * hidden * 4 / bandwidth),
                "Each number of the norm has element_size bytes."),
        Mistake(_instead(tokens_for_arithmetic=lambda **i: answers(**i)["tokens_for_arithmetic"] - 1),
                "With this many tokens memory is still the bound: one more is needed."),
        Mistake(_instead(amax_bytes=lambda layers, element_size, **_: 12 * element_size * layers),
                "An amax is sent in float32, whatever the size of the other numbers."),
        Mistake(_instead(amax_bytes=lambda layers, **_: 12 * layers), "A factor of four is missing: four linear layers "
                "in each transformer layer, and four bytes a number."),
        Mistake(_instead(cut_off=lambda growth, **_: 1 / growth), "That is what is left of it; the error is the rest."),
        Mistake(_instead(cut_off=lambda growth, **_: growth - 1), "Relative to the true value, not to what is "
                "left of it."),
        Mistake(_instead(smallest_kept=lambda **_: 2.0**-6 / 448), "Below 2^-6 E4M3 has seven more numbers, "
                "in equal steps down to 0."),
        Mistake(_instead(smallest_kept=lambda **_: 2.0**-10 / 448), "2^-10 rounds to 0: it is no number of E4M3."),
        Mistake(_instead(smallest_kept=lambda **_: 2.0**-9), "This is the number of E4M3 itself; asked is its size "
                "relative to amax."),
        Mistake(_instead(norm_microseconds=lambda **i: answers(**i)["norm_microseconds"] / 2), "Read once *and* "
                "written once."),
        Mistake(_instead(norm_microseconds=lambda **i: answers(**i)["norm_microseconds"] * 7 / 2), "This is the "
                "eager norm, which moves seven times; the fused one moves two times."),
        *(Mistake(_instead(norm_microseconds=lambda unit=unit, **i: answers(**i)["norm_microseconds"] / unit),
                  "In microseconds: a second has 10^6.") for unit in (1e3, 1e6)),
    ],
    idea="Write each number down with its units first: FLOP, bytes, seconds, numbers.",
    hint="ridge = peak / bandwidth. 2 n h² / (e (2 n h + h²)) = ridge, solved for n, rounded up. 4 linear layers x 3 "
    "tensors x 4 bytes a layer. 1 - 1/growth. E4M3's smallest number is 2^-9 and the scale 448/amax. 2 x 8192 x h x e "
    "bytes over the bandwidth.",
)  # fmt: skip
