"""Checks of lab 07, first part: bytes that a norm moves, and the roofline."""

from __future__ import annotations

from labkit.exercises import Case, Draw, Exercise


def norm_bytes(rows: int, cols: int, element_size: int) -> dict[str, int]:
    whole = rows * cols * element_size
    return {"eager": 7 * whole, "fused": 2 * whole}


NORM_BYTES = Exercise(
    "norm_bytes",
    reference=norm_bytes,
    cases=[
        Case("4 x 8 in bf16", {"rows": 4, "cols": 8, "element_size": 2}),
        Case("other sizes", lambda draw: {
            "rows": draw.integer(2, 9000), "cols": draw.integer(2, 9000), "element_size": draw.choice([2, 4])},
            hidden=True, fixed=[{"rows": 300, "cols": 70, "element_size": size} for size in (1, 2, 8)]),
    ],
    idea="Go through the picture: how many tensors of the full size does each operation read, and how many does it "
    "write?",
    hint="square: reads 1, writes 1. mean: reads 1. times rstd: 1 and 1. times gamma: 1 and 1. Fused: 1 and 1.",
)  # fmt: skip


def at_best(flops: float, nbytes: float, peak: float, bandwidth: float) -> dict[str, object]:
    computing, moving = flops / peak, nbytes / bandwidth
    return {
        "intensity": flops / nbytes, "seconds": max(computing, moving),
        "bound": "memory" if moving > computing else "arithmetic",
    }  # fmt: skip


def _machine(draw: Draw) -> dict[str, float]:
    ridge = draw.choice([50.0, 200.0, 300.0])
    bandwidth = 1e12 * draw.integer(1, 8)
    nbytes = 1e6 * draw.integer(1, 900)
    factor = draw.choice([0.01, 0.4, 2.5, 30.0])
    return {"flops": nbytes * ridge * factor, "nbytes": nbytes, "peak": ridge * bandwidth, "bandwidth": bandwidth}


AT_BEST = Exercise(
    "at_best",
    reference=at_best,
    cases=[
        Case("little to compute", {"flops": 4e9, "nbytes": 2e9, "peak": 1e15, "bandwidth": 4e12}),
        Case("much to compute", {"flops": 4e13, "nbytes": 2e9, "peak": 1e15, "bandwidth": 4e12}),
        Case("other machines", _machine, points=2, hidden=True, fixed=[
            {"flops": 5e9, "nbytes": 4e9, "peak": 1e12, "bandwidth": 2e12},
            {"flops": 4e9, "nbytes": 8e9, "peak": 1e12, "bandwidth": 2e12},  # at the ridge
            {"flops": 7e9, "nbytes": 2e9, "peak": 1e12, "bandwidth": 2e12}]),
    ],
    idea="Two things go on at the same time, computing and moving: which one takes longer?",
    hint="flops/peak and nbytes/bandwidth are two times. The longer one is the answer, and names the bound.",
)  # fmt: skip

EXERCISES = [NORM_BYTES, AT_BEST]
