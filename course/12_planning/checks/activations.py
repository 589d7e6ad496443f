"""Lab 12, what a microbatch keeps for its backward pass: bytes of a layer, and of all layers and live microbatches of a
pipeline rank.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from labkit.exercises import Case, Draw, Exercise


def live(p: int, v: int, m: int, rank: int) -> Fraction:
    """The number of live microbatches, each counted in all layers of the rank."""
    if v == 1:
        return Fraction(min(m, p - rank))
    return Fraction(min(v * m, 2 * (p - rank - 1) + (v - 1) * p + 1), v)


def activation_bytes(
    model: dict[str, int], tokens: int, tp: int, sp: bool, recompute: str, layers: int, p: int, v: int, m: int,
    rank: int,
) -> dict[str, int]:  # fmt: skip
    """The bytes of a rank's activations."""
    h, heads, groups, d = (model[name] for name in ("h", "heads", "groups", "d"))
    cut = tokens // (tp if sp else 1)
    attention, mlp = 6 * (heads + groups) * d + 4 * heads, 6 * model["f"] * (recompute == "none")
    layer = 2 * cut * h if recompute == "full" else cut * (8 * h + 8) + tokens * (attention + mlp) // tp
    return {"layer": layer, "stage": int(layers * live(p, v, m, rank) * layer)}


_SMALL = {"h": 8, "heads": 4, "groups": 1, "d": 4, "f": 10}
_WIDE = {"h": 16, "heads": 12, "groups": 4, "d": 4, "f": 24}
_RUN = {"recompute": "none", "layers": 2, "p": 1, "v": 1, "m": 4, "rank": 0}
_FIRST = {"model": _SMALL, "tokens": 10, "tp": 1, "sp": False, **_RUN}
_CUT = {"model": _WIDE, "tokens": 12, "tp": 4, "sp": True, **_RUN, "p": 4, "m": 6, "rank": 1, "layers": 5}
_PIPE = {"model": _SMALL, "tokens": 10, "tp": 1, "sp": False, **_RUN, "p": 5, "m": 3, "rank": 0, "recompute": "full"}
_CHUNKS = {**_PIPE, "recompute": "mlp", "p": 3, "v": 4, "m": 12, "layers": 8}
_LLAMA = {"h": 8192, "heads": 64, "groups": 8, "d": 128, "f": 28672}


def _run(draw: Draw, recompute: str = "") -> dict[str, Any]:
    tp, p, v = draw.choice([1, 2, 4, 8]), draw.choice([1, 2, 3, 5, 8]), draw.choice([1, 1, 2, 3])
    v = v if p > 1 else 1
    groups = 8 * draw.integer(1, 3)
    model = {"h": 64 * draw.integer(5, 40), "heads": groups * draw.integer(1, 4), "groups": groups,
             "d": draw.choice([32, 64, 96]), "f": 64 * draw.integer(41, 90)}  # fmt: skip
    m = p * draw.integer(1, 6) if v > 1 else draw.integer(1, 12)
    return {"model": model, "tokens": 256 * draw.integer(1, 30), "tp": tp, "sp": draw.choice([True, False]) and tp > 1,
            "recompute": recompute or draw.choice(["none", "mlp"]), "layers": v * draw.integer(1, 10), "p": p, "v": v,
            "m": m, "rank": draw.integer(0, p - 1)}  # fmt: skip


def _of(**what: Any) -> dict[str, Any]:
    return {"model": _LLAMA, "tokens": 8192, "tp": 8, "sp": True, **_RUN, **what}


_SHAPES = [
    _of(layers=20, p=4, m=64), _of(sp=False), _of(tp=1, sp=False), _of(recompute="mlp"), _of(recompute="mlp", sp=False),
    _of(model={**_LLAMA, "groups": 64}), _of(model={**_LLAMA, "heads": 48}),
]  # fmt: skip
_LIVE = [
    _of(p=p, v=v, m=m, rank=rank, layers=2 * v, recompute=recompute)
    for p, v, m in ((4, 1, 2), (4, 1, 16), (4, 2, 4), (4, 2, 16), (4, 3, 8), (3, 5, 3), (8, 2, 8), (1, 1, 7))
    for rank in {0, p - 1, p // 2} for recompute in ("full", "none")
]  # fmt: skip
_FULL = [_of(recompute="full", sp=sp, tp=tp) for sp, tp in ((True, 8), (False, 8), (False, 1), (True, 2))]


ACTIVATIONS = Exercise(
    "activation_bytes",
    reference=activation_bytes,
    cases=[
        Case("the example: 10 tokens, 2 layers, one rank", _FIRST),
        Case("tp 4 with sequence parallelism, rank 1 of 4", _CUT),
        Case("recompute full, rank 0 of 5 with 3 microbatches", _PIPE),
        Case("recompute mlp, rank 0 of 3 with 4 chunks", _CHUNKS),
        Case("other models, with and without sequence parallelism", _run, hidden=True, fixed=_SHAPES),
        Case("other pipelines, and full recompute", lambda draw: _run(draw, draw.choice(["full", "none"])), hidden=True,
             fixed=[*_FULL, *_LIVE]),
    ],
    idea="Group what a layer keeps by what cuts it, and count the passes that are under way at the fullest moment.",
    hint="cut = tokens / tp with sp, else tokens; layer = cut (8h + 8) + tokens (6 (heads + groups) d + 4 heads + 6f) "
    "/ tp, without 6f for mlp; 2 h cut for full; passes: min(m, p - rank), or min(v m, 2 (p - rank - 1) + (v - 1) p + "
    "1), each of layers / v layers.",
)  # fmt: skip
