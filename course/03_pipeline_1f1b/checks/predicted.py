"""Lab 03, what is computed before anything runs: the bubble, and what it means for a model of your own.

Everything follows from one picture: a rank works m*v steps of a v-th, and waits p-1 of them while the pipeline fills
and drains.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

from labkit.exercises import Case, Draw, Exercise, Mistake, instead

# --------------------------------------------------------------------------------------------------- the bubble


def bubble(p: int, m: int, v: int) -> float:
    """Idle time over work, with p ranks, m microbatches, v chunks a rank."""
    return (p - 1) / (m * v)


def _sizes(draw: Draw) -> dict[str, Any]:
    p = draw.integer(2, 16)
    return {"p": p, "m": p * draw.integer(1, 12), "v": draw.integer(1, 4)}


BUBBLE = Exercise(
    "bubble",
    reference=bubble,
    cases=[
        Case("4 ranks, 8 microbatches", {"p": 4, "m": 8, "v": 1}),
        Case("the same with 2 chunks a rank", {"p": 4, "m": 8, "v": 2}),
        Case("one rank never waits", {"p": 1, "m": 8, "v": 1}),
        Case("other pipelines", _sizes, points=2, hidden=True),
    ],
    mistakes=[
        Mistake(lambda p, m, v: (p - 1) / m, "With v chunks a rank, filling and draining take steps of a v-th."),
        Mistake(
            lambda p, m, v: (p - 1) / v / (m + (p - 1) / v),
            "This is the share of the whole time. Asked is idle time over *work*: divide by the work alone.",
        ),
        Mistake(lambda p, m, v: p / (m * v), "The first rank is p-1 steps from the last, not p."),
    ],
    hint="A rank works m steps. While the pipeline fills and drains it waits p-1 steps, each 1/v as long.",
)

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
        "microbatches_for_5_percent": -(-20 * (p - 1) // v),
        "kept_bytes_on_rank_0": kept * per_chunk,
        "bytes_between_ranks": 2 * (p * v - 1) * m * tokens * hidden * 2,
    }


def _a_run(draw: Draw) -> dict[str, Any]:
    p, v = draw.choice([2, 4, 8]), draw.choice([1, 2, 4])
    return {
        "p": p, "m": p * draw.integer(2, 8), "v": v, "layers": p * v * draw.integer(1, 4),
        "tokens": 1024 * draw.integer(1, 8), "hidden": 256 * draw.integer(4, 32),
        "kept_bytes_per_token_and_layer": 34 * 256 * draw.integer(4, 32),
    }  # fmt: skip


def _all_kept(p: int, m: int, layers: int, tokens: int, kept_bytes_per_token_and_layer: int, **_: Any) -> int:
    return m * (layers // p) * tokens * kept_bytes_per_token_and_layer


def _bytes(borders: Callable[[int, int], int], ways: int = 2) -> Callable[..., dict[str, Any]]:
    return instead(answers, bytes_between_ranks=lambda p, m, v, tokens, hidden, **_: ways * borders(p, v) * m * tokens
                   * hidden * 2)  # fmt: skip


_GPT3 = {
    "p": 8, "m": 64, "v": 1, "layers": 96, "tokens": 2048, "hidden": 12288,
    "kept_bytes_per_token_and_layer": 34 * 12288 // 8,
}  # fmt: skip

QUESTIONS = Exercise(
    "answers",
    reference=answers,
    cases=[
        Case("GPT-3 on 8 stages", _GPT3),
        Case("the same with 4 chunks a rank", {**_GPT3, "v": 4}),
        Case("another run", _a_run, points=2, hidden=True),
    ],
    mistakes=[
        Mistake(
            instead(answers, idle_share=lambda p, m, v, **_: (p - 1) / (v * m)),
            "The share of *all* time is bubble / (1 + bubble).",
        ),
        Mistake(
            instead(answers, kept_bytes_on_rank_0=_all_kept),
            "That is GPipe's memory. 1F1B keeps warm-up + 1 chunks, not m.",
        ),
        Mistake(_bytes(lambda p, v: p * v - 1, ways=1), "Activations go forward and gradients come back: twice."),
        Mistake(_bytes(lambda p, v: p - 1), "With v chunks a microbatch crosses p*v - 1 borders, not p - 1."),
    ],
    hint="bubble = (p-1)/(vm). Its share of all time is bubble / (1 + bubble). Rank 0 keeps warm-up + 1 chunks of "
    "layers/(pv) layers. A microbatch crosses pv - 1 borders, there and back, 2 bytes a number.",
)
