"""A known mistake is told where it explains every wrong trial, and nowhere else."""

from __future__ import annotations

import pytest
import torch

from labkit import playing
from labkit.exercises import Case, Exercise, load_lab
from labkit.fresh import Nursery
from labkit.playing import vary
from labkit.settings import trials
from labkit.suspects import Suspects

COURSE = "tests.labkit.mini_course"


HINTS = ["a", "b", "a", "d"]  # of the known mistakes 0 to 3: two ways make the first


def suspects(*seen: set[int] | str | None) -> Suspects:
    """After wrong trials: the known mistakes that lead to their values, None where none was tried, or the hint that the
    words of an error name; ", or known" where known mistakes are still to be tried."""
    found = Suspects(Exercise("f", [Case("x", {})], lambda: 0, errors={"words": "of an error"}), HINTS)
    for one in seen:
        if isinstance(one, str):
            found.named(one.removesuffix(", or known"), tried=not one.endswith(", or known"))
        else:
            found.seen(one)
    return found


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        ([], ""),
        ([{0, 1}], "a"),
        ([{1, 0}, {1}], "b"),
        ([{0}, {2}], "a"),
        ([{0}, {3}], ""),
        ([{1}, set()], ""),
        ([{1}, None], "b"),
        ([None], ""),
        (["of an error"], "of an error"),
        (["of an error", {0}], ""),
        ([", or known", {0}], "a"),
        (["of an error, or known", {0}], "a"),
        (["of an error, or known"], "of an error"),
        ([{0}, ""], ""),
    ],
    ids=[
        "no trial",
        "the first of two",
        "the one that explains both",
        "two ways of one mistake",
        "each explains one",
        "nothing explains the second",
        "not tried on the second",
        "tried nowhere",
        "words of an error",
        "an error and values",
        "an error that a known one may raise",
        "the same, named by its words",
        "words, where no known one is suspected",
        "another error",
    ],  # fmt: skip
)
def test_a_mistake_is_told_where_it_explains_every_wrong_trial(seen: list[set[int] | str | None], told: str) -> None:
    assert suspects(*seen).told() == told


def test_a_way_that_does_not_fit_elsewhere_is_ruled_out() -> None:
    found = suspects({0, 1, 2})
    assert (found.suspected(), found.told()) == ([0, 2, 1], "a"), "not what explains nothing"
    found.rule_out(0)
    assert (found.suspected(), found.told()) == ([2, 1], "a"), "its other way fits"
    for way in (2, 1):
        found.rule_out(way)
    assert (found.suspected(), found.told()) == ([], "")


RIGHT = """
import torch.distributed as dist
def ring_all_reduce(x):
    y = x.contiguous().clone()
    dist.all_reduce(y)
    return y
"""


def test_a_rank_that_is_done_early_ends_no_other(nursery: Nursery) -> None:
    """Rank 0 returns at once; the store of the group is its own, and the other rank reads it later."""
    alone = """
import time
import torch.distributed as dist
def ring_all_reduce(x):
    if dist.get_rank() == 1:
        time.sleep(0.5)
        store = dist.distributed_c10d._get_default_store()
        store.set("late", "")
        store.get("late")
    return x
"""
    asked = load_lab(COURSE)["ring_all_reduce"]
    drawn = [trial.to_plain() for trial in trials(asked, "1")[0]]
    given = vary(nursery, asked, {}, [alone, RIGHT, alone], drawn, "/nowhere")
    assert [type(one) for one in given] == [list, list, list], given


@pytest.mark.thorough
def test_variants_run_one_after_the_other_whatever_becomes_of_each(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank alone in a sum, all that wait for each other, a rank that is gone, one that computes for ever."""
    monkeypatch.setattr(playing, "_PATIENCE", 0.2)
    one = "    if dist.get_rank() == 0:\n        {}\n    return y"
    variants = [
        RIGHT,
        "def ring_all_reduce(x):\n    return 1 / 0",
        RIGHT.replace("    return y", one.format("dist.all_reduce(y)")),
        RIGHT.replace("dist.all_reduce(y)", "dist.recv(y, 1 - dist.get_rank())"),
        "not Python",
        RIGHT.replace("    return y", one.format("__import__('os').abort()")),
        RIGHT.replace("    return y", one.format("while True: pass")),
        RIGHT.replace("return y", "return 2 * y"),
    ]
    asked = load_lab(COURSE)["ring_all_reduce"]
    drawn = [trial.to_plain() for trial in trials(asked, "1")[0]]
    first, raises, *hang, unread, ends, endless, last = vary(nursery, asked, {}, variants, drawn, "/nowhere")
    assert raises == "ZeroDivisionError: division by zero" and str(unread).startswith("NameError")
    assert hang == [None, None] and ends is None and endless is None
    assert isinstance(first, list) and isinstance(last, list)
    [ranks], [doubled] = first, last
    assert all(torch.equal(one, torch.tensor([4.0, 6.0])) for one in ranks) and torch.equal(doubled[1], 2 * ranks[1])
