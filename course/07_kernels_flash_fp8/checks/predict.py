"""Checks of lab 07, first part: what a kernel waits for, memory, arithmetic or its launch."""

from __future__ import annotations

from labkit.exercises import Case, Draw, Exercise


def at_best(flops: float, nbytes: float, peak: float, bandwidth: float, launch: float) -> dict[str, object]:
    computing, moving = flops / peak, nbytes / bandwidth
    bound = "launch" if launch > max(computing, moving) else "memory" if moving > computing else "arithmetic"
    return {"intensity": flops / nbytes, "seconds": max(computing, moving, launch), "bound": bound}


def _machine(draw: Draw) -> dict[str, float]:
    ridge = draw.choice([50.0, 200.0, 300.0])
    bandwidth = 1e12 * draw.integer(1, 8)
    nbytes = 1e6 * draw.integer(1, 900)
    factor = draw.choice([0.01, 0.4, 2.5, 30.0])
    return {
        "flops": nbytes * ridge * factor, "nbytes": nbytes, "peak": ridge * bandwidth, "bandwidth": bandwidth,
        "launch": draw.choice([0.3, 3.0]) * nbytes / bandwidth,
    }  # fmt: skip


_SMALL = {"peak": 1e12, "bandwidth": 2e12, "launch": 1e-9}
AT_BEST = Exercise(
    "at_best",
    reference=at_best,
    cases=[
        Case("little to compute", {"flops": 4e9, "nbytes": 2e9, "peak": 1e15, "bandwidth": 4e12, "launch": 5e-6}),
        Case("much to compute", {"flops": 4e13, "nbytes": 2e9, "peak": 1e15, "bandwidth": 4e12, "launch": 5e-6}),
        Case("next to nothing to do", {"flops": 4e6, "nbytes": 2e6, "peak": 1e15, "bandwidth": 4e12, "launch": 5e-6}),
        Case("other machines", _machine, points=2, hidden=True, fixed=[
            {"flops": 5e9, "nbytes": 4e9, **_SMALL},
            {"flops": 4e9, "nbytes": 8e9, **_SMALL},  # at the ridge
            {"flops": 7e9, "nbytes": 2e9, **_SMALL},
            {"flops": 7e9, "nbytes": 2e9, **_SMALL, "launch": 4e-3},  # above one of the two
            {"flops": 1e9, "nbytes": 8e9, **_SMALL, "launch": 2e-3},
            {"flops": 3e9, "nbytes": 8e9, **_SMALL, "launch": 5e-3}]),  # above both, and below their sum
    ],
    idea="Three things go on at the same time, computing, moving and launching: which one takes longest?",
    hint="flops/peak, nbytes/bandwidth and launch are three times. The longest is the answer, and names the bound.",
)  # fmt: skip

EXERCISES = [AT_BEST]
