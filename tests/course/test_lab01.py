"""Lab 01's checks: what is asked of overlap is found by order, whichever way a rank waits."""

from __future__ import annotations

import pytest

from labkit.fresh import Nursery
from tests.course.marked import LABS, said
from tests.thorough import mostly_thorough

LAB = LABS["01_process_groups"]


REDUCERS = [
    ("overlap_blocks_in_the_hook", "inside backward()"),
    ("overlap_polls_in_the_hook", "inside backward()"),
    ("overlap_all_in_the_last_hook", "has not left when the next gradient is computed"),
    ("overlap_first_step_only", "first one's sums"),
]


@pytest.mark.parametrize(("name", "words"), mostly_thorough(REDUCERS, [1, 2, 3]))
def test_a_reducer_that_hides_nothing_or_works_once_is_told_so(nursery: Nursery, name: str, words: str) -> None:
    verdict = LAB.check(nursery, "overlap", LAB.wrong_program(name))
    assert verdict.state == "wrong" and words in said(verdict), verdict


def test_a_size_that_needs_an_empty_part_is_always_tried(nursery: Nursery) -> None:
    verdict = LAB.check(nursery, "ring_all_reduce", LAB.wrong_program("ring_all_reduce_parts_by_chunk"))
    assert [row.points == row.of for row in verdict.rows] == [True, True, True, False, True], verdict
