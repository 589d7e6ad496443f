"""Lab 08, predictions: bytes of a checkpoint, seconds of a save, and the best interval between two saves."""

from __future__ import annotations

import math
from typing import Any

from labkit.exercises import Case, Draw, Exercise

_HOUR = 3600.0


def costs(parameters: int, ranks: int, gigabytes: float, gpu_hours: float, every: float) -> dict[str, float]:
    nbytes = parameters * (2 + 4 + 8)
    seconds = nbytes / (gigabytes * 1e9 * ranks)
    failures = gpu_hours * _HOUR / ranks
    return {
        "bytes": nbytes,
        "seconds": seconds,
        "between_failures": failures,
        "lost": seconds / every + every / (2 * failures),
        "best": math.sqrt(2 * seconds * failures),
    }


def _run(draw: Draw) -> dict[str, Any]:
    return {
        "parameters": draw.integer(1, 400) * 10**9, "ranks": draw.choice([8, 24, 640, 4096]),
        "gigabytes": draw.choice([0.05, 0.5, 3.0]), "gpu_hours": float(draw.integer(5_000, 60_000)),
        "every": float(draw.integer(20, 4000)),
    }  # fmt: skip


_TINY = {"parameters": 2_000_000_000, "ranks": 7, "gigabytes": 1.0, "gpu_hours": 14.0, "every": 240.0}
_ODD = {"parameters": 3, "ranks": 1, "gigabytes": 2.0, "gpu_hours": 0.25, "every": 1.5}


COSTS = Exercise(
    "costs",
    reference=costs,
    cases=[
        Case("2·10^9 parameters, 7 ranks that write 1 GB/s each, a GPU fails once in 14 hours", _TINY),
        Case("other runs", _run, points=2, hidden=True, fixed=[_ODD, {**_TINY, "every": 100.0}]),
    ],
    idea="Two losses: one falls with the interval, one grows with it. Where is their sum smallest?",
    hint="bytes = 14 P; seconds = bytes / (ranks * gigabytes * 1e9); f = gpu_hours * 3600 / ranks; "
    "lost = seconds / every + every / (2 f); its derivative is 0 at sqrt(2 * seconds * f).",
)  # fmt: skip
