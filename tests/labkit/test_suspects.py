"""A known mistake is told where it explains every wrong trial, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from labkit.exercises import Case, Exercise, Mistake, load_lab
from labkit.fresh import Nursery
from labkit.playing import vary
from labkit.settings import trials
from labkit.suspects import Suspects

COURSE = "tests.labkit.mini_course"


def told(asked: Exercise, ways: dict[str, dict[int, bool | None]], seen: Sequence[int | str]) -> str:
    """What is told after wrong trials (numbers) and errors (the hint that their words name)."""
    suspects = Suspects(asked)
    for one in seen:
        if isinstance(one, str):
            suspects.named(one)
        else:
            suspects.seen(lambda mistake, one=one: ways[mistake.hint].get(one, False))  # type: ignore[misc]
    return suspects.told()


def test_a_mistake_is_told_where_it_explains_every_wrong_trial() -> None:
    # hint -> trial -> whether the mistake gives the learner's answer there; None: it does not apply
    ways: dict[str, dict[int, bool | None]] = {
        "a": {1: True, 2: True}, "b": {1: True, 2: False}, "d": {1: True, 2: None, 3: None},
    }  # fmt: skip
    of_errors = {"words": "of an error"}
    asked = Exercise(
        "f", [Case("x", {})], lambda: 0, mistakes=[Mistake(lambda: 0, way) for way in ways], errors=of_errors
    )
    assert told(asked, ways, []) == ""
    assert told(asked, ways, [1]) == told(asked, ways, [2]) == told(asked, ways, [1, 2]) == "a"
    assert told(asked, ways, [1, 2, 3]) == "d", "a does not explain the third, d says nothing of it"
    assert told(asked, ways, [1, 4]) == "", "one trial that nothing explains"
    assert told(asked, ways, [3]) == "", "what says nothing explains nothing"
    assert told(asked, ways, ["of an error"]) == "of an error"
    assert told(asked, ways, ["of an error", 1]) == told(asked, ways, [1, ""]) == "", (
        "another trial fails of something else"
    )


def test_two_ways_of_one_mistake_share_its_hint() -> None:
    ways = [Mistake(lambda: 0, "a"), Mistake(lambda: 1, "a"), Mistake(lambda: 2, "b")]
    suspects = Suspects(Exercise("f", [Case("one", {})], lambda: 0, mistakes=ways))
    suspects.seen(lambda mistake: mistake is ways[0])
    suspects.seen(lambda mistake: mistake is ways[1])
    assert suspects.told() == "a"


def test_changed_solutions_are_suspects_too() -> None:
    suspects = Suspects(Exercise("f", [Case("one", {})], lambda: 0), ["a", "b"])
    suspects.seen(lambda mistake: False, [0, 1])
    suspects.seen(lambda mistake: False)
    assert suspects.told() == "a", "they were not tried on the second trial"
    suspects.seen(lambda mistake: False, [1])
    assert suspects.told() == "b"
    suspects.seen(lambda mistake: False, [])
    assert suspects.told() == ""


def test_a_way_that_does_not_fit_elsewhere_is_ruled_out() -> None:
    function = Mistake(lambda: 0, "c")
    suspects = Suspects(Exercise("f", [Case("one", {})], lambda: 0, mistakes=[function]), ["a", "b", "a", "d"])
    suspects.seen(lambda mistake: True, [0, 1, 2])
    assert (suspects.suspected(), suspects.told()) == ([0, 2, 1, function], "a"), "not what explains nothing"
    suspects.rule_out(0)
    assert (suspects.suspected(), suspects.told()) == ([2, 1, function], "a"), "its other way fits"
    for way in (2, 1, function):
        suspects.rule_out(way)
    assert (suspects.suspected(), suspects.told()) == ([], "")


RIGHT = """
import torch.distributed as dist
def ring_all_reduce(x):
    y = x.contiguous().clone()
    dist.all_reduce(y)
    return y
"""


@pytest.mark.thorough
def test_variants_run_one_after_the_other_whatever_becomes_of_each(nursery: Nursery) -> None:
    alone = RIGHT.replace("    return y", "    if dist.get_rank() == 0:\n        dist.all_reduce(y)\n    return y")
    variants = [
        RIGHT,
        "def ring_all_reduce(x):\n    return 1 / 0",
        alone,
        "not Python",
        RIGHT.replace("return y", "return 2 * y"),
    ]
    asked = load_lab(COURSE)["ring_all_reduce"]
    drawn = [trial.to_plain() for trial in trials(asked, "1")[0]]
    first, raises, hangs, unread, last = vary(nursery, asked, {}, variants, drawn, "/nowhere")
    assert (raises, hangs, unread) == (None, None, None)
    assert first is not None and last is not None
    [ranks], [doubled] = first, last
    assert all(torch.equal(one, torch.tensor([4.0, 6.0])) for one in ranks) and torch.equal(doubled[1], 2 * ranks[1])
