"""Lab 01's checks: the sizes that a ring is always tried with."""

from __future__ import annotations

from labkit.fresh import Nursery
from tests.course.marked import LABS

LAB = LABS["01_process_groups"]


def test_a_size_that_needs_an_empty_part_is_always_tried(nursery: Nursery) -> None:
    by_chunk = LAB.solutions["ring_all_reduce"].replace("tensor_split", "chunk")
    verdict = LAB.check(nursery, "ring_all_reduce", by_chunk)
    assert [row.points == row.of for row in verdict.rows] == [True, True, True, False, True], verdict
