"""Lab 08, predictions: bytes of a checkpoint, seconds of a save, and the best interval between two saves."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

from labkit.exercises import Case, Draw, Exercise, Mistake, instead

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
_wrong = partial(instead, costs)


def _with(change: Any) -> Any:
    """Return a mistake in which an intermediate result differs: `change(seconds, failures) -> (seconds, failures)`."""

    def answer(**inputs: Any) -> dict[str, float]:
        right = costs(**inputs)
        seconds, failures = change(right["seconds"], right["between_failures"], **inputs)
        every = inputs["every"]
        lost, best = seconds / every + every / (2 * failures), math.sqrt(2 * seconds * failures)
        return {**right, "seconds": seconds, "between_failures": failures, "lost": lost, "best": best}

    return answer


def _of_bytes(each: float) -> Any:
    def answer(**inputs: Any) -> dict[str, float]:
        scaled = {**inputs, "parameters": inputs["parameters"] * each / 14}
        return {**costs(**scaled), "bytes": inputs["parameters"] * each}

    return answer


COSTS = Exercise(
    "costs",
    reference=costs,
    cases=[
        Case("2·10^9 parameters, 7 ranks that write 1 GB/s each, a GPU fails once in 14 hours", _TINY),
        Case("other runs", _run, points=2, hidden=True, fixed=[_ODD, {**_TINY, "every": 100.0}]),
    ],
    mistakes=[
        Mistake(_of_bytes(16), "A checkpoint holds no gradients: a step begins without them."),
        Mistake(_of_bytes(18), "A checkpoint holds no gradients: a step begins without them."),
        Mistake(_of_bytes(12), "The bf16 weights are missing. (They could be rounded again, but here they are saved.)"),
        Mistake(_of_bytes(2), "These are the weights alone. To go on training a run needs the fp32 copy and the "
                "optimizer's averages."),
        Mistake(_with(lambda s, f, ranks, **_: (s * ranks, f)), "All ranks write at once, each its share."),
        Mistake(_with(lambda s, f, ranks, **_: (s, f * ranks)), "That is one GPU. Of many, the first that fails ends "
                "the run."),
        Mistake(_with(lambda s, f, **_: (s, f / _HOUR)), "Hours and seconds are mixed: all answers are in seconds."),
        Mistake(_wrong(lost=lambda every, **i: costs(every=every, **i)["seconds"] / every
                + every / costs(every=every, **i)["between_failures"]), "A failure comes, on average, in the middle "
                "between two saves: half an interval is lost."),
        Mistake(_wrong(lost=lambda every, **i: costs(every=every, **i)["seconds"] / every), "What failures undo is "
                "lost, too."),
        Mistake(_wrong(lost=lambda every, **i: every / 2 / costs(every=every, **i)["between_failures"]),
                "The seconds in which the run saves are lost, too."),
        Mistake(_wrong(best=lambda **i: math.sqrt(costs(**i)["seconds"] * costs(**i)["between_failures"])),
                "At the best interval the two losses are equal; here they are not."),
        Mistake(_wrong(lost=lambda every, **i: costs(every=every, **i)["seconds"] / every
                + every / costs(every=every, **i)["between_failures"],
                best=lambda **i: math.sqrt(costs(**i)["seconds"] * costs(**i)["between_failures"])), "A failure comes, "
                "on average, in the middle between two saves: half an interval is lost."),
        Mistake(_wrong(between_failures=lambda **i: costs(**i)["between_failures"] / _HOUR), "Hours and seconds are "
                "mixed: all answers are in seconds."),
        Mistake(_wrong(lost=lambda **i: costs(**{**i, "every": costs(**i)["best"]})["lost"]), "This is the share at "
                "the best interval. The run saves every `every` seconds."),
        Mistake(_with(lambda s, f, **_: (s * 1e9 / 2**30, f)), "A gigabyte is 10^9 bytes here, not 2^30."),
        Mistake(_wrong(best=lambda **i: 2 * costs(**i)["seconds"] * costs(**i)["between_failures"]), "That is the "
                "square of an interval."),
    ],
    idea="Two losses: one falls with the interval, one grows with it. Where is their sum smallest?",
    hint="bytes = 14 P; seconds = bytes / (ranks * gigabytes * 1e9); f = gpu_hours * 3600 / ranks; "
    "lost = seconds / every + every / (2 f); its derivative is 0 at sqrt(2 * seconds * f).",
)  # fmt: skip
