"""Lab 02, what is computed before anything runs: the bytes and the activations of a layer.

Bytes are what one rank sends when collectives run as rings; activations are those of Korthikanti et al. 2022, 16 bits,
with dropout and stored attention scores.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from labkit.exercises import Case, Draw, Exercise

# --------------------------------------------------------------------------------------------- bytes of a layer


def bytes_per_layer(
    s: int, b: int, h: int, t: int, element_size: int, sequence_parallel: bool, recompute: str = "none"
) -> float:
    """What each rank sends over tp for one layer, forward and backward, when collectives run as rings.

    The second run of a layer ends with the input of `fc2`, before the last sum; that of an MLP makes its gather alone.
    """
    again = {"none": 0, "core_attn": 0, "mlp": int(sequence_parallel), "full": 3 if sequence_parallel else 2}[recompute]
    return ((10 if sequence_parallel else 8) + again) * s * b * h * element_size * (t - 1) / t


def _a_layer(sequence_parallel: bool, recompute: str) -> Callable[[Draw], dict[str, Any]]:
    def sizes(draw: Draw) -> dict[str, Any]:
        shape = {"s": 128 * draw.integer(1, 64), "b": draw.integer(2, 8), "h": 64 * draw.integer(8, 256)}
        return {
            **shape, "t": draw.choice([2, 4, 8]), "element_size": draw.choice([1, 4]),
            "sequence_parallel": sequence_parallel, "recompute": recompute,
        }  # fmt: skip

    return sizes


_GPT3 = {"s": 2048, "b": 1, "h": 12288}
_TP, _SP = {"sequence_parallel": False, "recompute": "none"}, {"sequence_parallel": True, "recompute": "none"}
_HANDFUL = {"s": 4, "b": 3, "h": 4, "t": 4, "element_size": 1}
_ODD = {"s": 100, "b": 2, "h": 70, "t": 3, "element_size": 4}  # t does not divide

BYTES = Exercise(
    "bytes_per_layer",
    reference=bytes_per_layer,
    cases=[
        Case("s*b*h = 4*3*4 elements of 1 byte on 4 ranks; GPT-3 on 8", {**_HANDFUL, **_TP},
             fixed=[{**_GPT3, "t": 8, "element_size": 2, **_TP}, {**_ODD, **_TP}]),
        # One rank sends nothing: no row of its own, or a constant would have its points.
        Case("the same with sequence parallelism; on one rank", {**_HANDFUL, **_SP},
             fixed=[*({**_GPT3, "t": t, "element_size": 2, **_SP} for t in (8, 1)), {**_ODD, **_SP}]),
        Case("a part of the layer recomputed, both ways", _a_layer(True, "mlp"), hidden=True,
             fixed=[{**_ODD, **how, "recompute": part} for how in (_TP, _SP) for part in ("core_attn", "mlp")]),
        Case("the whole layer recomputed", _a_layer(False, "full"), hidden=True,
             fixed=[{**_ODD, **_TP, "recompute": "full"}]),
        Case("the whole layer recomputed, sequence parallelism", _a_layer(True, "full"), hidden=True,
             fixed=[{**_ODD, **_SP, "recompute": "full"}]),
    ],
    idea="Count the arrows of the picture in both directions, then what it does not show. Walk through a second run, "
    "and ask of each arrow: does the backward pass need a tensor that lies behind it?",
    hint="Two column-row pairs, each with one sum forward and one backward, of s*b*h elements. An all-reduce costs "
    "2 n (t-1)/t; with sequence parallelism each becomes an all-gather and a reduce-scatter, and each pair gathers its "
    "input once more for dW, also when a second run has gathered it just before. The backward pass of a row layer "
    "needs its input, not its output: a second run stops before its last sum.",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------- activations


def activation_bytes(s: int, b: int, h: int, a: int, t: int, sequence_parallel: bool) -> float:
    """Korthikanti et al. 2022, table 2: 16-bit activations of one layer with dropout and stored attention scores."""
    if sequence_parallel:
        return s * b * h / t * (34 + 5 * a * s / h)
    return s * b * h * (10 + 24 / t + 5 * a * s / (h * t))


def _a_model(sequence_parallel: bool) -> Callable[[Draw], dict[str, Any]]:
    def sizes(draw: Draw) -> dict[str, Any]:
        a = 8 * draw.integer(1, 16)
        return {
            "s": 256 * draw.integer(1, 16), "b": draw.integer(2, 4), "h": draw.choice([64, 96, 160]) * a, "a": a,
            "t": draw.choice([2, 4, 8]), "sequence_parallel": sequence_parallel,
        }  # fmt: skip

    return sizes


_FOUR_TOKENS = {"s": 4, "b": 1, "h": 4, "a": 4}
_SMALL = {"s": 10, "b": 2, "h": 13, "a": 2, "t": 3}  # t does not divide

ACTIVATIONS = Exercise(
    "activation_bytes",
    reference=activation_bytes,
    cases=[
        Case("4 tokens, h = 4, 4 heads, one rank; GPT-3", {**_FOUR_TOKENS, "t": 1, "sequence_parallel": False},
             fixed=[{**_GPT3, "a": 96, "t": 1, "sequence_parallel": False}]),
        Case("the same on 4 ranks; GPT-3 on 8", {**_FOUR_TOKENS, "t": 4, "sequence_parallel": False},
             fixed=[{**_GPT3, "a": 96, "t": 8, "sequence_parallel": False}]),
        Case("the same with sequence parallelism", {**_FOUR_TOKENS, "t": 4, "sequence_parallel": True},
             fixed=[{**_GPT3, "a": 96, "t": 8, "sequence_parallel": True}]),
        Case("other models", _a_model(False), hidden=True, fixed=[{**_SMALL, "sequence_parallel": False}]),
        Case("other models, sequence parallelism", _a_model(True), hidden=True,
             fixed=[{**_SMALL, "sequence_parallel": True}]),
    ],
    idea="Sort the rows of the table: which tensors belong to some heads or to some features of the MLP, and which are "
    "in a region that the picture shows whole?",
    hint="Add up the column 'bytes' of the table, once for the rows that tp divides and once for the others.",
)  # fmt: skip
