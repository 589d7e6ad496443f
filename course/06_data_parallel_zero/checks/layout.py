"""Lab 06, the flat buffer: where parameters lie, where buckets end, and which part of each parameter a rank holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from labkit.exercises import Case, Draw, Exercise, Mistake


def lay_out(
    numels: list[int], bucket_size: int, ranks: int, *, forward: bool = False, pad: bool = True, more: bool = True,
    at_end: bool = True, before: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """The layout; `forward`, no `pad` and the other keywords make mistakes."""
    places, buckets = [0] * len(numels), []
    start = stop = 0
    order = range(len(numels))
    for i in order if forward else reversed(order):
        if before and stop > start and stop - start + numels[i] > bucket_size:
            stop = _up(stop, ranks) if pad else stop
            buckets.append([start, stop])
            start = stop
        places[i] = stop
        stop += numels[i]
        full = stop - start >= bucket_size if more else stop - start > bucket_size
        if full and not before:
            stop = _up(stop, ranks) if pad else stop
            buckets.append([start, stop])
            start = stop
    if stop > start:
        buckets.append([start, _up(stop, ranks) if pad and at_end else stop])
    return {"places": places, "buckets": buckets}


def _up(offset: int, unit: int) -> int:
    return -(-offset // unit) * unit


def _with_an_empty_one(numels: list[int], bucket_size: int, ranks: int) -> dict[str, Any]:
    """A mistake: the last bucket is closed even if it is empty."""
    found = lay_out(numels, bucket_size, ranks)
    start, stop = found["buckets"][-1]
    used = max(place + n for place, n in zip(found["places"], numels, strict=True)) - start
    return {**found, "buckets": found["buckets"] + [[stop, stop]] * (used >= bucket_size)}


def _by_total(numels: list[int], bucket_size: int, ranks: int) -> dict[str, Any]:
    """A mistake: each parameter's end is padded to a multiple of `ranks`. (To pad a bucket's length or its end is the
    same.)"""
    places, buckets, start, stop = [0] * len(numels), [], 0, 0
    for i in reversed(range(len(numels))):
        places[i], stop = stop, _up(stop + numels[i], ranks)
        if stop - start >= bucket_size:
            buckets.append([start, stop])
            start = stop
    return {"places": places, "buckets": buckets + ([[start, stop]] if stop > start else [])}


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
    mistakes=[
        Mistake(lambda **i: lay_out(**i, forward=True), "The buffer begins with the *last* parameter: its gradient is "
                "there first."),
        Mistake(lambda **i: lay_out(**i, pad=False), "A bucket must be a multiple of the number of ranks: there is no "
                "padding."),
        Mistake(lambda **i: lay_out(**i, at_end=False), "The last bucket is not padded. It is cut among the ranks as "
                "all others are."),
        Mistake(lambda **i: lay_out(**i, more=False), "A bucket with exactly that many elements is full."),
        Mistake(lambda **i: lay_out(**i, before=True), "A bucket is closed *after* the parameter that fills it, even "
                "if it is then larger than asked."),
        Mistake(_with_an_empty_one, "The last bucket is empty: where a parameter has just closed one and none is left, "
                "there is nothing to close."),
        Mistake(lambda **i: lay_out(**{**i, "ranks": 2}), "Two ranks are the example's: a bucket divides by `ranks`."),
        Mistake(_by_total, "Only buckets are padded here, not each parameter."),
        Mistake(lambda **i: {**lay_out(**i), "places": lay_out(**i)["places"][::-1]}, "`places` has the order of "
                "`numels`: the first is that of the first parameter."),
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


def _whole_parameters(**i: Any) -> list[tuple[int, int, int, int, int]]:
    """A mistake: each parameter belongs wholly to the rank in whose part it begins."""
    return [(p, 0, i["numels"][p], b, at) for p, first, _, b, at in my_pieces(**i) if first == 0]


def _edited(change: Callable[..., tuple[int, int, int, int, int]]) -> Callable[..., list[tuple[int, ...]]]:
    return lambda **i: [change(i, *piece) for piece in my_pieces(**i)]


def _of_buffer(numels: list[int], places: list[int], buckets: list[list[int]], ranks: int, rank: int) -> list[Any]:
    """A mistake: the whole buffer is cut into `ranks` parts, not each bucket."""
    whole = [[0, buckets[-1][1]]]
    found = my_pieces(numels, places, whole, ranks, rank) if buckets[-1][1] % ranks == 0 else []
    of = [next(n for n, (start, stop) in enumerate(buckets) if start <= place < stop) for place in places]
    return [(i, first, last, of[i], at) for i, first, last, _, at in found]


_TWO = {"numels": [4, 2, 5], "bucket_size": 6, "ranks": 2}


def _in_the_models_order(**i: Any) -> list[tuple[int, int, int, int, int]]:
    return sorted(my_pieces(**i), key=lambda piece: (piece[3], piece[0]))


PIECES = Exercise(
    "my_pieces",
    reference=my_pieces,
    cases=[
        Case("the example: what rank 0 has", _of_layout(**_TWO, rank=0)),
        Case("and rank 1", _of_layout(**_TWO, rank=1)),
        Case("other layouts", _some, points=2, hidden=True, fixed=[
            _of_layout(**one, rank=rank)
            for one, rank in itertools.product((_MIXED, _ALL), (0, 1, 2))] + [
            _of_layout(**_ONE, rank=7), _of_layout(**_ONE, rank=6)]),
    ],
    mistakes=[
        Mistake(_whole_parameters, "A parameter may lie in the parts of several ranks: each has a stretch of it."),
        Mistake(_of_buffer, "Every *bucket* is cut among the ranks, not the buffer as a whole."),
        Mistake(_edited(lambda i, p, first, last, b, at: (p, first + i["places"][p], last + i["places"][p], b, at)),
                "Start and stop count the parameter's own elements, from 0; these are the buffer's."),
        Mistake(_edited(lambda i, p, first, last, b, at: (p, first, last, b, first + i["places"][p])),
                "The last number counts from the beginning of this rank's shard; this one counts in the buffer."),
        Mistake(_edited(lambda i, p, first, last, b, at: (p, first, last, b, first + i["places"][p]
                - i["buckets"][b][0])), "The last number counts from the beginning of this rank's shard; this one "
                "counts from that of the bucket."),
        Mistake(_edited(lambda i, p, first, last, b, at: (p, first, last - first, b, at)), "The third number is "
                "where the stretch stops, not how long it is."),
        Mistake(_in_the_models_order, "All pieces are right. Within a bucket, too, they stand in the order of the "
                "buffer: the last parameter first."),
        Mistake(lambda **i: sorted(my_pieces(**i)), "The pieces stand in the order of the buffer, from the left."),
        Mistake(lambda **i: my_pieces(**{**i, "rank": i["ranks"] - 1 - i["rank"]}), "Those are another rank's: rank 0 "
                "has the first part of each bucket."),
        Mistake(lambda **i: [x for x in my_pieces(**i) if x[1] == 0], "Of a parameter that began in the part before, "
                "the rest is yours."),
    ],
    idea="Two intervals: a parameter's and your part's. What do both contain, and where does it begin in each of them?",
    hint="For bucket n = [start, stop): share = (stop - start) // ranks, low = start + rank * share, high = low + "
    "share. For each of its parameters in the buffer's order: first = max(place, low), last = min(place + numel, "
    "high); where first < last it is (i, first - place, last - place, n, first - low).",
)  # fmt: skip
