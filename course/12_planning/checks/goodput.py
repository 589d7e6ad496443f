"""Lab 12, what failures leave of a run: the interval of checkpoints, the goodput, the days."""

from __future__ import annotations

from typing import Any

from labkit.exercises import Case, Draw, Exercise

HOUR, DAY = 3600.0, 86_400.0


def goodput(gpus: int, failures: float, save: float, restart: float, days: float) -> dict[str, float]:
    """The minimum by its derivative: save / t and t / (2 between) are equal there."""
    between = HOUR / (gpus * failures)
    interval = (2 * save * between) ** 0.5
    share = 1 - 2 * save / interval - restart / between
    return {"between": between, "interval": interval, "goodput": share, "days": days / share}


_FIRST = {"gpus": 1000, "failures": 1e-4, "save": 18.0, "restart": 720.0, "days": 9.2}
_LLAMA = {"gpus": 16_384, "failures": 2e-5, "save": 10.0, "restart": 300.0, "days": 50.0}


def _some(draw: Draw) -> dict[str, Any]:
    return {"gpus": 8 * draw.integer(20, 2000), "failures": 1e-6 * draw.integer(2, 30),
            "save": float(draw.integer(1, 90)), "restart": float(draw.integer(60, 1200)),
            "days": float(draw.integer(3, 90))}  # fmt: skip


GOODPUT = Exercise(
    "goodput",
    reference=goodput,
    rtol=1e-4,  # of a grid or of a search near a flat minimum; another formula is off by more
    cases=[
        Case("the example: 1,000 GPUs, a save of 18 s", _FIRST),
        Case("16,384 GPUs, a save of 10 s", _LLAMA),
        Case("other runs", _some, points=2, hidden=True, fixed=[
            {**_FIRST, "save": 2.0}, {**_FIRST, "restart": 0.0}, {**_LLAMA, "gpus": 8},
            {**_LLAMA, "failures": 3e-4, "save": 2.0, "restart": 60.0}]),
    ],
    idea="Write the two losses that depend on the interval t as shares of the time. One falls with t, one rises with "
    "it. Where is their sum smallest?",
    hint="between = 3600 / (gpus failures); lost = save / t + (t / 2 + restart) / between; its derivative is 0 at "
    "t = sqrt(2 save between) (Young, 1974); goodput = 1 - lost; days / goodput.",
)  # fmt: skip
