"""Lab 04's checks: a ring is judged by its own work, whatever right exercises it is built on."""

from __future__ import annotations

import pytest

from labkit.answers import GivenAnswer
from labkit.judge import judge
from tests.course.marked import LABS
from tests.thorough import SLOW

LAB = LABS["04_context_parallel"]
PARTS = [answer for answer in LAB.answers if answer.right and answer.exercise in ("attend", "merge")]


@SLOW
def test_a_ring_with_attention_of_its_own_needs_no_attend(nursery):
    """The check counts what `attend` costs; who has not written it yet loses nothing."""
    source = LAB.source(
        "ring_forward: own isends, K and V in two messages, own attention over the quarters of which something is seen"
    )
    assert "exercises.attend" not in source
    sources = {"merge": LAB.solutions["merge"], "ring_forward": source, "attend": LAB.stubs["attend"]}
    verdict = judge(nursery, LAB.course, "ring_forward", sources, "seed")
    assert verdict.state == "passed", verdict


@pytest.mark.thorough
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_a_ring_of_other_right_parts_is_right(nursery, part: GivenAnswer):
    """One `attend` goes twice over the scores, one `merge` is a softmax: neither is work on what is hidden."""
    sources = {**LAB.solutions, part.exercise: part.source}
    verdict = judge(nursery, LAB.course, "ring_forward", sources, "seed")
    assert verdict.state == "passed", verdict


@pytest.mark.parametrize("edit", [[("out * shrink", "out")], [("out * shrink", "out"), ("total * shrink", "total")]])
def test_attention_that_does_not_rescale_fails_where_its_learner_sees_the_numbers(nursery, edit):
    """The picture's row: without shrinking O is 8, with l = 15/8 that is 64/15 in place of 28/15."""
    source = LAB.solutions["attend"]
    for old, new in edit:
        assert old in source
        source = source.replace(old, new)
    verdict = judge(nursery, LAB.course, "attend", {**LAB.solutions, "attend": source}, "seed")
    assert verdict.rows[0].points == 0 and "got" in verdict.rows[0].note, verdict
