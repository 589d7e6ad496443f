"""Lab 12, questions of interviews whose answers are numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.compare import ANYTHING
from labkit.exercises import Case, Draw, Exercise

from .states import padded

DAY = 86_400


def asked(
    parameters: float, tokens: float, gpus: int, tflops: float, p: int, v: int, percent: int, h: int, s: int,
    words: int, tp: int,
) -> dict[str, Any]:  # fmt: skip
    return {
        "days": 6 * parameters * tokens / (gpus * tflops * 1e12) / DAY,
        "microbatches": max(1, -(-(p - 1) * 100 // (v * percent))),
        "checkpoint": 14 * parameters,
        "smallest": -(-16 * parameters // (80 * 10**9)),
        "tokens": 9 * h // 2,
        "logits": (2 + 4) * s * (padded(words, tp) // tp),
    }


_FIRST: dict[str, Any] = {
    "parameters": 41 * 10**9, "tokens": 864 * 10**8, "gpus": 41, "tflops": 300.0, "p": 7, "v": 2, "percent": 9, "h": 8,
    "s": 10, "words": 384, "tp": 3,
}  # fmt: skip


def _some(draw: Draw) -> dict[str, Any]:
    while True:  # until the share is not met exactly: there the last bit of a float would decide
        p, v, percent = draw.integer(1, 40), draw.integer(1, 6), draw.integer(1, 25)
        if p == 1 or (p - 1) * 100 % (v * percent):
            break
    return {"parameters": draw.integer(1, 900) * 10**9, "tokens": draw.integer(1, 30_000) * 10**9,
            "gpus": 8 * draw.integer(1, 2000), "tflops": float(draw.integer(150, 900)), "p": p,
            "v": v, "percent": percent, "h": 128 * draw.integer(8, 160),
            "s": 512 * draw.integer(1, 64),
            "words": draw.integer(30_000, 250_000), "tp": draw.choice([1, 2, 4, 8])}  # fmt: skip


def _only(name: str) -> Callable[..., dict[str, Any]]:
    """Return an answer in which one of the six numbers is compared."""
    return lambda **inputs: {**dict.fromkeys(asked(**inputs), ANYTHING), name: asked(**inputs)[name]}


def _question(name: str, *fixed: dict[str, Any]) -> Case:
    return Case(
        f"{name}, of other runs", _some, hidden=True, reference=_only(name), fixed=[{**_FIRST, **f} for f in fixed]
    )


ASKED = Exercise(
    "asked",
    reference=asked,
    cases=[
        Case("41e9 parameters, 86.4e9 tokens, 41 GPUs at 300 TFLOP/s, p 7, v 2, at most 9 %, h 8, s 10, 384 words, "
             "tp 3", _FIRST),
        _question("days"),
        _question("microbatches", {"p": 9, "v": 2, "percent": 7}, {"p": 2, "v": 3, "percent": 25}, {"p": 1},
                  {"p": 1, "v": 4},
                  {"p": 33, "percent": 3}, {"p": 2, "v": 6, "percent": 25}, {"p": 5, "v": 1, "percent": 10}),
        _question("checkpoint"),
        _question("smallest", {"parameters": 9 * 10**9}, {"parameters": 7 * 10**11}, {"parameters": 10**10},
                  {"parameters": 80_000_000_001}),
        _question("tokens"),
        _question("logits", {"s": 8192, "words": 128_256, "tp": 8}, {"words": 50_257, "tp": 2},
                  {"words": 1000, "tp": 1}),
    ],
    idea="Each is one line of arithmetic; write down what is equal to what before you divide.",
    hint="days = 6 P T / (n X) / 86400; (p - 1)/(v m) <= percent/100, so m = ceil(100 (p - 1) / (v percent)), 1 at "
    "least; 14 P; ceil(16 P / 80e9); 8 tokens h = 3 * 12 h^2; (2 + 4) s V' / tp "
    "with V' of part A.",
)  # fmt: skip
