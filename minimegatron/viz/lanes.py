"""Rows of bars out of many events: who stands in which row, and what of it can be seen.

The problem in a sentence: a run of an hour has a million events and a picture a thousand columns of pixels, so nearly
all of the work of drawing each bar is for bars that cover each other.

* `lay_out` gives every event a row: events of one kind that overlap get rows of their own, the first free row takes the
  next. A heap of rows by the end of their last bar finds it in log(rows) steps.
* `at_pixels` keeps what can be told apart: bars that are narrower than a pixel and begin in the same column of pixels
  become one, which looks like the longest of them. Wider bars stay what they are, so a small picture does not change,
  and a row has never more than two bars a column.

Everything here is numpy over whole columns of numbers: a million events take seconds.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from minimegatron.trace import Event

TOUCH = 1e-9  # seconds by which an event may begin before the one before it in its row has ended


class Seen(NamedTuple):
    """Bars of a row that can be told apart.

    Attributes:
        start, end: of each bar.
        which: the event that each looks like, as a position in the row.
        first, size: the events behind a bar: `size` of the row's, from position `first` on.
    """

    start: np.ndarray
    end: np.ndarray
    which: np.ndarray
    first: np.ndarray
    size: np.ndarray


def times(events: Sequence[Event]) -> tuple[np.ndarray, np.ndarray]:
    """Starts and ends, the clock starting at the first event."""
    start = np.fromiter((e.start for e in events), float, len(events))
    end = np.fromiter((e.end for e in events), float, len(events))
    origin = start.min()
    return start - origin, end - origin


def lay_out(
    events: Sequence[Event], start: np.ndarray, end: np.ndarray, kinds: Sequence[str]
) -> dict[int, list[np.ndarray]]:
    """For each rank its rows, as positions in `events`: one kind a row, no two of a row at the same time.

    Args:
        start, end: of the events; those without length get no row.
        kinds: in which order kinds stand; others follow.
    """
    ranks = np.fromiter((e.rank for e in events), np.int64, len(events))
    codes = {kind: i for i, kind in enumerate(kinds)}
    kind = np.fromiter((codes.setdefault(e.kind, len(codes)) for e in events), np.int64, len(events))
    table: dict[int, list[np.ndarray]] = {int(rank): [] for rank in np.unique(ranks)}
    order = np.lexsort((-end, start, kind, ranks))
    order = order[end[order] > start[order]]
    if order.size:
        new = np.diff(ranks[order]).astype(bool) | np.diff(kind[order]).astype(bool)
        for group in np.split(order, np.flatnonzero(new) + 1):
            table[int(ranks[group[0]])] += _rows(group, start[group], end[group])
    return table


def _rows(group: np.ndarray, start: np.ndarray, end: np.ndarray) -> list[np.ndarray]:
    """Events in the order of their starts, dealt to rows: the first free row takes the next."""
    if (start[1:] >= end[:-1] - TOUCH).all():
        return [group]
    busy: list[tuple[float, int]] = []  # (end of its last bar, row)
    free: list[int] = []
    row = np.empty(len(group), np.int64)
    rows = 0
    for i, (begin, stop) in enumerate(zip(start.tolist(), end.tolist(), strict=True)):
        while busy and begin >= busy[0][0] - TOUCH:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            taken = heapq.heappop(free)
        else:
            taken, rows = rows, rows + 1
        row[i] = taken
        heapq.heappush(busy, (stop, taken))
    order = np.argsort(row, kind="stable")
    return np.split(group[order], np.flatnonzero(np.diff(row[order])) + 1)


def at_pixels(start: np.ndarray, end: np.ndarray, pixel: float) -> Seen:
    """The bars of one row, in the order of their starts, as far as pixels of this width tell them apart."""
    length = end - start
    narrow, column = length < pixel, np.floor(start / pixel)
    joins = narrow[1:] & narrow[:-1] & (column[1:] == column[:-1])
    first = np.concatenate(([0], np.flatnonzero(~joins) + 1))
    group = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(start))))
    longest_last = np.lexsort((-np.arange(len(start)), length, group))
    size = np.diff(np.append(first, len(start)))
    return Seen(start[first], np.maximum.reduceat(end, first), longest_last[first + size - 1], first, size)


def covered(start: np.ndarray, end: np.ndarray) -> float:
    """The time during which at least one of these is under way."""
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    start, latest = start[order], np.maximum.accumulate(end[order])
    new = np.flatnonzero(start[1:] > latest[:-1]) + 1  # a gap before these
    firsts, lasts = np.concatenate(([0], new)), np.append(new - 1, len(start) - 1)
    return float((latest[lasts] - start[firsts]).sum())
