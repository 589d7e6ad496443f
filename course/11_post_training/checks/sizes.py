"""Lab 11, what is predicted: the parameters of adapters, and the bytes that training keeps for them on a rank."""

from __future__ import annotations

from typing import Any

from labkit.exercises import Case, Draw, Exercise


def adapter_state(matrices: list[dict[str, Any]], r: int, tp: int) -> dict[str, int]:
    found = {"whole": 0, "rank": 0, "bytes": 0}
    for m in matrices:
        down = [m["i"]] * (r * m["parts"])  # the rows of A, by their length
        up = [r] * m["o"]  # and those of B
        if m["kind"] == "column":
            here = sum(down) + sum(up[: m["o"] // tp])
        else:
            here = sum(length // tp for length in down) + sum(up)
        found["whole"] += sum(down) + sum(up)
        found["rank"] += here
        found["bytes"] += 18 * here + 2 * (m["o"] * m["i"] // tp)
    return found


def _matrix(kind: str, o: int, i: int, parts: int = 1) -> dict[str, Any]:
    return {"kind": kind, "o": o, "i": i, "parts": parts}


_EXAMPLE: dict[str, Any] = {"matrices": [_matrix("column", 6, 4), _matrix("row", 4, 6)], "r": 2, "tp": 2}
_PACKED: dict[str, Any] = {"matrices": [_matrix("column", 12, 4, 3)], "r": 2, "tp": 2}


def _some(draw: Draw) -> dict[str, Any]:
    tp, h = draw.choice([2, 4, 8]), 64 * draw.integer(2, 9)
    f, kv = 64 * draw.integer(10, 20), 32 * draw.choice([1, 2, 4])
    layer = [
        _matrix("column", h + 2 * kv, h, 3), _matrix("row", h, h), _matrix("column", 2 * f, h, 2), _matrix("row", h, f),
    ]  # fmt: skip
    chosen = [m for m in layer if draw.random.random() < 0.7] or layer
    return {"matrices": chosen * draw.integer(1, 3), "r": draw.choice([1, 4, 16]), "tp": tp}


SIZES = Exercise(
    "adapter_state",
    reference=adapter_state,
    cases=[
        Case("the example: a column and a row layer on two ranks", _EXAMPLE),
        Case("queries, keys and values packed, on two ranks", _PACKED),
        Case("other layers", _some, points=2, hidden=True, fixed=[
            {**_EXAMPLE, "tp": 1}, {**_EXAMPLE, "matrices": _EXAMPLE["matrices"][:1]},
            {**_EXAMPLE, "matrices": _EXAMPLE["matrices"][1:]}, {**_PACKED, "r": 3, "tp": 4},
            {"matrices": [_matrix("column", 8, 20, 2), _matrix("row", 20, 8)], "r": 1, "tp": 4}]),
    ],
    errors={"KeyError": "A matrix has the keys kind, o, i and parts."},
    idea="Which of A and B does a rank hold in part, and how long is a row of each?",
    hint="A has parts * r rows of i, B has o rows of r. On a rank: column parts * r * i + o * r / tp, row "
    "parts * r * i / tp + o * r. bytes = 18 * rank + 2 * the sum of o * i / tp.",
)  # fmt: skip
