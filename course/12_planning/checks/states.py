"""Lab 12, memory that lasts from step to step: parameters of a rank, their bytes, and those of gradients and AdamW's
state.
"""

from __future__ import annotations

from typing import Any

from labkit.exercises import Case, Draw, Exercise

Model = dict[str, Any]


def padded(vocab: int, tp: int) -> int:
    return -(-vocab // (128 * tp)) * 128 * tp


def stage_parameters(
    model: Model, layers: int, first: bool, last: bool, tp: int, ep: int, etp: int
) -> dict[str, int]:  # fmt: skip
    """The parameters of a stage: outside of experts, and in them."""
    h, d, experts, mlp = model["h"], model["d"], model["experts"], 3 * model["h"] * model["f"]
    query, key = model["heads"] * d * h // tp, model["groups"] * d * h // tp
    table = h * padded(model["vocab"], tp) // tp
    each = 2 * h + 2 * query + 2 * key + (h * experts if experts else mlp // tp)
    ends = first * table + last * (h + table) - (model["tied"] and first and last) * table
    return {"dense": layers * each + ends, "experts": layers * (experts // ep) * mlp // etp}


_TINY: Model = {"h": 8, "heads": 2, "groups": 1, "d": 4, "f": 12, "vocab": 200, "tied": False, "experts": 0}
_ONE = {"layers": 1, "first": True, "last": True, "tp": 1, "ep": 1, "etp": 1}
_EXAMPLE = {"model": _TINY, **_ONE}
_TWO = {"model": {**_TINY, "heads": 12, "groups": 4}, **_ONE, "tp": 4, "etp": 4, "first": False, "layers": 3}
_MOE = {"model": {**_TINY, "groups": 2, "heads": 6, "experts": 10}, **_ONE, "first": False, "last": False, "tp": 2,
        "ep": 5, "layers": 3}  # fmt: skip
_LLAMA: Model = {**_TINY, "h": 8192, "heads": 64, "groups": 8, "d": 128, "f": 28672, "vocab": 128256}
_MIXTRAL: Model = {**_LLAMA, "h": 4096, "heads": 32, "f": 14336, "vocab": 32000, "experts": 8}


def _model(draw: Draw, experts: int) -> Model:
    groups = 4 * draw.integer(1, 3)
    return {"h": 64 * draw.integer(5, 40), "heads": groups * draw.choice([1, 2, 3, 5]), "groups": groups,
            "d": draw.choice([32, 64, 96]), "f": 64 * draw.integer(41, 90), "vocab": draw.integer(30_000, 200_000),
            "tied": draw.choice([True, False]), "experts": experts}  # fmt: skip


def _stage(draw: Draw, experts: int = 0) -> dict[str, Any]:
    first, last = draw.choice([(True, False), (False, True), (True, True), (False, False)])
    tp = draw.choice([1, 2, 4])
    ep, etp = (draw.choice([1, 2, 4]), draw.choice([1, tp])) if experts else (1, tp)
    model = _model(draw, experts)
    return {"model": model, "layers": draw.integer(1, 30), "first": first, "last": last, "tp": tp, "ep": ep, "etp": etp}


def _of(model: Model, **place: Any) -> dict[str, Any]:
    return {"model": model, **_ONE, **place}


_TIED = {**_LLAMA, "tied": True}
_PLACES = [
    _of(_LLAMA, layers=20, last=False, tp=8, etp=8), _of(_LLAMA, layers=19, first=False, tp=8, etp=8),
    _of(_TIED, layers=3, first=False, tp=4), _of(_TIED, layers=3, tp=4), _of(_TIED, layers=3, last=False),
    _of({**_LLAMA, "groups": 64}, layers=2, first=False, last=False, tp=2),
    _of({**_LLAMA, "groups": 1}, layers=2, last=False),
]  # fmt: skip
_OF_EXPERTS = [
    _of(_MIXTRAL, layers=8, last=False, tp=4, ep=8), _of(_MIXTRAL, layers=8, first=False, tp=4, ep=2, etp=4),
    _of({**_MIXTRAL, "tied": True}, layers=8, tp=2, ep=4),
]  # fmt: skip

PARAMETERS = Exercise(
    "stage_parameters",
    reference=stage_parameters,
    cases=[
        Case("the example: one layer and both ends, on one rank", _EXAMPLE),
        Case("the last stage, 3 layers with 12 heads in 4 groups, on tp = 4", _TWO),
        Case("a stage between, 3 layers with 10 experts, on tp = 2 and ep = 5", _MOE),
        Case("other models without experts", _stage, hidden=True, fixed=_PLACES),
        Case("models with experts", lambda draw: _stage(draw, 4 * draw.integer(1, 4)), hidden=True, fixed=_OF_EXPERTS),
    ],
    idea="One layer first, matrix by matrix; then the two ends; then what tp does not cut.",
    hint="layer = 2h + (2 heads + 2 groups) d h / tp + (3 h f / tp, or h * experts for the router); first adds V'h/tp; "
    "last adds h + V'h/tp, but h alone if it is first, too, and tied; experts = layers * experts/ep * 3 h f / etp.",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------- bytes

NAMES = ("parameters", "gradients", "main parameters", "moments")
BYTES = {"bf16": (2, 4, 4, 8), "fp32": (4, 4, 0, 8)}


def state_bytes(dense: int, experts: int, layout: dict[str, int], zero: int, precision: str) -> dict[str, int]:
    tp, cp, dp, ep, etp = (layout[name] for name in ("tp", "cp", "dp", "ep", "etp"))
    whole, shared = dense + experts, dense // (dp * cp) + experts // (tp * cp * dp // (ep * etp))
    owned = zip(NAMES, BYTES[precision], (3, 2, 1, 1), strict=True)
    return {name: nbytes * (shared if zero >= stage else whole) for name, nbytes, stage in owned}


def _state(draw: Draw) -> dict[str, Any]:
    tp, cp, dp = (draw.choice([1, 2, 4]) for _ in range(3))
    etp = draw.choice([1, tp])
    ep = draw.choice([n for n in (1, 2, 4, 8) if tp * cp * dp % (n * etp) == 0])
    layout = {"tp": tp, "cp": cp, "pp": draw.choice([1, 3, 5]), "dp": dp, "ep": ep, "etp": etp}
    return {"dense": 512 * draw.integer(1_000, 10_000_000), "experts": 512 * draw.integer(1_000, 10_000_000),
            "layout": layout, "zero": draw.integer(0, 3), "precision": draw.choice(["bf16", "fp32"])}  # fmt: skip


def _layout(tp: int = 1, cp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1, etp: int = 1) -> dict[str, int]:
    return {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "ep": ep, "etp": etp}


_FIRST = {"dense": 1200, "experts": 0, "layout": _layout(cp=2, dp=3), "zero": 1, "precision": "bf16"}
_SECOND = {"dense": 1200, "experts": 480, "layout": _layout(tp=4, dp=6, ep=3, pp=5), "zero": 2, "precision": "bf16"}
_EVERY = [
    {"dense": 2**20, "experts": 2**19, "layout": layout, "zero": zero, "precision": precision}
    for layout in (_layout(4, 2, 3, 8, 8, 1), _layout(4, 2, 5, 8, 2, 4), _layout(dp=8), _layout(cp=8))
    for zero in range(4) for precision in ("bf16", "fp32")
]  # fmt: skip


STATES = Exercise(
    "state_bytes",
    reference=state_bytes,
    cases=[
        Case("1200 parameters, cp 2, dp 3, ZeRO-1 in bf16", _FIRST),
        Case("480 more of experts, tp 4, dp 6, pp 5, ep 3, ZeRO-2", _SECOND),
        Case("the same in fp32, ZeRO-3", {**_SECOND, "precision": "fp32", "zero": 3}),
        Case("other layouts, stages and precisions", _state, points=2, hidden=True, fixed=_EVERY),
    ],
    idea="For each of the four: how many bytes, from which stage of ZeRO on is it shared out, and among which ranks?",
    hint="dense / (dp * cp) and experts / (tp * cp * dp // (ep * etp)) where zero >= 3 for parameters, 2 for "
    "gradients, 1 for main parameters and moments; times 2, 4, 4, 8 in bf16 and 4, 4, 0, 8 in fp32.",
)  # fmt: skip
