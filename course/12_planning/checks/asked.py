"""Lab 12, questions of interviews whose answers are numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from labkit.compare import ANYTHING
from labkit.exercises import Case, Draw, Exercise, Mistake, instead

DAY = 86_400


def asked(
    parameters: float, tokens: float, gpus: int, tflops: float, p: int, v: int, percent: int, h: int
) -> dict[str, Any]:
    return {
        "days": 6 * parameters * tokens / (gpus * tflops * 1e12) / DAY,
        "microbatches": max(1, -(-(p - 1) * 100 // (v * percent))),
        "checkpoint": 14 * parameters,
        "smallest": -(-16 * parameters // (80 * 10**9)),
        "tokens": 9 * h // 2,
    }


_FIRST = {
    "parameters": 10**9,
    "tokens": 864 * 10**8,
    "gpus": 10,
    "tflops": 300.0,
    "p": 7,
    "v": 2,
    "percent": 9,
    "h": 8,
}


def _some(draw: Draw) -> dict[str, Any]:
    while True:  # until the share is not met exactly: there the last bit of a float would decide
        p, v, percent = draw.integer(1, 40), draw.integer(1, 6), draw.integer(1, 25)
        if p == 1 or (p - 1) * 100 % (v * percent):
            break
    return {"parameters": draw.integer(1, 900) * 10**9, "tokens": draw.integer(1, 30_000) * 10**9,
            "gpus": 8 * draw.integer(1, 2000), "tflops": float(draw.integer(150, 900)), "p": p,
            "v": v, "percent": percent, "h": 128 * draw.integer(8, 160)}  # fmt: skip


def _wrong(**which: Callable[..., Any]) -> Callable[..., dict[str, Any]]:
    return instead(asked, **which)


def _only(name: str) -> Callable[..., dict[str, Any]]:
    """Return an answer in which one of the five numbers is compared."""
    return lambda **inputs: {**dict.fromkeys(asked(**inputs), ANYTHING), name: asked(**inputs)[name]}


def _question(name: str, *fixed: dict[str, Any]) -> Case:
    return Case(
        f"{name}, of other runs", _some, hidden=True, reference=_only(name), fixed=[{**_FIRST, **f} for f in fixed]
    )


def _whole_rounds(p: int, v: int, **others: Any) -> int:
    m: int = asked(p=p, v=v, **others)["microbatches"]
    return m if v == 1 else -(-m // p) * p


ASKED = Exercise(
    "asked",
    reference=asked,
    cases=[
        Case("1e9 parameters, 86.4e9 tokens, 10 GPUs at 300 TFLOP/s, p 7, v 2, at most 9 %, h 8", _FIRST),
        _question("days"),
        _question("microbatches", {"p": 9, "v": 2, "percent": 7}, {"p": 2, "v": 3, "percent": 25}, {"p": 1},
                  {"p": 1, "v": 4},
                  {"p": 33, "percent": 3}, {"p": 2, "v": 6, "percent": 25}, {"p": 5, "v": 1, "percent": 10}),
        _question("checkpoint"),
        _question("smallest", {"parameters": 9 * 10**9}, {"parameters": 7 * 10**11}, {"parameters": 10**10},
                  {"parameters": 80_000_000_001}),
        _question("tokens"),
    ],
    mistakes=[
        Mistake(_wrong(days=lambda **i: asked(**i)["days"] / 3), "days: a forward pass has 2 FLOPs for each parameter "
                "and token, and the backward pass twice as many."),
        Mistake(_wrong(days=lambda **i: asked(**i)["days"] * 4 / 3), "days: 8 FLOPs count what full recompute does; "
                "the TFLOP/s are model FLOPs."),
        Mistake(_wrong(days=lambda **i: asked(**i)["days"] * DAY), "days: these are seconds."),
        Mistake(_wrong(days=lambda **i: asked(**i)["days"] * 24), "days: these are hours."),
        Mistake(_wrong(days=lambda gpus, **i: asked(gpus=gpus, **i)["days"] * gpus), "days: `tflops` are those of "
                "each GPU, "
                "and all of them compute."),
        Mistake(_wrong(microbatches=lambda p, v, percent, **i: -(-(p - 1) * 100 // (v * percent))), "microbatches: "
                "of one rank, too, a step has a microbatch."),
        Mistake(_wrong(microbatches=lambda p, v, percent, **i: -(-(p - 1) * 100 // (v * percent)) or -1),
                "microbatches: of one rank, too, a step has a microbatch."),
        Mistake(_wrong(microbatches=lambda p, v, percent, **i: (p - 1) * 100 // (v * percent)), "microbatches: rounded "
                "down, the bubble is larger than what is allowed."),
        Mistake(_wrong(microbatches=lambda p, v, percent, **i: round((p - 1) * 100 / (v * percent))), "microbatches: "
                "rounded to the nearest, the bubble may be larger than what is allowed."),
        Mistake(_wrong(microbatches=lambda p, v, percent, **i: (p - 1) * 100 // (v * percent) + 1), "microbatches: "
                "exactly that share is allowed."),
        Mistake(_wrong(microbatches=lambda p, percent, **i: math.ceil((p - 1) * 100 / percent)), "microbatches: v "
                "chunks make the bubble smaller."),
        Mistake(_wrong(microbatches=lambda p, v, percent, **i: -(-p * 100 // (v * percent))), "microbatches: a "
                "pipeline of p ranks has a bubble of p - 1 passes."),
        Mistake(_wrong(checkpoint=lambda parameters, **i: 16 * parameters), "checkpoint: it holds no gradients."),
        Mistake(_wrong(checkpoint=lambda parameters, **i: 18 * parameters), "checkpoint: it holds no gradients."),
        Mistake(_wrong(checkpoint=lambda parameters, **i: 12 * parameters), "checkpoint: the weights are missing."),
        Mistake(_wrong(checkpoint=lambda parameters, **i: 2 * parameters), "checkpoint: to go on, a run needs the main "
                "parameters and the moments, too."),
        Mistake(_wrong(smallest=lambda parameters, **i: 16 * parameters // (80 * 10**9)), "smallest: rounded down, it "
                "does not fit."),
        Mistake(_wrong(smallest=lambda parameters, **i: 16 * parameters // (80 * 10**9) + 1), "smallest: what fills "
                "the last GPU exactly fits."),
        Mistake(_wrong(microbatches=lambda p, v, percent, **i: -(-(p - 1) * (100 - percent) // (v * percent))),
                "microbatches: asked is the bubble as a share of the work, not of the whole step."),
        Mistake(_wrong(microbatches=_whole_rounds), "microbatches: asked is the smallest number, whether or not p "
                "divides it."),
        Mistake(_wrong(smallest=lambda parameters, **i: -(-18 * parameters // (80 * 10**9))), "smallest: here "
                "gradients have 2 bytes."),
        Mistake(_wrong(smallest=lambda parameters, **i: -(-14 * parameters // (80 * 10**9))), "smallest: the gradients "
                "are missing."),
        Mistake(_wrong(smallest=lambda parameters, **i: -(-16 * parameters // (80 * 2**30))), "smallest: 80 GB are "
                "80e9 bytes."),
        Mistake(_wrong(tokens=lambda h, **i: 6 * h), "tokens: numbers are counted, whatever bytes they have; ZeRO-3 "
                "sends three times 12 h^2, tp eight payloads."),
        Mistake(_wrong(tokens=lambda h, **i: 36 * h / 10), "tokens: four all-reduces send eight payloads; ten are sent "
                "with sequence parallelism."),
        Mistake(_wrong(tokens=lambda h, **i: 9 * h), "tokens: tp has four all-reduces in a layer, each sent twice in a "
                "ring."),
        Mistake(_wrong(tokens=lambda h, **i: 3 * h), "tokens: ZeRO-3 gathers weights twice and scatters gradients "
                "once: three times 12 h^2."),
        Mistake(_wrong(tokens=lambda h, **i: 36 * h * h), "tokens: at how many tokens is 8 tokens h 36 h^2?"),
    ],
    idea="Each is one line of arithmetic; write down what is equal to what before you divide.",
    hint="days = 6 P T / (n X) / 86400; (p - 1)/(v m) <= percent/100, so m = ceil(100 (p - 1) / (v percent)), 1 at "
    "least; 14 P; ceil(16 P / 80e9); 8 tokens h = 3 * 12 h^2.",
)  # fmt: skip
