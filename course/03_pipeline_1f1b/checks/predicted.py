"""Lab 03, what is computed before anything runs: the bubble, and what it means for a model of your own.

Everything follows from one picture: a rank works m*v steps of length 1/v, and waits p-1 of them while the pipeline
fills and drains.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from labkit.exercises import Case, Draw, Exercise

# --------------------------------------------------------------------------------------------------- the bubble


def bubble(p: int, m: int, v: int) -> float:
    """Idle time over work, with p ranks, m microbatches, and v chunks on each rank."""
    return (p - 1) / (m * v)


def _sizes(draw: Draw) -> dict[str, Any]:
    p = draw.integer(2, 16)
    return {"p": p, "m": p * draw.integer(1, 12), "v": draw.integer(1, 4)}


BUBBLE = Exercise(
    "bubble",
    reference=bubble,
    cases=[
        Case("2 ranks, 2 microbatches: the table by hand", {"p": 2, "m": 2, "v": 1}),
        Case("the same with 2 chunks a rank", {"p": 2, "m": 2, "v": 2}),
        Case("one rank never waits", {"p": 1, "m": 8, "v": 1}),
        Case("other pipelines", _sizes, points=2, hidden=True, fixed=[
            {"p": p, "m": m, "v": v}
            for p, m, v in ((4, 8, 1), (4, 8, 2), (4, 6, 1), (7, 7, 3), (2, 5, 1), (3, 1, 1), (5, 10, 4))]),
    ],
    idea="How long does the last rank wait before its first action, and how long after its last one?",
    hint="A rank works 3m steps. While the pipeline fills and drains it waits for p-1 forwards and p-1 backwards, "
    "3(p-1) steps; with v chunks each of them is 1/v as long. Idle time over work is the quotient.",
)  # fmt: skip

# ---------------------------------------------------------------------------------------------------- questions


def answers(
    p: int, m: int, v: int, layers: int, tokens: int, hidden: int, kept_bytes_per_token_and_layer: int
) -> dict[str, Any]:
    idle = Fraction(p - 1, v * m)
    warmup = min(m * v, p - 1 if v == 1 else 2 * (p - 1) + (v - 1) * p)
    kept = min(m * v, warmup + 1)
    per_chunk = layers // (p * v) * tokens * kept_bytes_per_token_and_layer
    return {
        "idle_share": float(idle / (1 + idle)),
        "microbatches_for_5_percent": _fewest(p, v),
        "kept_bytes_on_rank_0": kept * per_chunk,
        "bytes_between_ranks": 2 * (p * v - 1) * m * tokens * hidden * 2,
    }


def _fewest(p: int, v: int, in_groups: bool = True) -> int:
    """The smallest number of microbatches with a bubble of at most 1/20; with chunks a multiple of p, as `interleaved`
    requires."""
    fewest = math.ceil(Fraction(20 * (p - 1), v))
    return fewest + -fewest % p if v > 1 and in_groups else fewest


def _a_run(draw: Draw) -> dict[str, Any]:
    p, v = draw.choice([2, 3, 4, 6, 8]), draw.choice([1, 2, 3, 4])
    return {
        "p": p, "m": p * draw.integer(1, 8), "v": v, "layers": p * v * draw.integer(1, 4),
        "tokens": 1024 * draw.integer(1, 8), "hidden": 256 * draw.integer(4, 32),
        "kept_bytes_per_token_and_layer": 34 * 256 * draw.integer(4, 32),
    }  # fmt: skip


_GPT3 = {
    "p": 8, "m": 64, "v": 1, "layers": 96, "tokens": 2048, "hidden": 12288,
    "kept_bytes_per_token_and_layer": 34 * 12288 // 8,
}  # fmt: skip

_BY_HAND = {
    "p": 3, "m": 5, "v": 1, "layers": 6, "tokens": 7, "hidden": 11, "kept_bytes_per_token_and_layer": 13,
}  # fmt: skip

_RUN = {"layers": 72, "tokens": 3, "hidden": 5, "kept_bytes_per_token_and_layer": 7}
_RUNS = [
    {"p": 2, "m": 4, "v": 3, **_RUN},  # 20/3 microbatches: 7, in groups of 2 are 8
    {"p": 2, "m": 4, "v": 9, **_RUN},  # 20/9 are 2.2: 3, in groups of 2 are 4
    {"p": 3, "m": 3, "v": 3, **_RUN},  # 40/3: 14, in groups of 3 are 15; 9 slots are fewer than warm-up + 1
    {"p": 6, "m": 12, "v": 3, **_RUN},  # 100/3: 34, in groups of 6 are 36
    {"p": 4, "m": 4, "v": 2, **_RUN},  # 30, in groups of 4 are 32; 8 slots
    {"p": 4, "m": 3, "v": 1, **_RUN},  # fewer microbatches than ranks
    {"p": 6, "m": 60, "v": 1, **_RUN},  # 100 is no multiple of 6, and need not be one
]


QUESTIONS = Exercise(
    "answers",
    reference=answers,
    cases=[
        Case("3 stages, 5 microbatches: by hand", _BY_HAND),
        Case("GPT-3 on 8 stages with 4 chunks a rank", {**_GPT3, "v": 4}),
        Case("other runs", _a_run, points=2, hidden=True, fixed=[_GPT3, *_RUNS]),
    ],
    idea="Work out the run by hand below the questions first, then change one of its numbers at a time.",
    hint="bubble = (p-1)/(vm). Its share of all time is bubble / (1 + bubble). Rank 0 keeps warm-up + 1 chunks of "
    "layers/(pv) layers, and never more than m*v chunks. The fewest microbatches: 20(p-1)/v, rounded up, with "
    "chunks to a multiple of p. A microbatch crosses pv - 1 borders, there and back, 2 bytes a number.",
)
