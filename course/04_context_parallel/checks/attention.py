"""Lab 04, one rank's mathematics: attention block by block, and by the formula.

Tensors have no batch dim: q is [a, n, d], with a heads, n tokens and width d. The mask follows from places in the
sequence: a query at place i sees a key at place j when j <= i. So one function serves every cut of the sequence.
References compute the formula in float64 and cast back; lse is the logarithm of a row's sum of exp(score).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from labkit.checks import no_tensor_above, peak_at_most
from labkit.compare import ANYTHING, difference
from labkit.exercises import Answer, Case, Draw, Exercise
from labkit.parts import named, wrong_parts

Pair = tuple[torch.Tensor, torch.Tensor]

# ------------------------------------------------------------------------------------- attention by the formula


def scores_of(q: torch.Tensor, k: torch.Tensor, q_at: torch.Tensor, k_at: torch.Tensor) -> torch.Tensor:
    return (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(q_at[:, None] < k_at[None, :], -torch.inf)


def dense(q: Any, k: Any, v: Any, q_at: Any, k_at: Any) -> Pair:
    """Attention in float64, cast back; a query that sees no key has out 0 and lse -inf."""
    s = scores_of(q.double(), k.double(), q_at, k_at)
    lse = s.logsumexp(-1)
    out = torch.exp(s - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)) @ v.double()
    return out.to(q.dtype), lse.to(q.dtype)


def attended(block: int, **inputs: Any) -> Pair:
    """The reference of `attend`; a key that no query sees has no influence."""
    seen = (inputs["k_at"] <= inputs["q_at"].max()).nonzero().flatten()
    k, v, k_at = inputs["k"][:, seen], inputs["v"][:, seen], inputs["k_at"][seen]
    return dense(inputs["q"], k, v, inputs["q_at"], k_at)


def _at(draw: Draw, q_at: list[int], k_at: list[int], block: int) -> dict[str, Any]:
    (a, d), n, m = draw.shape(2, 2, 4), len(q_at), len(k_at)
    return {
        "q": draw.tensor(a, n, d), "k": draw.tensor(a, m, d), "v": draw.tensor(a, m, d),
        "q_at": torch.tensor(q_at), "k_at": torch.tensor(k_at), "block": block,
    }  # fmt: skip


def _placed(q_at: list[int], k_at: list[int], block: int) -> Callable[[Draw], dict[str, Any]]:
    return lambda draw: _at(draw, q_at, k_at, block)


# A block that no query sees comes first; later ones begin or end with a place that no query sees, the last is half a
# block; the last query is not the one that sees most.
_MIXED = _placed([5, 2, 3], [6, 9, 0, 11, 8, 1, 4, 7, 10, 2, 5], 2)


def _any_pieces(draw: Draw) -> dict[str, Any]:
    n, block = draw.integer(3, 9), draw.integer(2, 5)
    m = block * draw.integer(2, 4) + draw.integer(1, block - 1)
    places = draw.random.sample(range(1, n + m), n + m - 1)
    return _at(draw, places[: n - 1] + [n + m], [0, *places[n - 1 :]], block)  # 0: all see something


def _on_a_grid(draw: Draw) -> dict[str, Any]:
    """Draw queries of whole numbers in the hundreds and keys of sixteenths, with width 4, whose scores are exact.

    Inexact scores of 1000 are off by 6e-5 in fp32, differently for each order of the same operations, and so is out.
    """
    inputs = _any_pieces(draw)
    heads = inputs["q"].shape[0]
    q, k, v = (draw.tensor(heads, inputs[name].shape[1], 4) for name in "qkv")
    return {**inputs, "q": (q * 300).round(), "k": (k * 16).round() / 16, "v": v}


def _far_below_zero(draw: Draw) -> dict[str, Any]:
    inputs = _on_a_grid(draw)
    return {**inputs, "q": 100 + (inputs["q"].abs() / 3).round(), "k": -1 - inputs["k"].abs()}


def _thousands_below_zero(draw: Draw) -> dict[str, Any]:
    """Draw scores far below zero, where a finite substitute for -inf, such as -1e4, would be the largest of all."""
    inputs = _far_below_zero(draw)
    return {**inputs, "k": 512 * inputs["k"]}


def _sees_nothing(draw: Draw) -> dict[str, Any]:
    inputs = _any_pieces(draw)
    n, m = inputs["q"].shape[1], inputs["k"].shape[1]
    return {**inputs, "k_at": torch.arange(m) + 10, "q_at": torch.arange(n) + 8}  # the first two see no key


def _long(draw: Draw) -> dict[str, Any]:
    """Draw a long sequence with blocks of 7 keys; no other size is a multiple of 7, so products over blocks can be
    recognised."""
    return {**_at(draw, list(range(512, 609)), list(range(453)), 7), "q": draw.tensor(2, 97, 4),
            "k": draw.tensor(2, 453, 4), "v": draw.tensor(2, 453, 4)}  # fmt: skip


def _by_blocks(answer: Answer) -> str | None:
    """Check that most work is in products over whole blocks. Elementwise work is not counted."""
    block, q = answer.inputs["block"], answer.inputs["q"]
    done = [much for what, much in answer.evidence[0].order if what == "matmul"]
    over_a_block = sum(much for much in done if much % block == 0 and much < 1.5 * block * q.numel())
    if 2 * over_a_block < sum(done):
        return f"most of its products do not go over {block} keys at a time, which is `block` here"
    return None


def _double(draw: Draw) -> dict[str, Any]:
    inputs = _any_pieces(draw)
    return {**inputs, **{name: inputs[name].double() for name in "qkv"}}


def _half_of_a_heads_scores(inputs: dict[str, Any]) -> float:
    return 2.0 * inputs["q"].shape[1] * inputs["k"].shape[1]


def _in_torch(answer: Answer) -> str | None:
    """Check for several torch operations in each block: memory is measured in torch, so the work must be torch's."""
    blocks = answer.inputs["k"].shape[1] // answer.inputs["block"]
    done = answer.evidence[0].ops
    return None if done > 2 * blocks else f"{done} operations of torch for {blocks} blocks: compute with torch"


