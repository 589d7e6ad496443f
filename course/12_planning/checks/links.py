"""Lab 12, from bytes to seconds: the ring of an axis, on one node or over several."""

from __future__ import annotations

from collections import Counter
from typing import Any

from labkit.exercises import Case, Draw, Exercise


def axis_seconds(
    sizes: dict[str, int], axis: str, payload: float, node: int, inside: float, between: float, near: float, far: float
) -> dict[str, Any]:  # fmt: skip
    """The group of rank 0, counted out rank by rank, and the seconds of its all-gather."""
    ranks = [0]
    step = 1
    for name, size in sizes.items():
        if name == axis:
            ranks = [step * place for place in range(size)]
        step *= size
    on_nodes = Counter(rank // node for rank in ranks)
    alone = len(on_nodes) == 1
    rate, latency = (inside, near) if alone else (min(inside, min(on_nodes.values()) * between), far)
    hops = len(ranks) - 1
    return {"ranks": ranks, "seconds": hops * (payload / len(ranks) / rate + latency)}


_RATES = {"node": 4, "inside": 100.0, "between": 10.0, "near": 1.0, "far": 3.0}
_TINY = {"sizes": {"tp": 2, "dp": 4}, "axis": "dp", "payload": 800.0, **_RATES}
_INNER = {"sizes": {"tp": 4, "cp": 3, "dp": 2}, "axis": "tp", "payload": 1200.0, **_RATES}
_WIDE = {"sizes": {"tp": 2, "cp": 8, "dp": 3, "pp": 2}, "axis": "cp", "payload": 960.0, **_RATES, "node": 8}
_CAPPED = {**_WIDE, "between": 60.0}
_UNEVEN = {**_TINY, "sizes": {"tp": 2, "dp": 6}, "payload": 1200.0, "node": 8}


def _some(draw: Draw) -> dict[str, Any]:
    names = draw.choice([["tp", "cp", "dp", "pp"], ["tp", "dp", "pp", "cp"], ["dp", "tp", "cp", "pp"]])
    sizes = {name: draw.choice([2, 3, 4, 6, 8, 16]) for name in names}
    axis, node = draw.choice(names), draw.choice([4, 8, 16])
    return {"sizes": sizes, "axis": axis, "payload": 1e6 * draw.integer(1, 900), "node": node,
            "inside": 1e9 * draw.integer(200, 900), "between": 1e9 * draw.integer(20, 90),
            "near": 1e-6 * draw.integer(2, 6), "far": 1e-6 * draw.integer(9, 30)}  # fmt: skip


_FIXED = [
    {**_WIDE, "axis": axis, "node": node, "between": between}
    for axis in ("tp", "cp", "dp", "pp")
    for node in (2, 4, 16)
    for between in (10.0, 70.0)
] + [
    {**_TINY, **more}
    for more in (
        {"sizes": {"tp": 1, "dp": 4}}, {"sizes": {"tp": 8, "dp": 1}}, {"payload": 10.0},
        {"sizes": {"tp": 3, "dp": 5}}, {"sizes": {"tp": 3, "dp": 4}, "node": 8},
        {"sizes": {"tp": 1, "dp": 11}, "node": 8}, {"sizes": {"tp": 3, "dp": 11}, "node": 8},
    )
]  # fmt: skip

LINKS = Exercise(
    "axis_seconds",
    reference=axis_seconds,
    cases=[
        Case("the example: tp 2 inside dp 4, nodes of 4", _TINY),
        Case("the innermost axis fills a node", _INNER),
        Case("cp 8 outside of tp 2, nodes of 8", _WIDE),
        Case("the same with a faster network", _CAPPED),
        Case("dp 6 outside of tp 2, nodes of 8", _UNEVEN),
        Case("other meshes, axes and links", _some, hidden=True, fixed=_FIXED),
    ],
    idea="Write down the ranks of the group first, with the node of each. A ring passes through all of them: how many "
    "rings find a card of their own on every node?",
    hint="stride = product of the sizes before the axis; ranks = stride * k, on nodes rank // node; g = how many are "
    "on the node with the fewest; if all are on one: inside and near; else min(inside, g * between) and far; "
    "(n - 1) * (payload / n / rate + latency).",
)  # fmt: skip
