"""Lab 09, what is asked in an interview and can be computed."""

from __future__ import annotations

import math
from typing import Any

from labkit.exercises import Case, Draw, Exercise

SAVED = ("weights", "Adam's moments", "consumed samples", "dropout's random streams", "loss scale")
FOLLOWS = ("gradients", "learning rate", "order of the samples", "batch size of the ramp-up", "gradient norm", "epoch")


def answers(
    parameters: float, tokens: float, gpus: int, peak: float, mfu: float, nats: float, token_bytes: float,
    counts: list[int], parts: list[str],
) -> dict[str, Any]:  # fmt: skip
    budget = 6 * parameters * tokens
    best = math.sqrt(budget / 6 / 20)
    largest, smallest = max(counts), min(counts)
    return {
        "days": budget / (gpus * peak * 1e12 * mfu) / 86_400,
        "best_parameters": best,
        "best_tokens": 20 * best,
        "bits_per_byte": nats * math.log2(math.e) / token_bytes,
        "times": largest / smallest,
        "saved": [name for name in parts if name in SAVED],
    }


_EXAMPLE: dict[str, Any] = {
    "parameters": 1.2e9, "tokens": 1e10, "gpus": 10, "peak": 1000.0, "mfu": 0.5, "nats": math.log(16.0),
    "token_bytes": 4.0, "counts": [40, 10, 25], "parts": ["weights", "gradients", "consumed samples"],
}  # fmt: skip


def _some(draw: Draw) -> dict[str, Any]:
    parts = draw.random.sample([*SAVED, *FOLLOWS], draw.integer(4, 9))
    return {
        "parameters": draw.choice([4e8, 8e9, 7e10]), "tokens": draw.choice([2e11, 1.5e13]),
        "gpus": draw.choice([8, 512]), "peak": draw.choice([312.0, 989.5]), "mfu": draw.choice([0.3, 0.45]),
        "nats": draw.random.uniform(1.5, 3), "token_bytes": draw.random.uniform(3, 5),
        "counts": [draw.integer(3, 60) for _ in range(draw.integer(2, 6))], "parts": parts,
    }  # fmt: skip


ANSWERS = Exercise(
    "answers",
    reference=answers,
    cases=[
        Case("a small run", _EXAMPLE),
        Case("other runs", _some, points=3, hidden=True, draws=4, fixed=[
            {**_EXAMPLE, "parts": [*FOLLOWS, *SAVED]}, {**_EXAMPLE, "counts": [7, 7], "parts": []},
            {**_EXAMPLE, "gpus": 3, "mfu": 0.4, "token_bytes": 2.5, "nats": 1.0}]),
    ],
    idea="Each is a line. Which of the parts could a resumed run compute from the configuration and from another part?",
    hint="days = 6 N D / (gpus * peak * 1e12 * mfu) / 86,400. With D = 20 N the same budget is 120 N^2. "
    "bits_per_byte = "
    "nats / ln 2 / token_bytes. times = largest count / smallest. Saved: weights, moments, consumed samples, random "
    "streams, loss scale.",
)  # fmt: skip
