"""Lab 10, keys and values in pages: what is written where, what is read, and what belongs to somebody else.

Every row that is nobody's, or another sequence's, holds NaN: a canary, which shows in whatever is computed with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise

Tensor = torch.Tensor


def attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, table: list[int], kept: int
) -> dict[str, Tensor]:
    """The output, and the pages as they are then."""
    keys, values = keys.clone(), values.clone()
    at = torch.arange(kept + len(q))
    rows = torch.tensor(table)[at // keys.shape[1]] * keys.shape[1] + at % keys.shape[1]
    for pages, new in ((keys, k), (values, v)):
        pages.flatten(0, 1)[rows[kept:]] = new
    scores = q @ keys.flatten(0, 1)[rows].mT / math.sqrt(q.shape[1])
    scores = scores.masked_fill(at > at[kept:, None], -math.inf)
    return {"out": scores.softmax(-1) @ values.flatten(0, 1)[rows], "keys": keys, "values": values}


def _drive(exercise: Any, q: Any, k: Any, v: Any, keys: Any, values: Any, table: Any, kept: Any) -> Any:
    out = exercise.attend(q, k, v, keys, values, table, kept)
    return {"out": out, "keys": keys, "values": values}


def _filled(kept: int, new: int, size: int, table: list[int], pages: int, numbers: Callable[..., Tensor]) -> Any:
    """Of a sequence that has `kept` tokens and gets `new` ones; all other rows are NaN."""
    d = 4
    keys, values = (torch.full((pages, size, d), math.nan) for _ in range(2))
    for j in range(kept):
        keys[table[j // size], j % size], values[table[j // size], j % size] = numbers(d), numbers(d)
    q, k, v = (numbers(new, d) for _ in range(3))
    return {"q": q, "k": k, "v": v, "keys": keys, "values": values, "table": table, "kept": kept}


def _some(draw: Draw, kept: int | None = None, new: int | None = None, size: int | None = None, spare: int = 0) -> Any:
    size = draw.integer(2, 5) if size is None else size
    kept = draw.integer(3, 14) if kept is None else kept
    new = draw.integer(2, 6) if new is None else new
    needed = -(-(kept + new) // size) + spare
    pages = needed + draw.integer(2, 4)
    table = draw.random.sample(range(1, pages), needed)
    return _filled(kept, new, size, table, pages, draw.tensor)


def _small(*shape: int) -> Tensor:
    return torch.arange(1.0, 1 + math.prod(shape)).view(*shape) % 5 / 4


ATTEND = Exercise(
    "attend",
    reference=attend,
    drive=_drive,
    changes=("keys", "values"),
    outputs=("out", "keys", "values"),
    cases=[
        Case("one new token behind two, in pages 2 and 0 of size 2", _filled(2, 1, 2, [2, 0], 3, _small)),
        Case("a prompt of three tokens, nothing kept", _filled(0, 3, 2, [1, 0], 2, _small)),
        Case("other sequences, one new token", lambda draw: _some(draw, new=1), hidden=True, fixed=[
            lambda draw: _some(draw, kept=7, new=1, size=4), lambda draw: _some(draw, kept=8, new=1, size=4),
            lambda draw: _some(draw, kept=5, new=1, size=1)]),
        Case("other sequences, a chunk of a prompt", _some, points=2, hidden=True, fixed=[
            lambda draw: _some(draw, kept=0, new=5, size=2), lambda draw: _some(draw, kept=3, new=6, size=4),
            lambda draw: _some(draw, kept=6, new=3, size=3, spare=1)]),
    ],
    errors={
        "out of range": "A token's page is its place divided by the page size; only then the table is asked.",
        "out of bounds for dimension 1": "The row is the token's place modulo the page size: behind a full page "
        "it is row 0 of the next one.",
    },
    idea="Token j of the sequence: which entry of the table, and which row of that page?",
    hint="For the new token i: j = kept + i; keys[table[j // size], j % size] = k[i]. Then keys[table].flatten(0, 1)"
    "[: kept + n] are all keys in order; mask places beyond j; softmax(q k^T / sqrt(d)) v.",
)  # fmt: skip
