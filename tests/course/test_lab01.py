"""Lab 01's checks: what is asked of overlap is found by order, whichever way a rank waits."""

from __future__ import annotations

from labkit.fresh import Nursery
from tests.course.marked import LABS

LAB = LABS["01_process_groups"]


def test_a_size_that_needs_an_empty_part_is_always_tried(nursery: Nursery) -> None:
    verdict = LAB.check(nursery, "ring_all_reduce", LAB.source("ring_all_reduce: parts by chunk"))
    assert [row.points == row.of for row in verdict.rows] == [True, True, True, False, True], verdict
