"""Lab 12, what a rank sends in a step, axis by axis: payloads, and the share of them that a rank of a ring sends."""

from __future__ import annotations

from typing import Any

from labkit.exercises import Case, Draw, Exercise


def bytes_sent(
    model: dict[str, int], layout: dict[str, int], tokens: int, layers: int, m: int, rank: int, dense: int, experts: int
) -> dict[str, int]:  # fmt: skip
    """The bytes that a rank sends, by axis."""
    tp, cp, pp, dp, ep, v = (layout[name] for name in ("tp", "cp", "pp", "dp", "ep", "v"))
    each, stream = layers * m, 2 * tokens * model["h"]
    kv, rows = 2 * model["groups"] * model["d"] * tokens // tp, model["topk"] * stream // tp

    def share(nbytes: int, ranks: int) -> int:
        return nbytes * (ranks - 1) // ranks

    of_zero = {0: 2 * 4, 1: 4 + 2, 3: m * (2 + 2 + 4)}[layout["zero"]]
    return {
        "tp": each * (5 if model["topk"] else 10) * share(stream, tp),
        "cp": each * (cp - 1) * kv * (2 + 2 + 4),
        "pp": m * (2 * v - (rank == 0) - (rank == pp - 1)) * stream // tp,
        "ep": each * 4 * share(rows, ep),
        "dp": of_zero * (share(dense, dp * cp) + share(experts, tp * cp * dp // ep)),
    }


def _layout(
    tp: int = 1, cp: int = 1, pp: int = 1, dp: int = 1, ep: int = 1, zero: int = 1, v: int = 1
) -> dict[str, int]:
    return {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "ep": ep, "zero": zero, "v": v}


_DENSE = {"h": 4, "groups": 2, "d": 2, "topk": 0}
_EXPERTS = {"h": 4, "groups": 2, "d": 2, "topk": 3}
_ONE = {"model": _DENSE, "layout": _layout(), "tokens": 16, "layers": 3, "m": 2, "rank": 0, "dense": 800, "experts": 0}
_TP = {**_ONE, "layout": _layout(tp=4)}
_CP = {**_ONE, "layout": _layout(tp=2, cp=4, dp=3), "dense": 960}
_PP = {**_ONE, "layout": _layout(pp=3, v=2), "rank": 2, "m": 6}
_EP = {**_ONE, "model": _EXPERTS, "layout": _layout(tp=4, ep=8, dp=6), "dense": 960, "experts": 720, "m": 5}


def _draw(draw: Draw, topk: int = 0) -> dict[str, Any]:
    tp, cp, dp, pp = draw.choice([1, 2, 4]), draw.choice([1, 2, 4]), draw.choice([1, 2, 4]), draw.choice([1, 2, 3, 5])
    ep = draw.choice([n for n in (1, 2, 4, 8) if tp * cp * dp % n == 0]) if topk else 1
    groups = 4 * draw.integer(1, 3)
    model = {"h": 64 * draw.integer(3, 30), "groups": groups, "d": draw.choice([32, 64, 96]), "topk": topk}
    v = draw.choice([1, 2, 3]) if pp > 1 else 1
    layout = _layout(tp, cp, pp, dp, ep, draw.choice([0, 1, 3]), v)
    return {"model": model, "layout": layout, "tokens": 64 * draw.integer(1, 60), "layers": draw.integer(1, 20),
            "m": pp * draw.integer(1, 5), "rank": draw.integer(0, pp - 1), "dense": 960 * draw.integer(10, 10**6),
            "experts": 960 * draw.integer(10, 10**6) if topk else 0}  # fmt: skip


_FIXED = [{**_ONE, "layout": _layout(cp=2), "tokens": 64}] + [
    {**_ONE, "layout": _layout(4, 3, 2, 5, zero=zero, v=v), "tokens": 64, "m": 6, "rank": rank, "dense": 9600}
    for zero in (0, 1, 3) for v in (1, 2) for rank in (0, 1)
] + [
    {**_ONE, "layout": _layout(pp=4, v=v), "rank": rank, "m": 4} for v in (1, 3) for rank in (0, 2, 3)
] + [{**_ONE, "layout": _layout(pp=3), "rank": 1, "m": 5}]  # fmt: skip
_FIXED_EXPERTS = [
    {**_EP, "layout": _layout(tp, cp, pp, dp, ep, zero), "tokens": 64, "m": 6, "dense": 9600, "experts": 19200}
    for tp, cp, pp, dp, ep in ((2, 1, 1, 4, 8), (1, 2, 2, 4, 4), (4, 2, 1, 1, 2), (2, 2, 2, 2, 1))
    for zero in (0, 1, 3)
]  # fmt: skip


SENT = Exercise(
    "bytes_sent",
    reference=bytes_sent,
    cases=[
        Case("tp 4, nothing else", _TP),
        Case("tp 2, cp 4, dp 3, ZeRO-1", _CP),
        Case("the last rank of pp 3, with 2 chunks", _PP),
        Case("experts: 5 microbatches, topk 3, tp 4, dp 6, ep 8", _EP),
        Case("other layouts without experts", _draw, hidden=True, fixed=_FIXED),
        Case("other layouts with experts", lambda draw: _draw(draw, draw.integer(1, 4)), hidden=True,
             fixed=_FIXED_EXPERTS),
    ],
    idea="Axis by axis: what is the payload, how often is it sent, and which share of it does one rank of a ring send?",
    hint="With r(n) = (n - 1)/n: tp = layers m (5 if topk else 10) r(tp) 2 tokens h; cp = layers m (cp - 1) 8 * 2 "
    "groups d tokens / tp; pp = m (2v - [first] - [last]) 2 tokens h / tp; ep = layers m 4 r(ep) 2 topk "
    "tokens/tp h; dp = (8, 6, or 8 m) (dense r(dp cp) + experts r(edp)).",
)  # fmt: skip
