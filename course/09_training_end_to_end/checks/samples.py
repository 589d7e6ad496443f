"""Lab 09, from documents to samples: how often the documents are read, and which of their tokens a sample holds.

`_pieces` numbers every token of the stream and looks; `_epochs` counts up until there is enough.
"""

from __future__ import annotations

import itertools
from typing import Any

from labkit.exercises import Case, Draw, Exercise

# ------------------------------------------------------------------------------------------------------- epochs


def epochs(tokens: int, s: int, samples: int) -> dict[str, Any]:
    e = next(e for e in itertools.count(1) if e * tokens >= samples * s + 1)
    ends = [(e_ * tokens - 1) // s if e_ else 0 for e_ in (e - 1, e, 1)]
    needed, of_one = samples - ends[0], ends[2]
    return {"epochs": e, "samples": ends[1], "needed": needed, "apart": e > 1 and needed < int(0.8 * of_one)}


_EXAMPLE: dict[str, Any] = {"tokens": 25, "s": 4, "samples": 13}


def _some(draw: Draw) -> dict[str, Any]:
    s = draw.integer(2, 9)
    tokens = s * draw.integer(2, 14) + draw.integer(1, s)
    return {"tokens": tokens, "s": s, "samples": draw.integer(1, 4 * tokens // s)}


EPOCHS = Exercise(
    "epochs",
    reference=epochs,
    cases=[
        Case("the example: 25 tokens, samples of 4", _EXAMPLE),
        Case("the same data, 16 samples", {**_EXAMPLE, "samples": 16}),
        Case("other runs", _some, points=2, hidden=True, draws=6, fixed=[
            {"tokens": 25, "s": 4, "samples": 6},  # exactly one epoch
            {"tokens": 24, "s": 4, "samples": 6},  # the last label is missing
            {"tokens": 24, "s": 4, "samples": 5}, {"tokens": 25, "s": 4, "samples": 12},
            {"tokens": 41, "s": 4, "samples": 18}, {"tokens": 41, "s": 4, "samples": 17},
            {"tokens": 49, "s": 4, "samples": 21}, {"tokens": 49, "s": 4, "samples": 20},
            {"tokens": 49, "s": 4, "samples": 22}, {"tokens": 7, "s": 5, "samples": 9},
            {"tokens": 5, "s": 5, "samples": 1}, {"tokens": 30, "s": 1, "samples": 29},
            {"tokens": 30, "s": 1, "samples": 52}, {"tokens": 50, "s": 7, "samples": 1},
            {"tokens": 27, "s": 4, "samples": 10}]),  # 80 % of 6, and not of 6.5
    ],
    idea="A sample needs s labels, and the first input before them. What do two neighbours of the stream share?",
    hint="epochs = ceil((samples * s + 1) / tokens). e epochs hold (e * tokens - 1) // s samples. needed = samples - "
    "those of epochs - 1. apart: epochs > 1 and needed < int(0.8 * ((tokens - 1) // s)).",
)  # fmt: skip

# ------------------------------------------------------------------------------------------------------- pieces


def pieces(lengths: list[int], s: int, i: int) -> list[list[int]]:
    before, left, found = i * s, s + 1, []  # tokens before the sample, and tokens that it still lacks
    for document, n in enumerate(lengths):
        taken = min(left, max(0, n - before))
        found += [[document, before, before + taken]] if taken else []
        before, left = max(0, before - n), left - taken
    return found


def _lengths(draw: Draw) -> dict[str, Any]:
    lengths = [draw.choice([0, 1, 1, 2, 3, 5, 9]) for _ in range(draw.integer(4, 9))] + [draw.integer(2, 6)]
    lengths[draw.integer(0, 3)] = draw.integer(5, 14)
    s = draw.integer(1, 5)
    return {"lengths": lengths, "s": s, "i": draw.integer(0, (sum(lengths) - 1) // s - 1)}


_DOCS: dict[str, Any] = {"lengths": [3, 2, 6, 1], "s": 4, "i": 1}
PIECES = Exercise(
    "pieces",
    reference=pieces,
    cases=[
        Case("the example: documents of 3, 2, 6 and 1 tokens", _DOCS),
        Case("the first sample", {**_DOCS, "i": 0}),
        Case("other documents", _lengths, points=2, hidden=True, draws=6, fixed=[
            {"lengths": [4, 4, 4], "s": 4, "i": 0}, {"lengths": [4, 4, 4], "s": 4, "i": 1},
            {"lengths": [0, 5], "s": 4, "i": 0}, {"lengths": [2, 0, 0, 9], "s": 3, "i": 1},
            {"lengths": [2, 0, 9], "s": 2, "i": 0}, {"lengths": [20], "s": 3, "i": 5},
            {"lengths": [1, 1, 1, 1, 1, 1], "s": 2, "i": 1}, {"lengths": [3, 3, 3], "s": 4, "i": 1},
            {"lengths": [5, 4], "s": 4, "i": 1}, {"lengths": [2, 3, 4, 0], "s": 8, "i": 0},
            {"lengths": [10**9, 2, 0, 7, 10**9], "s": 4, "i": 25 * 10**7}]),
    ],
    errors={"MemoryError": "Do not build the stream: the sums of lengths say where each document begins."},
    idea="Number the tokens of the stream. From which number to which does the sample go, and from which to which each "
    "document?",
    hint="The sample has the numbers i * s to i * s + s, both included. Let a document begin at `start`: what "
    "it has of "
    "the sample is max(first, start) to min(last + 1, start + length); keep it if it is not empty, minus start.",
)  # fmt: skip
