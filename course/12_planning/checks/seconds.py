"""Lab 12, the time of a step from FLOPs, rates and waits; and the two shares of the peak that are confused."""

from __future__ import annotations

from typing import Any

from labkit.exercises import Case, Draw, Exercise


def step_time(
    matrices: float, square: float, batch: int, gpus: int, peak: float, reached: float, p: int, v: int, m: int,
    full: bool, waits: float, gradients: float,
) -> dict[str, float]:  # fmt: skip
    """The seconds of a step, and the shares of the peak."""
    forward = batch * (matrices + square / 2) / gpus  # FLOPs of a GPU, all microbatches
    again = forward if full else 0.0
    one, backward = ((flops / (m * peak * reached)) for flops in (3 * forward + again, 2 * forward + again))
    seconds = (m + (p - 1) / v) * (one + waits) + max(0.0, gradients - backward)
    done = 3 * forward / (seconds * peak)
    return {"seconds": seconds, "mfu": done, "hfu": done + again / (seconds * peak)}


_TINY = {"matrices": 900.0, "square": 200.0, "batch": 8, "gpus": 4, "peak": 1000.0, "reached": 0.5, "p": 1, "v": 1,
         "m": 2, "full": False, "waits": 0.0, "gradients": 0.0}  # fmt: skip
_PIPE = {**_TINY, "p": 3, "m": 4, "batch": 12, "gpus": 6, "full": True}
_SECOND = {**_TINY, "p": 2, "v": 2, "full": True, "waits": 1.0, "gradients": 9.0}
_WAITS = {**_TINY, "waits": 0.75, "gradients": 7.0}


def _some(draw: Draw) -> dict[str, Any]:
    p = draw.choice([1, 2, 4, 8])
    v = draw.choice([1, 2, 5]) if p > 1 else 1
    m = p * draw.integer(1, 8) if v > 1 else draw.integer(1, 20)
    gpus = p * draw.choice([3, 8, 24])
    matrices, peak = float(draw.integer(100, 900)) * 1e12, 1e12 * draw.choice([312, 989, 2250])
    forward = matrices * m * 3 / (gpus * m * peak * 0.6)
    return {"matrices": matrices, "square": matrices * draw.choice([0.1, 0.7, 3.0]), "batch": 3 * m, "gpus": gpus,
            "peak": peak, "reached": draw.choice([0.5, 0.65, 0.8]), "p": p, "v": v, "m": m,
            "full": draw.choice([True, False]), "waits": forward * draw.choice([0.0, 0.3, 1.0]),
            "gradients": forward * draw.choice([0.0, 1.0, 4.0, 30.0])}  # fmt: skip


_FIXED = [
    {**_TINY, "p": 4, "v": v, "m": 8, "full": full, "waits": 0.25, "gradients": gradients, "gpus": 8}
    for v in (1, 3) for full in (True, False) for gradients in (0.0, 0.3, 50.0)
] + [
    {**_TINY, "square": 33.0},
    *({**_TINY, "p": p, "m": m, "batch": 2 * m, "gpus": 16, "full": full}  # fewer microbatches than ranks, and as many
      for p, m in ((8, 3), (8, 1), (4, 4), (2, 1)) for full in (True, False)),
    {**_TINY, "p": 4, "v": 3, "m": 4, "gpus": 12, "waits": 0.5, "gradients": 9.0},
]  # fmt: skip


STEP = Exercise(
    "step_time",
    reference=step_time,
    cases=[
        Case("the example: 4 GPUs, 2 microbatches, nothing else", _TINY),
        Case("3 stages, 4 microbatches, full recompute", _PIPE),
        Case("0.75 seconds of waiting in each microbatch, gradients of 7 seconds", _WAITS),
        Case("the second example: 2 ranks with 2 chunks", _SECOND),
        Case("other runs, some with fewer microbatches than ranks", _some, points=2, hidden=True, fixed=_FIXED),
    ],
    idea="Begin with the forward pass of one microbatch on one rank; every other time is a multiple of it or is added.",
    hint="sample = matrices + square / 2; forward = batch sample / (gpus m peak reached); backward = 2 forward, 3 with "
    "full; seconds = m (forward + backward + waits) (1 + (p - 1)/(v m)) + max(0, gradients - backward); mfu = 3 batch "
    "sample / (seconds gpus peak); hfu is 4/3 of it with full.",
)  # fmt: skip
