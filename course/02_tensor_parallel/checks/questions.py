"""Lab 02, the questions of its end that have a number: heads, rows, all-reduces, bytes and seconds of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.exercises import Case, Draw, Exercise


def answers(
    heads: int, groups: int, ffn: int, tp: int, rank: int, layers: int, hidden: int, vocab: int, flops: float,
    bandwidth: float,
) -> dict[str, Any]:  # fmt: skip
    mine = heads // tp
    queries = list(range(rank * mine, (rank + 1) * mine))
    return {
        "query_heads": queries,
        "kv_heads": sorted({q // (heads // groups) for q in queries}),
        "gate_up_rows": [[half + rank * ffn // tp, half + (rank + 1) * ffn // tp] for half in (0, ffn)],
        "all_reduces_forward": 2 * layers + 1,
        "logits_over_three": vocab / 6,
        "zero3_sends_less_from": 36 * hidden**2 // (8 * hidden) + 1,
        "travel_over_compute": 2 * (tp - 1) * flops / (9 * hidden * bandwidth),
    }


def _some_model(few: bool) -> Callable[[Draw], dict[str, Any]]:
    def inputs(draw: Draw) -> dict[str, Any]:
        groups = draw.choice([1, 2]) if few else draw.choice([8, 16])
        tp = draw.choice([4, 8])
        heads = tp * groups * draw.integer(1, 3) if few else groups * draw.integer(2, 4)
        return {
            "heads": heads, "groups": groups, "tp": tp, "rank": draw.integer(1, tp - 1),
            "layers": draw.integer(2, 96), "hidden": 64 * heads, "vocab": 1024 * draw.integer(30, 250),
            "ffn": 64 * tp * draw.integer(4, 40), "flops": 1e14 * draw.integer(1, 9),
            "bandwidth": 1e10 * draw.integer(2, 40),
        }  # fmt: skip

    return inputs


# More groups than ranks, and no multiple: a rank's queries use two or three groups, one of them with another rank.
_UNEVEN = {"heads": 24, "groups": 6, "ffn": 1536, "tp": 4, "rank": 1, "layers": 7, "hidden": 1536, "vocab": 32000,
           "flops": 4e14, "bandwidth": 4.5e11}  # fmt: skip
_THREE_GROUPS = {**_UNEVEN, "heads": 48, "groups": 24, "tp": 8, "rank": 2, "hidden": 3072}
_FEW = {"heads": 16, "groups": 2, "ffn": 4096, "tp": 8, "rank": 2, "layers": 12, "hidden": 1024, "vocab": 50304,
        "flops": 9e14, "bandwidth": 5e10}  # fmt: skip

QUESTIONS = Exercise(
    "answers",
    reference=answers,
    cases=[
        Case("4 query heads in 2 groups, rank 1 of 2, one layer; Llama-3 70B, rank 5 of 8",
             {"heads": 4, "groups": 2, "ffn": 8, "tp": 2, "rank": 1, "layers": 1, "hidden": 8, "vocab": 12,
              "flops": 72.0, "bandwidth": 2.0},
             fixed=[{"heads": 64, "groups": 8, "ffn": 28672, "tp": 8, "rank": 5, "layers": 80, "hidden": 8192,
                     "vocab": 128256, "flops": 4e14, "bandwidth": 4.5e11}]),
        Case("other models", _some_model(few=False), hidden=True, fixed=[_UNEVEN, _THREE_GROUPS]),
        Case("fewer groups than ranks", _some_model(few=True), points=2, hidden=True,
             fixed=[_FEW, {**_FEW, "rank": 6}]),
    ],
    idea="Each entry counts something that you have built: heads of a rank, rows of a stack, sums on the way forward, "
    "elements that travel.",
    hint="query heads: a/t of them from rank*a/t on. key/value heads: q // (a/g) of each. gate and up: rows "
    "r f/t to (r+1) f/t of the first half, and the same rows of the second. Forward: the embedding and "
    "two sums a layer. Ratio: s b V (an all-gather) to 2 * 3 s b. "
    "ZeRO-3: both send the same where 3 * 12 h^2 = 8 b s h; one token more is asked for. "
    "Travel: 8 h (t-1)/t elements a token, 2 bytes each. Products: 12 h^2 / t weights, 6 operations a token for each.",
)  # fmt: skip
