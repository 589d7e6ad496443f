"""Lab 12, two short runs that say which part of a step is slow."""

from __future__ import annotations

from typing import Any

from labkit.exercises import Case, Draw, Exercise


def two_runs(p: int, v: int, few: tuple[int, float], many: tuple[int, float], m: int) -> dict[str, float]:
    (m1, t1), (m2, t2) = few, many
    each = (t2 - t1) / (m2 - m1)
    bubble = (p - 1) / v * each
    return {"each": each, "bubble": bubble, "once": t1 - m1 * each - bubble, "step": t1 + (m - m1) * each}


def _some(draw: Draw) -> dict[str, Any]:
    p, v, each, once = draw.integer(2, 16), draw.integer(1, 6), draw.integer(2, 60) / 16, draw.integer(1, 80) / 16
    few, many = draw.integer(1, 6) * p, draw.integer(8, 20) * p

    def run(m: int) -> tuple[int, float]:
        return m, once + (m + (p - 1) / v) * each

    return {"p": p, "v": v, "few": run(few), "many": run(many), "m": draw.integer(21, 90) * p}


_EXAMPLE = {"p": 4, "v": 2, "few": (8, 5.0), "many": (16, 9.0), "m": 64}

TWO_RUNS = Exercise(
    "two_runs",
    reference=two_runs,
    cases=[
        Case("the example: 5 s with 8 microbatches, 9 s with 16; and with 64", _EXAMPLE),
        Case("no pipeline", {**_EXAMPLE, "p": 1, "v": 1}),
        Case("other runs", _some, points=2, hidden=True, fixed=[{**_EXAMPLE, "v": 1, "p": 2}]),
    ],
    idea="What do the additional microbatches of the longer run take, and what do they not take?",
    hint="each = (t2 - t1) / (m2 - m1); bubble = (p - 1) / v each; once = t1 - m1 each - bubble; step = t1 + (m - m1) "
    "each.",
)  # fmt: skip
