"""Lab 05, predictions: bytes of a layer, dropped tokens, seven questions."""

from __future__ import annotations

import math
from typing import Any

from labkit.exercises import Case, Draw, Exercise

# -------------------------------------------------------------------------------------------------- predictions


def bytes_per_layer(tokens: int, h: int, experts: int, k: int, ep: int, element_size: int) -> dict[str, float]:
    row = h * element_size
    return {
        "alltoall": (ep - 1) / ep * k * tokens * (2 * row + 4),
        "allgather": float((ep - 1) * tokens * (2 * row + 5 * experts)),
    }


def _layer(draw: Draw) -> dict[str, Any]:
    ep = draw.choice([2, 4, 8])
    return {
        "tokens": 64 * draw.integer(1, 64), "h": 128 * draw.integer(1, 16), "experts": ep * draw.integer(1, 8),
        "k": draw.integer(1, 4), "ep": ep, "element_size": draw.choice([2, 4]),
    }  # fmt: skip


_EXAMPLE = {"tokens": 4, "h": 3, "experts": 4, "k": 2, "ep": 2, "element_size": 4}
_EIGHT = {"tokens": 16, "h": 8, "experts": 8, "k": 2, "ep": 4, "element_size": 2}

_TINY_NUMBERS = {"tokens": 48, "h": 96, "experts": 24, "k": 3, "ep": 8, "element_size": 1}
_THREE_RANKS = {"tokens": 60, "h": 40, "experts": 6, "k": 5, "ep": 3, "element_size": 4}


BYTES = Exercise(
    "bytes_per_layer",
    reference=bytes_per_layer,
    cases=[
        # One rank sends nothing: no row of its own, or a constant would have its points.
        Case("the example: 4 tokens, 4 experts, 2 ranks; and one rank", _EXAMPLE, points=2, fixed=[
            {**_EIGHT, "ep": 1}]),
        Case("other layers", _layer, points=2, hidden=True, fixed=[_EIGHT, _TINY_NUMBERS, _THREE_RANKS]),
    ],
    idea="For each way: how many rows or tokens leave this rank, and what does each of them weigh, there and back?",
    hint="All-to-all: k*T rows, of which (P-1)/P leave: h elements and 4 bytes there, h elements back. All-gather: "
    "P-1 times T tokens with 5*E bytes of routing, and P-1 times T rows of partial sums.",
)  # fmt: skip


def expected_drops(tokens: int, experts: int, k: int, factor: float) -> dict[str, Any]:
    """In whole numbers: of E^T ways those in which n tokens choose an expert, from n = 0 on."""
    capacity, over, ways = math.ceil(tokens * k / experts * factor), 0, (experts - k) ** tokens
    for n in range(tokens + 1):
        over += max(0, n - capacity) * ways
        ways = ways * (tokens - n) * k // ((n + 1) * (experts - k))
    return {"capacity": capacity, "dropped": over * experts / (tokens * k * experts**tokens)}


def _drops(draw: Draw) -> dict[str, Any]:
    """Draw few tokens and little room, so that the right answer is not close to zero."""
    return {"tokens": 8 * draw.integer(2, 8), "experts": draw.choice([8, 16]), "k": draw.integer(2, 3),
            "factor": draw.choice([1.0, 1.25])}  # fmt: skip


def _fraction(draw: Draw) -> dict[str, Any]:
    return {"tokens": 8 * draw.integer(2, 20) + draw.integer(1, 3), "experts": 8, "k": 1, "factor": 1.25}


