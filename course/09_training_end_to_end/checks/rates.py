"""Lab 09, the rate of a step: warm-up, then a cosine, or a plateau with a fall behind it.

The reference interpolates in a table of the whole run that it lays out first.
"""

from __future__ import annotations

import math
from typing import Any

from labkit.exercises import Case, Draw, Exercise


def rate(n: int, plan: dict[str, Any]) -> float:
    peak, floor, warmup, end = (plan[name] for name in ("peak", "floor", "warmup", "end"))
    begins = warmup if plan["style"] == "cosine" else end - plan["fall"]
    table = [peak * m / warmup for m in range(warmup)]  # the rate of step 0, 1, ...
    table += [peak] * (begins - warmup)
    for m in range(begins, end + 1):
        part = (m - begins) / (end - begins)
        left = (1 + math.cos(math.pi * part)) / 2 if plan["style"] == "cosine" else 1 - math.sqrt(part)
        table.append(floor + (peak - floor) * left)
    return table[n] if n <= end else floor


_PLAN: dict[str, Any] = {"style": "cosine", "peak": 10.0, "floor": 2.0, "warmup": 4, "end": 12, "fall": 4}


def _some(draw: Draw) -> dict[str, Any]:
    warmup, fall = draw.integer(0, 9), draw.integer(2, 12)
    plan = {"style": draw.choice(["cosine", "wsd"]), "peak": draw.choice([1.0, 3e-4]),
            "floor": draw.choice([0.0, 1e-5]),
            "warmup": warmup, "end": warmup + fall + draw.integer(0, 20), "fall": fall}  # fmt: skip
    return {"n": draw.integer(0, plan["end"] + 3), "plan": plan}


def _at(style: str, *steps: int, **changes: Any) -> list[dict[str, Any]]:
    return [{"n": n, "plan": {**_PLAN, "style": style, **changes}} for n in steps]


RATE = Exercise(
    "rate",
    reference=rate,
    cases=[
        Case("a cosine: the warm-up, the middle of the fall", _at("cosine", 3)[0], fixed=_at("cosine", 8)),
        Case("wsd: the plateau, a quarter of the fall", _at("wsd", 6)[0], fixed=_at("wsd", 9)),
        Case("other plans and steps", _some, points=2, hidden=True, draws=8, fixed=[
            *_at("cosine", 0, 4, 5, 10, 12, 13, 40), *_at("wsd", 0, 1, 4, 8, 10, 12, 13, 40),
            *_at("wsd", 4, 6, warmup=4, end=8), *_at("cosine", 0, 6, warmup=0), *_at("wsd", 0, 11, warmup=0)]),
    ],
    errors={"division by zero": "A plan without a warm-up has `warmup` 0: its rate begins at the peak."},
    idea="Say for each style where the fall begins and where it ends. What is left of the rate when a part of "
    "the fall is "
    "behind you?",
    hint="n < warmup: peak * n / warmup. n > end: floor. The fall begins at warmup (cosine) or end - fall "
    "(wsd); before "
    "it: peak. part = (n - begin) / (end - begin); left = (1 + cos(pi * part)) / 2, or 1 - sqrt(part).",
)  # fmt: skip
