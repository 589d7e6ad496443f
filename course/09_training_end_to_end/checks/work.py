"""Lab 09, the work of a rank in one step: products, sums over tp, the sum over dp.

The reference goes through the step: each microbatch, each layer, each of its sums.
"""

from __future__ import annotations

from typing import Any

from labkit.exercises import Case, Draw, Exercise


def step_work(run: dict[str, Any]) -> dict[str, float]:
    tp, dp, recompute = run["tp"], run["dp"], run["recompute"]
    tokens = run["b"] * run["s"]
    messages, flops = 0, 0.0
    for _ in range(run["m"]):
        messages += 2 if tp > 1 else 0  # embedding, forward; output layer, backward
        flops += 6 * tokens * run["head"] / tp
        for _ in range(run["layers"]):
            forward, backward = (2, 2) if tp > 1 else (0, 0)
            messages += forward + backward
            flops += 3 * (2 * tokens * run["layer"] / tp)
            if recompute:
                messages += forward - 1 if forward else 0  # the last result is read by nobody
                flops += 2 * tokens * run["layer"] / tp
    held = (run["layers"] * run["layer"] + 2 * run["head"]) / tp
    return {
        "flops": flops,
        "messages": messages,
        "tp_bytes": messages * tokens * run["h"] * 4,
        "dp_bytes": 4 * held if dp > 1 else 0,
    }


_EXAMPLE: dict[str, Any] = {
    "layers": 1, "h": 4, "layer": 100, "head": 40, "s": 5, "tp": 2, "dp": 2, "b": 1, "m": 3, "recompute": False,
}  # fmt: skip


def _some(draw: Draw) -> dict[str, Any]:
    h, tp, dp = 16 * draw.integer(1, 6), draw.choice([1, 2, 4]), draw.choice([1, 2, 3])
    run = {"layers": draw.integer(2, 6), "h": h, "layer": h * h * 8, "head": h * 16 * draw.integer(2, 9),
           "s": draw.choice([8, 32]), "tp": tp, "dp": dp, "b": draw.integer(1, 4), "m": draw.integer(1, 5),
           "recompute": draw.choice([False, True])}  # fmt: skip
    return {"run": run}


WORK = Exercise(
    "step_work",
    reference=step_work,
    cases=[
        Case("the example: one layer, tp 2, dp 2, three microbatches", {"run": _EXAMPLE}),
        Case("the same, its layer recomputed", {"run": {**_EXAMPLE, "recompute": True}}),
        Case("other layouts", _some, points=2, hidden=True, draws=6, fixed=[
            {"run": {**_EXAMPLE, "layers": 3, "recompute": True}}, {"run": {**_EXAMPLE, "tp": 1, "recompute": True}},
            {"run": {**_EXAMPLE, "dp": 1, "b": 2}}, {"run": {**_EXAMPLE, "tp": 4, "b": 3, "m": 2, "layers": 2}},
            {"run": {**_EXAMPLE, "tp": 1, "dp": 1}}]),
    ],
    errors={"KeyError": "A run has the keys layers, h, layer, head, s, tp, dp, b, m and recompute."},
    idea="Go through one microbatch and mark where a sum over tp is needed. Then: which of it happens again with "
    "recompute, and what happens once a step?",
    hint="tokens = b s. messages = m (2 + layers (4, with recompute 5)), 0 without tp. tp_bytes = messages * "
    "tokens * h * 4. "
    "flops = m * tokens * (6 head + layers * layer * (6, with recompute 8)) / tp. dp_bytes = 4 (layers * layer "
    "+ 2 head) "
    "/ tp, 0 without dp.",
)  # fmt: skip