DROPS = Exercise(
    "expected_drops",
    reference=expected_drops,
    rtol=1e-3,
    atol=1e-12,  # nothing is dropped: as far as a sum of floats is nothing
    cases=[
        Case("2 tokens, 2 experts, one each", {"tokens": 2, "experts": 2, "k": 1, "factor": 1.0}),
        Case("2 tokens, two of 3 experts each, factor 1/2", {"tokens": 2, "experts": 3, "k": 2, "factor": 0.5}),
        Case("other layers", _drops, hidden=True, fixed=[
            {"tokens": 40, "experts": 8, "k": 4, "factor": 0.5},
            {"tokens": 40, "experts": 16, "k": 1, "factor": 0.75},
            {"tokens": 8, "experts": 4, "k": 3, "factor": 1.5},  # room for 9 of 8 tokens
            {"tokens": 2048, "experts": 256, "k": 8, "factor": 1.0}]),
        Case("a capacity that is no whole number", _fraction, hidden=True, fixed=[
            {"tokens": n, "experts": 8, "k": 1, "factor": 1.25} for n in (26, 38)]),  # 4.06 and 5.94
    ],
    idea="An expert drops n - C rows where n is larger than C, and none where it is not: what is the mean over n?",
    errors={
        "too large to convert to float": "No float holds C(2048, n) for n in the hundreds. P(n) is that large number "
        "times tiny ones: add their logarithms, or stay with whole numbers to the end.",
    },
    hint="C = ceil(k T / E * factor). n ~ Binomial(T, k/E). dropped = E * sum over n > C of (n - C) P(n), over k T. "
    "For a large T take P(n) from its logarithm: lgamma(n + 1) is that of n!.",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------- 7 questions


def answers(
    tokens: int, h: int, f: int, experts: int, k: int, ep: int, dp: int, element_size: int, flops: float,
    bandwidth: float,
) -> dict[str, Any]:  # fmt: skip
    one = 3 * h * f
    return {
        "parameters": experts * one + experts * h,
        "active_parameters": k * one + experts * h,
        "copies_of_an_expert": dp // ep,
        "rows_of_an_expert": tokens * ep * k / experts,
        "allgather_over_alltoall": ep / k,
        "compute_over_travel": 3 * f * bandwidth * ep / (element_size * (ep - 1) * flops),
    }


def _machine(draw: Draw) -> dict[str, Any]:
    ep = draw.choice([2, 4, 8])
    experts = ep * draw.choice([1, 2, 4, 8])
    return {
        "tokens": 256 * experts * draw.integer(1, 4), "h": 512 * draw.integer(1, 14), "f": 256 * draw.integer(2, 40),
        "experts": experts, "k": draw.integer(1, 2), "ep": ep, "dp": ep * draw.choice([1, 2, 4]),
        "element_size": draw.choice([1, 2]), "flops": 1e14 * draw.integer(1, 9),
        "bandwidth": 1e10 * draw.integer(2, 40),
    }  # fmt: skip


_TINY = {
    "tokens": 8, "h": 2, "f": 3, "experts": 8, "k": 3, "ep": 4, "dp": 12, "element_size": 2, "flops": 144.0,
    "bandwidth": 96.0,
}  # fmt: skip

_MIXTRAL = {
    "tokens": 4096, "h": 4096, "f": 14336, "experts": 8, "k": 2, "ep": 4, "dp": 8, "element_size": 2, "flops": 4e14,
    "bandwidth": 5e10,
}  # fmt: skip

_FINE_GRAINED = {
    "tokens": 3840, "h": 1536, "f": 512, "experts": 48, "k": 6, "ep": 16, "dp": 48, "element_size": 1, "flops": 9e14,
    "bandwidth": 4e11,
}  # fmt: skip


QUESTIONS = Exercise(
    "answers",
    reference=answers,
    rtol=1e-3,
    cases=[
        Case("8 tokens, three of 8 experts of 2 x 3, ep 4, dp 12", _TINY),
        Case("a layer of Mixtral 8x7B, another model, another machine", _machine, points=3, hidden=True, fixed=[
            _MIXTRAL, _FINE_GRAINED]),
    ],
    idea="Start from one row: what does it cost to compute, and what to send there and back?",
    hint="An expert: 3 h f parameters; the router: E h. edp = dp/ep. Rows: T k from each of ep ranks, over E experts. "
    "A row: 6 h f operations; 2 h element_size bytes, of which (P-1)/P travel.",
)  # fmt: skip
