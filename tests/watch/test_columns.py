"""Numbers thinned for a drawing: the extremes are there, the mean is of all points, and what is new is enough."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minimegatron.watch.columns import Column, width_for

POINTS = st.lists(st.tuples(st.integers(1, 9), st.one_of(st.none(), st.floats(-1e6, 1e6))), min_size=1, max_size=60)


def column_of(gaps: list[tuple[int, float | None]]) -> tuple[Column, list[tuple[int, float | None]]]:
    column, points, at = Column(), [], 0
    for gap, value in gaps:
        at += gap
        column.append(at, value)
        points.append((at, value))
    return column, points


def slowly(points: list[tuple[int, Any]], first: int, end: int, width: int, smooth: int) -> list[tuple[Any, ...]]:
    """(last iteration, mean, low, high) of each bucket."""
    rows = []
    for bucket in sorted({at // width for at, _ in points if first <= at < end}):
        mine = [(at, v) for at, v in points if first <= at < end and at // width == bucket]
        last = mine[-1][0]
        over = [v for at, v in points if v is not None and at <= last and (at > last - smooth or at >= mine[0][0])]
        finite = [v for _, v in mine if v is not None]
        mean = math.fsum(over) / len(over) if over else None
        rows.append((last, mean, min(finite, default=None), max(finite, default=None)))
    return rows


@given(POINTS, st.integers(0, 40), st.integers(1, 300), st.sampled_from([1, 2, 8, 32]), st.sampled_from([0, 1, 7, 50]))
def test_a_bucket_has_the_extremes_and_the_mean_of_its_points(
    gaps: Any, first: int, span: int, width: int, smooth: int
):
    column, points = column_of(gaps)
    found = column.buckets(first, first + span, width, smooth)
    wanted = slowly(points, first, first + span, width, smooth)
    assert found["at"] == [at for at, *_ in wanted]
    assert found["mean"] == [near(mean) for _, mean, _, _ in wanted]
    if "low" in found:
        assert found["low"] == [near(low) for *_, low, _ in wanted] and found["high"] == [
            near(high) for *_, high in wanted
        ]
    else:
        assert len(wanted) == len([at for at, _ in points if first <= at < first + span]), "one point a bucket"


def near(value: float | None) -> Any:
    return None if value is None else pytest.approx(value, rel=1e-5, abs=1e-4)


@given(POINTS, POINTS, st.sampled_from([1, 4, 16]), st.sampled_from([0, 9]))
def test_what_begins_at_the_last_bucket_completes_what_is_known(old: Any, new: Any, width: int, smooth: int):
    column, points = column_of(old)
    last = points[-1][0]
    known = column.buckets(0, last + 1, width, smooth)
    for gap, value in new:
        column.append(column.last_at + gap, value)
    whole = column.buckets(0, column.last_at + 1, width, smooth)
    since = last // width * width
    fresh = column.buckets(since, column.last_at + 1, width, smooth)
    kept = [i for i, at in enumerate(known["at"]) if at < since]
    for key in ("at", "mean"):
        assert [known[key][i] for i in kept] + fresh[key] == whole[key]


def test_a_jump_of_one_step_is_seen_among_a_hundred_thousand():
    column = Column()
    for at in range(1, 100_001):
        column.append(at, 50.0 if at == 77_777 else 2.0)
    width = width_for(0, 100_001, 500)
    found = column.buckets(0, 100_001, width, 1000)
    assert width == 256 and len(found["at"]) == 391
    assert max(found["high"]) == 50.0 and found["high"].index(50.0) == 77_777 // 256
    for _ in range(4):
        column.thin()
    assert len(column) < 7_000 and max(column.buckets(0, 100_001, width)["high"]) == 50.0, "thinned to a sixteenth"


@given(POINTS)
def test_thinning_keeps_order_and_extremes(gaps: Any):
    column, points = column_of(gaps)
    add_at, add_value = column.appends
    column.thin()
    left = column.buckets(0, 1000, 1)
    assert left["at"] == sorted(set(left["at"])) and set(left["at"]) <= {at for at, _ in points}
    finite = [v for _, v in points if v is not None]
    if finite:
        kept = [v for v in left["mean"] if v is not None]
        assert min(kept) == pytest.approx(min(finite), rel=1e-5) and max(kept) == pytest.approx(max(finite), rel=1e-5)
    add_at(2000)
    add_value(1.0)
    assert column.last_at == 2000, "what appends without looking still does"


def test_a_number_at_the_same_iteration_replaces_and_a_cut_forgets():
    column, _ = column_of([(1, 1.0), (1, 2.0), (1, 3.0)])
    column.append(2, 5.0)
    assert column.buckets(0, 9, 1) == {"at": [1, 2], "mean": [1.0, 5.0]}
    column.cut(0)
    assert len(column) == column.last_at == 0 and column.buckets(0, 9, 1)["at"] == []