def _mostly_hidden(draw: Draw) -> dict[str, Any]:
    """Draw places such that no query sees 14 of the 16 blocks."""
    block = draw.integer(3, 6)
    return _at(draw, list(range(2 * block)), list(range(16 * block)), block)


def _mostly_nan(draw: Draw) -> dict[str, Any]:
    inputs = _mostly_hidden(draw)
    inputs["v"][:, inputs["q"].shape[1] :] = torch.nan
    return inputs


def _seen_alone(**inputs: Any) -> dict[str, Any]:
    """The reference where hidden values may be NaN: `_skips` compares these, and says what a NaN means."""
    want = attended(**inputs)
    return (
        dict.fromkeys(("out", "lse"), ANYTHING)
        if inputs["v"].isnan().any()
        else dict(zip(("out", "lse"), want, strict=True))
    )


def _skips(answer: Answer) -> str | None:
    if answer.inputs["v"].isnan().any():
        got, want = (
            named(answer.value, ("out", "lse")),
            dict(zip(("out", "lse"), attended(**answer.inputs), strict=True)),
        )
        if any(got[name].isnan().any() for name in want):
            return "a block that no query sees was read: here its values are NaN, and NaN times 0 is NaN"
        if difference(got, want):
            return wrong_parts(got, want)
    i = answer.inputs
    enough = 2 * i["q"].numel() * 2 * i["block"]  # Q K^T and P V over two blocks of sixteen
    done = sum(much for what, much in answer.evidence[0].order if what == "matmul")
    if done > 2 * enough:  # room for a second pass over the scores
        return f"{done} multiply-adds; {enough} are enough, as 14 of the 16 blocks are hidden"
    return None


# The row of the lab's picture (`course.figures.context_parallel`): weights 2, 1, 8, 4 and values 3, 6, 1, 2.
_PICTURE = {
    "q": torch.ones(1, 1, 1), "k": torch.tensor([2.0, 1.0, 8.0, 4.0]).log().reshape(1, 4, 1),
    "v": torch.tensor([3.0, 6.0, 1.0, 2.0]).reshape(1, 4, 1), "q_at": torch.tensor([3]), "k_at": torch.arange(4),
    "block": 2,
}  # fmt: skip
_TWO = {
    "q": torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]), "k": torch.tensor([[[0.0, 1.0], [1.0, 1.0], [3.0, 3.0]]]),
    "v": torch.tensor([[[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]]]), "q_at": torch.tensor([1, 2]),
    "k_at": torch.tensor([0, 1, 2]), "block": 1,
}  # fmt: skip

ATTEND = Exercise(
    "attend",
    reference=attended,
    outputs=("out", "lse"),
    cases=[
        Case("the picture's four keys in blocks of two; two queries, three keys", _PICTURE, fixed=[_TWO]),
        Case("other sizes and places", _any_pieces, hidden=True, draws=3, fixed=[
            _MIXED, _placed([4, 1, 2], [0, 1, 2, 3, 4], 8)]),
        Case("scores in the hundreds", _on_a_grid, hidden=True, draws=2, fixed=[
            _far_below_zero, _thousands_below_zero]),
        Case("queries that see nothing", _sees_nothing, hidden=True, draws=2, fixed=[
            _placed([16, 12, 9, 13], [14, 15, 10, 11, 18, 19], 2), _placed([3, 2], [5, 6, 7], 2)]),
        Case("inputs of float64: the answers are as precise", _double, hidden=True, draws=1),
        Case("`block` keys at a time, never the whole matrix of scores", _long, hidden=True, draws=1, accept=[
            no_tensor_above("half of one head's scores", _half_of_a_heads_scores),
            peak_at_most("half of one head's scores", _half_of_a_heads_scores), _in_torch, _by_blocks]),
        Case("a block that no query sees is skipped", _mostly_hidden, hidden=True, draws=1, fixed=[_mostly_nan],
             reference=_seen_alone, accept=[_skips]),
    ],
    idea="What was summed under the old maximum must be brought under the new one before the next block is added.",
    hint="For each block of keys: scores/sqrt(d), -inf where k_at > q_at; m' = max(m, rowmax); shrink l and O by "
    "exp(m - m'), add exp(S - m'). Begin with m -inf, l and O 0. At the end O / l and m + log l. -inf minus -inf is no "
    "number: where m' is -inf use 0. Skip a block whose lowest place is above the highest of the queries.",
)  # fmt: skip
