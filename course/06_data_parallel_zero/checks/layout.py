"""Lab 06, the flat buffer: where parameters lie, where buckets end, and which part of each parameter a rank holds."""

from __future__ import annotations

import itertools
from typing import Any

from labkit.exercises import Case, Draw, Exercise


def lay_out(numels: list[int], bucket_size: int, ranks: int) -> dict[str, Any]:
    places, buckets, start, stop = dict[int, int](), list[list[int]](), 0, 0
    for i in range(len(numels))[::-1]:
        places[i], stop = stop, stop + numels[i]
        if stop - start >= bucket_size:
            buckets.append([start, _up(stop, ranks)])
            start = stop = _up(stop, ranks)
    if stop > start:
        buckets.append([start, _up(stop, ranks)])
    return {"places": [places[i] for i in range(len(numels))], "buckets": buckets}


def _up(offset: int, unit: int) -> int:
    return -(-offset // unit) * unit


def _sizes(draw: Draw) -> dict[str, Any]:
    numels = [draw.integer(1, 40) for _ in range(draw.integer(5, 12))]
    return {"numels": numels, "bucket_size": draw.integer(10, 60), "ranks": draw.integer(2, 8)}


_EXAMPLE = {"numels": [4, 2, 5], "bucket_size": 6, "ranks": 2}
_MIXED = {"numels": [6, 1, 12, 3, 3, 9, 2], "bucket_size": 12, "ranks": 4}
_ONE = {"numels": [5, 6, 2], "bucket_size": 100, "ranks": 8}
_ALL = {"numels": [3, 1, 4, 1, 5], "bucket_size": 1, "ranks": 3}

LAY_OUT = Exercise(
    "lay_out",
    reference=lay_out,
    cases=[
        Case("the example: parameters of 4, 2, 5 elements, buckets of 6, 2 ranks", _EXAMPLE),
        Case("other parameters", _sizes, points=2, hidden=True, fixed=[_MIXED, _ONE, _ALL]),
    ],
    idea="Walk through the parameters from the last to the first, with two numbers: where this bucket began, and where "
    "you are.",
    hint="start = at = 0. From the last parameter to the first: its place is at; at += its size; where at - start >= "
    "bucket_size round at up to a multiple of ranks, close [start, at], start = at. Close what is left the same way.",
)  # fmt: skip

# -------------------------------------------------------------------------------------------------- pieces


def my_pieces(
    numels: list[int], places: list[int], buckets: list[list[int]], ranks: int, rank: int
) -> list[tuple[int, int, int, int, int]]:
    found = []
    for number, (start, stop) in enumerate(buckets):
        share = (stop - start) // ranks
        low, high = start + rank * share, start + (rank + 1) * share
        inside = [i for i, place in enumerate(places) if start <= place < stop]
        for i in sorted(inside, key=places.__getitem__):
            first, last = max(places[i], low), min(places[i] + numels[i], high)
            if first < last:
                found.append((i, first - places[i], last - places[i], number, first - low))
    return found


def _of_layout(**inputs: Any) -> dict[str, Any]:
    """The inputs of `my_pieces`, from those of `lay_out`."""
    rank = inputs.pop("rank")
    return {"numels": inputs["numels"], **lay_out(**inputs), "ranks": inputs["ranks"], "rank": rank}


def _some(draw: Draw) -> dict[str, Any]:
    inputs = _sizes(draw)
    return _of_layout(**inputs, rank=draw.integer(0, inputs["ranks"] - 1))


PIECES = Exercise(
    "my_pieces",
    reference=my_pieces,
    cases=[
        Case("the example: what rank 0 has", _of_layout(**_EXAMPLE, rank=0)),
        Case("and rank 1", _of_layout(**_EXAMPLE, rank=1)),
        Case("other layouts", _some, points=2, hidden=True, fixed=[
            _of_layout(**one, rank=rank)
            for one, rank in itertools.product((_MIXED, _ALL), (0, 1, 2))] + [
            _of_layout(**_ONE, rank=7), _of_layout(**_ONE, rank=6)]),
    ],
    idea="Two intervals: a parameter's and your part's. What do both contain, and where does it begin in each of them?",
    hint="For bucket n = [start, stop): share = (stop - start) // ranks, low = start + rank * share, high = low + "
    "share. For each of its parameters in the buffer's order: first = max(place, low), last = min(place + numel, "
    "high); where first < last it is (i, first - place, last - place, n, first - low).",
)  # fmt: skip
