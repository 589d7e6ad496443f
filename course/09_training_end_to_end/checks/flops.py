"""Lab 09, what is predicted: the model FLOPs of a token, and the share of the peak that a run reaches.

The reference lists every product of a layer with its two inner sizes, and adds them up.
"""

from __future__ import annotations

from typing import Any

from labkit.exercises import Case, Draw, Exercise


def mfu(model: dict[str, int], s: int, rate: float, gpus: int, sheet: float, sparse: bool) -> dict[str, float]:
    h, a, g, d, f, v = (model[name] for name in ("h", "a", "g", "d", "f", "v"))
    weights = [(h, a * d), (h, g * d), (h, g * d), (a * d, h), (h, f), (h, f), (f, h)]
    layer = sum(i * o for i, o in weights)
    forward = 2 * layer + 2 * (2 * a * d) * s / 2  # scores and values: query i sees i of the s keys
    parameters = model["layers"] * layer + h * v
    flops = 3 * (model["layers"] * forward + 2 * h * v)
    done = flops + model["layers"] * forward
    peak = gpus * (sheet / 2 if sparse else sheet)
    return {"parameters": parameters, "flops": flops, "mfu": flops * rate / peak, "hfu": done * rate / peak}


SMALL = {"layers": 1, "h": 4, "a": 2, "g": 1, "d": 2, "f": 6, "v": 10}
_EXAMPLE: dict[str, Any] = {"model": SMALL, "s": 8, "rate": 1000.0, "gpus": 2, "sheet": 1e6, "sparse": False}


def _some(draw: Draw) -> dict[str, Any]:
    d, g = draw.choice([16, 32, 64]), draw.integer(1, 4)
    a = g * draw.integer(2, 5)
    model = {"layers": draw.integer(2, 9), "h": 32 * draw.integer(3, 20), "a": a, "g": g, "d": d,
             "f": 64 * draw.integer(5, 30), "v": 128 * draw.integer(5, 90)}  # fmt: skip
    return {"model": model, "s": 128 * draw.integer(1, 9), "rate": 100.0 * draw.integer(3, 90),
            "gpus": draw.choice([1, 4, 8]), "sheet": draw.choice([312e12, 1979e12]),
            "sparse": draw.choice([False, True])}  # fmt: skip


MFU = Exercise(
    "mfu",
    reference=mfu,
    cases=[
        Case("the example: one layer, two GPUs", _EXAMPLE),
        Case("the same, three layers, and a peak with sparsity", {
            **_EXAMPLE, "model": {**SMALL, "layers": 3}, "sparse": True}),
        Case("other models", _some, points=2, hidden=True, fixed=[
            {**_EXAMPLE, "model": {**SMALL, "layers": 2, "a": 3, "g": 3, "d": 4}, "gpus": 1},
            {**_EXAMPLE, "s": 64, "sparse": True},
            {**_EXAMPLE, "model": {"layers": 2, "h": 12, "a": 4, "g": 2, "d": 5, "f": 7, "v": 30}, "gpus": 3}]),
    ],
    errors={"KeyError": "A model has the keys layers, h, a, g, d, f and v."},
    idea="Write down each product of the layer with its shapes. Which of them have a weight, which have none, and "
    "which does a token not go through at all?",
    hint="parameters = layers * (h d (a + 2 g) + a d h + 3 h f) + h v. flops = 6 * parameters + layers * 6 a d s. "
    "The forward pass of a layer is a third of its part of flops; hfu adds it once more. Halve a sparse peak.",
)  # fmt: skip
