"""Lab 04, what is computed before anything runs: bytes, who holds which tokens and so works how much, five questions.

C ranks share a sequence. Zigzag: rank r holds chunks r and 2C-1-r of 2C, one early and one late, so that under a causal
mask all work the same.
"""

from __future__ import annotations

from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise

# -------------------------------------------------------------------------------------------------- predictions


def bytes_per_layer(s: int, b: int, heads: int, groups: int, d: int, cp: int, element_size: int) -> dict[str, float]:
    n = s // cp
    ring = 2 * (cp - 1) * n * b * groups * d * element_size
    ulysses = (cp - 1) / cp * n * b * (2 * heads + 2 * groups) * d * element_size
    return {"ring": ring, "ulysses": ulysses}


def _layer(draw: Draw) -> dict[str, Any]:
    cp, per = draw.choice([2, 4, 8]), draw.integer(2, 4)
    groups = cp * draw.integer(1, 3)
    return {
        "s": 1024 * cp * draw.integer(1, 8), "b": draw.integer(2, 3), "heads": groups * per, "groups": groups,
        "d": 32 * draw.integer(1, 4), "cp": cp, "element_size": draw.choice([1, 4]),
    }  # fmt: skip


_THREE = {"s": 48, "b": 3, "heads": 18, "groups": 6, "d": 10, "cp": 3, "element_size": 1}
_SMALL = {"s": 16, "b": 3, "heads": 20, "groups": 4, "d": 2, "cp": 4, "element_size": 4}

BYTES = Exercise(
    "bytes_per_layer",
    reference=bytes_per_layer,
    cases=[
        # One rank sends nothing: no row of its own, or a constant would have its points.
        Case("3 sequences of 16 tokens on 4 ranks; on one rank", _SMALL, points=2, fixed=[{**_SMALL, "cp": 1}]),
        Case("other layers", _layer, points=2, hidden=True, fixed=[_THREE]),
    ],
    idea="Follow one tensor: how many of its numbers leave this rank, and how often?",
    hint="n = s/C tokens. Ring: C-1 steps, each K and V, n*b*groups*d elements. Ulysses: (C-1)/C of q, k, v and the "
    "output, n*b*(2*heads + 2*groups)*d elements.",
)  # fmt: skip


def work(s: int, cp: int, zigzag: bool) -> list[int]:
    return [int((positions(s, cp, r, zigzag) + 1).sum()) for r in range(cp)]


def _work_inputs(draw: Draw) -> dict[str, Any]:
    cp = draw.integer(2, 6)
    return {"s": 2 * cp * draw.integer(2, 40), "cp": cp, "zigzag": bool(draw.integer(0, 1))}


WORK = Exercise(
    "work",
    reference=work,
    cases=[
        Case("8 tokens on 2 ranks, contiguous", {"s": 8, "cp": 2, "zigzag": False}),
        Case("8 tokens on 2 ranks, zigzag", {"s": 8, "cp": 2, "zigzag": True}),
        Case("other sizes", _work_inputs, hidden=True, fixed=[
            {"s": 36, "cp": 3, "zigzag": False}, {"s": 36, "cp": 3, "zigzag": True},
            {"s": 15, "cp": 5, "zigzag": False}, {"s": 7, "cp": 1, "zigzag": False}]),  # no two equal chunks
        Case("zigzag, other sizes", lambda draw: {**_work_inputs(draw), "zigzag": True}, hidden=True, fixed=[
            {"s": 10, "cp": 5, "zigzag": True}, {"s": 6, "cp": 1, "zigzag": True}]),
    ],
    idea="How many keys does the token at place i see, and which places does a rank hold?",
    hint="The token at place i sees i+1 keys. Add that up over the tokens that a rank holds.",
)  # fmt: skip

# ---------------------------------------------------------------------------------------------------- positions


def positions(s: int, cp: int, rank: int, zigzag: bool = True) -> torch.Tensor:
    if not zigzag:
        return torch.arange(s).chunk(cp)[rank]
    chunks = torch.arange(s).view(2 * cp, -1)
    return torch.cat((chunks[rank], chunks[2 * cp - 1 - rank]))


def _a_rank(draw: Draw) -> dict[str, Any]:
    cp = draw.integer(2, 6)
    return {"s": 2 * cp * draw.integer(2, 8), "cp": cp, "rank": draw.integer(0, cp - 1)}


def _last_rank(draw: Draw) -> dict[str, Any]:
    inputs = _a_rank(draw)
    return {**inputs, "rank": inputs["cp"] - 1}


POSITIONS = Exercise(
    "positions",
    reference=positions,
    cases=[
        Case("16 tokens, rank 1 of 4", {"s": 16, "cp": 4, "rank": 1}),
        Case("any rank", _a_rank, points=2, hidden=True, fixed=[
            {"s": 30, "cp": 3, "rank": 0}, {"s": 30, "cp": 3, "rank": 1}, {"s": 8, "cp": 4, "rank": 2}]),
        Case("the last rank", _last_rank, hidden=True, fixed=[{"s": 30, "cp": 5, "rank": 4}]),
    ],
    idea="Rank r holds the r-th chunk from the beginning and the r-th from the end.",
    hint="Cut 0 .. s-1 into 2C equal chunks; concatenate chunk r and chunk 2C-1-r.",
)  # fmt: skip

# ---------------------------------------------------------------------------------------------------- questions


def answers(
    s: int, cp: int, tp: int, heads: int, groups: int, element_size: int, flops: float, bandwidth: float
) -> dict[str, Any]:
    return {
        "slowest_over_mean": (2 * cp - 1) / cp,  # where s is long; for any s here within rtol
        "ring_over_ulysses": cp * groups / (heads + groups),
        "largest_ulysses": groups // tp,
        "sequence_multiple": 2 * cp * tp,
        "tokens_to_hide": groups * element_size * flops / (heads * bandwidth),
    }


def _machine(draw: Draw) -> dict[str, Any]:
    tp, cp = draw.choice([1, 2, 4]), draw.choice([2, 4, 8])
    groups = tp * draw.integer(1, 8)
    return {
        "s": 1024 * cp * draw.integer(1, 16), "cp": cp, "tp": tp, "heads": groups * draw.integer(1, 8),
        "groups": groups, "element_size": draw.choice([1, 2]), "flops": 1e14 * draw.integer(1, 9),
        "bandwidth": 1e10 * draw.integer(2, 40),
    }  # fmt: skip


_LLAMA = {
    "s": 131072, "cp": 16, "tp": 4, "heads": 64, "groups": 8, "element_size": 2, "flops": 1e14, "bandwidth": 3e11,
}  # fmt: skip

_LAPTOPS = {
    "s": 12288, "cp": 3, "tp": 2, "heads": 40, "groups": 10, "element_size": 1, "flops": 3e12, "bandwidth": 1e9,
}  # fmt: skip

QUESTIONS = Exercise(
    "answers",
    reference=answers,
    cases=[
        Case("Llama-3 70B, 128 k tokens, cp 16, tp 4, 100 TFLOP/s, 300 GB/s", _LLAMA),
        Case("another machine", _machine, points=3, hidden=True, fixed=[_LAPTOPS]),
    ],
    rtol=1e-3,
    idea="Each number is a ratio of two things that you have counted above: pairs, bytes, or seconds.",
    hint="Contiguous: rank C-1 has (2C-1)/C^2 of all pairs. Bytes as in your first exercise. A step computes "
    "2 n^2 heads d operations while 2 n groups d elements travel.",
)  # fmt: skip
