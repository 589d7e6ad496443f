"""Checks of lab 07, first part: bytes that a norm moves, and the roofline."""

from __future__ import annotations

from collections.abc import Callable

from labkit.exercises import Case, Draw, Exercise, Mistake


def norm_bytes(rows: int, cols: int, element_size: int) -> dict[str, int]:
    whole = rows * cols * element_size
    return {"eager": 7 * whole, "fused": 2 * whole}


def _small_ones(fused: bool) -> Callable[..., dict[str, int]]:
    """Return a mistake: the bytes of a row's mean, its root and gamma are counted as well."""

    def counted(rows: int, cols: int, element_size: int) -> dict[str, int]:
        right = norm_bytes(rows, cols, element_size)
        small = {"eager": (6 * rows + cols) * element_size, "fused": cols * element_size if fused else 0}
        return {key: right[key] + small[key] for key in right}

    return counted


def _times(eager: int, fused: int) -> Callable[..., dict[str, int]]:
    return lambda rows, cols, element_size: {
        "eager": eager * rows * cols * element_size, "fused": fused * rows * cols * element_size
    }  # fmt: skip


NORM_BYTES = Exercise(
    "norm_bytes",
    reference=norm_bytes,
    cases=[
        Case("4 x 8 in bf16", {"rows": 4, "cols": 8, "element_size": 2}),
        Case("other sizes", lambda draw: {
            "rows": draw.integer(2, 9000), "cols": draw.integer(2, 9000), "element_size": draw.choice([2, 4])},
            hidden=True, fixed=[{"rows": 300, "cols": 70, "element_size": size} for size in (1, 2, 8)]),
    ],
    mistakes=[
        Mistake(_times(4, 1), "Each operation also *writes* its result (that of the mean is too small to count)."),
        Mistake(_times(4, 2), "Each operation also *writes* its result (that of the mean is too small to count)."),
        *(Mistake(_times(3, fused), "Each operation also *reads* a whole tensor.") for fused in (1, 2)),
        *(Mistake(_small_ones(fused), "Count tensors of the full size only: no means, no roots, no gamma.")
          for fused in (True, False)),
        Mistake(_times(8, 2), "The mean reads a whole tensor and writes one number a row: that does not count."),
        Mistake(_times(5, 2), "`* gamma` is an operation of its own: it reads a whole tensor and writes one."),
        Mistake(_times(7, 3), "One kernel could keep the row on the chip between its two uses."),
        Mistake(lambda **i: {k: v // i["element_size"] for k, v in norm_bytes(**i).items()}, "In bytes, not numbers."),
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
    mistakes=[
        Mistake(lambda **i: {**at_best(**i), "seconds": i["flops"] / i["peak"] + i["nbytes"] / i["bandwidth"]},
                "At best both go on at the same time: the longer one counts, not the sum."),
        Mistake(lambda **i: {**at_best(**i), "intensity": i["nbytes"] / i["flops"]},
                "Arithmetic intensity is FLOP per byte."),
        Mistake(lambda **i: {**at_best(**i), "bound": "memory" if i["nbytes"] / i["bandwidth"] >= i["flops"] / i["peak"]
                else "arithmetic"}, "At the ridge itself arithmetic is the bound: memory is it below only."),
        Mistake(lambda **i: {**at_best(**i), "bound": {"memory": "arithmetic", "arithmetic": "memory"}[
                str(at_best(**i)["bound"])]}, "The bound is what takes longer."),
        Mistake(lambda **i: {**at_best(**i), "seconds": min(i["flops"] / i["peak"], i["nbytes"] / i["bandwidth"])},
                "Both must be done: the longer one counts."),
        Mistake(lambda **i: {**at_best(**i), "seconds": 1e6 * float(str(at_best(**i)["seconds"]))},
                "Flop over FLOP/s and bytes over bytes/s are seconds already."),
        Mistake(lambda **i: {**at_best(**i), "intensity": i["flops"] / i["nbytes"] / i["peak"] * i["bandwidth"]},
                "The intensity is the program's own, FLOP per byte; the ridge is no part of it."),
        Mistake(lambda **i: {**at_best(**i), "intensity": min(i["flops"] / i["nbytes"], i["peak"] / i["bandwidth"])},
                "The intensity is the program's own, FLOP per byte; the ridge is no part of it."),
    ],
    idea="Two things go on at the same time, computing and moving: which one takes longer?",
    hint="flops/peak and nbytes/bandwidth are two times. The longer one is the answer, and names the bound.",
)  # fmt: skip

EXERCISES = [NORM_BYTES, AT_BEST]
