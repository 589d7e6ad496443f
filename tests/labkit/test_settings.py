"""Trials: fixed inputs are always tried, settings fall on the same trials whatever the seed, each finds its fault."""

from __future__ import annotations

import re

import pytest
import torch

from labkit.exercises import Case, Draw, Exercise, load_lab
from labkit.fresh import Nursery
from labkit.judge import judge
from labkit.player import strided
from labkit.settings import PLAIN, trials
from labkit.verdict import Verdict
from minimegatron.errors import ConfigError
from tests.thorough import mostly_thorough

COURSE = "tests.labkit.settings_course"
LAB = load_lab(COURSE)
TOTAL = """
import torch.distributed as dist
def total(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x
"""
OVER = """
import torch.distributed as dist
def over(x, axis):
    x = x.contiguous().clone()
    if axis.size > 1:
        dist.all_reduce(x, group=axis.group)
    assert axis.group is None or dist.get_rank(axis.group) == axis.rank == axis.ranks.index(dist.get_rank())
    return x
"""
OWN = """
import torch.distributed as dist
def own_group(x):
    group = dist.new_group(list(range(dist.get_world_size())))
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x
"""
PASS_ON = """
import torch
import torch.distributed as dist
def pass_on(x, cp):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    sent = dist.isend(x.contiguous(), cp.ranks[(cp.rank + 1) % cp.size])
    dist.recv(y, cp.ranks[cp.rank - 1])
    sent.wait()
    return y
"""
PLUS = "def plus(x, n):\n    return x + n\n"


def check(nursery: Nursery, exercise: str, source: str, seed: str = "1") -> Verdict:
    return judge(nursery, COURSE, exercise, {exercise: source}, seed)


def notes(verdict: Verdict) -> list[str]:
    return [row.note for row in verdict.rows]


RIGHT = [("total", TOTAL), ("over", OVER), ("own_group", OWN), ("plus", PLUS), ("pass_on", PASS_ON)]


@pytest.mark.parametrize(("exercise", "source"), mostly_thorough(RIGHT, [0, 4]))
def test_what_is_right_in_every_setting_passes(nursery: Nursery, exercise: str, source: str) -> None:
    verdict = check(nursery, exercise, source)
    assert verdict.state == "passed", verdict


# ------------------------------------------------------------------------------------------------- which trial


def test_settings_fall_on_the_same_hidden_trials_whatever_the_seed() -> None:
    for exercise in LAB.exercises.values():
        of_seeds = [[[one.setting for one in case] for case in trials(exercise, seed)] for seed in "abc"]
        assert of_seeds[0] == of_seeds[1] == of_seeds[2]
    total = trials(LAB["total"], "a")
    assert total[0][0].setting == PLAIN
    found = [one.setting for case in total for one in case]
    assert [sum(getattr(one, name) for one in found) for name in ("strided", "double", "smaller")] == [1, 1, 1]
    assert total[3][0].setting.smaller and not any(
        one.setting.smaller for case in trials(LAB["plus"], "a") for one in case
    )


def test_a_smaller_group_is_never_the_first_ranks() -> None:
    for seed in range(20):
        one = trials(LAB["total"], str(seed))[3][0]
        assert len(one.members) == len(one.given) < one.world
        assert list(one.members) != list(range(len(one.members))) and one.members == tuple(sorted(set(one.members)))


def test_cheap_cases_are_drawn_three_times_and_fixed_inputs_come_first() -> None:
    visible, hidden = trials(LAB["plus"], "a")
    assert [one.given["n"] for one in visible] == [1, 2]
    assert len(hidden) == 4 and hidden[0].given["n"] == 7
    assert len({str(one.given["x"]) for one in hidden}) == 4


def test_float64_keeps_values_and_reaches_every_tensor() -> None:
    one = next(one for case in trials(LAB["total"], "a") for one in case if one.setting.double)
    for given, doubled in zip(one.given, one.inputs, strict=True):
        assert doubled["x"].dtype == torch.float64 and torch.equal(doubled["x"].float(), given["x"])
    only32 = Exercise("f", LAB["total"].cases, reference=int, dtypes=(torch.float32,))
    assert not any(one.setting.double for case in trials(only32, "a") for one in case)


@pytest.mark.parametrize("shape", [(2, 3), (1, 3), (3, 1), (2, 1, 3), (5,), (2,)])
def test_strided_tensors_have_the_same_values_and_are_not_contiguous(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    y = strided({"a": [x, 3]})["a"][0]
    assert torch.equal(x, y) and not y.is_contiguous()


def test_sizes_differ_and_hold_zeros() -> None:
    drawn = [Draw(seed).sizes(3, 0, 2) for seed in range(50)]
    assert all(len(set(sizes)) > 1 and max(sizes) <= 2 for sizes in drawn)
    assert sum(0 in sizes for sizes in drawn) >= 15 and all(0 not in Draw(s).sizes(2, 1, 9) for s in range(50))
    assert all(len(set(Draw(seed).shape(3, 1, 4))) == 3 for seed in range(20))
    with pytest.raises(ConfigError, match="cannot differ"):
        Draw(0).sizes(2, 3, 3)
    with pytest.raises(ConfigError, match="different sizes"):
        Draw(0).shape(3, 1, 2)


def test_groups_that_leave_a_rank_out_are_the_authors_fault() -> None:
    broken = Exercise("f", LAB["total"].cases, reference=int, group={"g": lambda ranks: [[0]]})
    with pytest.raises(ConfigError, match="the groups of `g` are"):
        trials(broken, "a")


def test_a_case_is_of_one_kind() -> None:
    mixed = Exercise("f", [Case("mixed", {"x": 1}, fixed=[[{"x": 1}]])], reference=int)
    with pytest.raises(ConfigError, match="some of `mixed` runs on ranks"):
        trials(mixed, "a")


# ---------------------------------------------------------------------------------------- what each setting finds


def test_a_fixed_trial_finds_what_draws_do_not(nursery: Nursery) -> None:
    clipped = "def plus(x, n):\n    return x + min(n, 1)\n"
    assert [row.points for row in check(nursery, "plus", clipped).rows] == [0, 0]
    luck = "def plus(x, n):\n    return x + (n if n != 7 else 0)\n"
    verdict = check(nursery, "plus", luck)
    assert [row.points for row in verdict.rows] == [1, 0]
    assert notes(verdict)[1] == "wrong; the inputs and answers of this case stay hidden"


def test_the_first_wrong_trial_is_told(nursery: Nursery) -> None:
    first = "def plus(x, n):\n    return x"
    assert notes(check(nursery, "plus", first))[0] == "got tensor([0.0]), expected tensor([1.0])"
    second = "def plus(x, n):\n    if n == 2:\n        raise ValueError(n)\n    return x + n"
    assert notes(check(nursery, "plus", second))[0].startswith("ValueError: 2 (line 3")


def test_a_changed_input_is_told_unless_it_may_change(nursery: Nursery) -> None:
    verdict = check(nursery, "plus", "def plus(x, n):\n    x += n\n    return x")
    assert (verdict.points, set(notes(verdict))) == (0, {"it changes its input `x`: compute on a copy"})
    verdict = check(nursery, "own_group", OWN.replace("x = x.contiguous().clone()", "pass"))
    assert "it changes its input `x`" in notes(verdict)[0]
    into = "def into(x, out):\n    out.copy_(2 * x)\n    return out"
    assert check(nursery, "into", into).state == "passed"
    assert "input `x`" in notes(check(nursery, "into", into.replace("return out", "x.zero_()\n    return out")))[0]


def test_only_the_setting_is_wrong(nursery: Nursery) -> None:
    raw = check(nursery, "total", TOTAL.replace("x.contiguous()", "x.view(-1).view(x.shape)"))
    assert [row.points for row in raw.rows] == [1, 0, 1, 1], raw
    assert notes(raw)[1].startswith("with inputs that are not contiguous: every rank: RuntimeError: view size")
    single = check(nursery, "total", TOTAL.replace(".clone()", ".float().clone()"))
    assert [row.points for row in single.rows] == [1, 1, 0, 1], single
    hidden = "rank 0: wrong (float32, not float64); the inputs and answers of this case stay hidden"
    assert notes(single)[2] == f"with inputs of float64: {hidden}"
    own = TOTAL.replace("    return x", "    return x * (dist.get_rank() < dist.get_world_size(group))")
    global_rank = check(nursery, "total", own)
    assert [row.points for row in global_rank.rows] == [1, 1, 1, 0], global_rank
    assert re.match(r"with a group smaller than the world: rank \d: wrong;", notes(global_rank)[3])


@pytest.mark.parametrize("group", mostly_thorough(["", ", group=cp.group"], [1]))
def test_neighbours_are_those_of_the_case_whatever_the_group(nursery: Nursery, group: str) -> None:
    """In the smaller group the next rank of the ring is not the next of the world."""
    source = PASS_ON.replace("% cp.size])", f"% cp.size]{group})").replace("rank - 1])", f"rank - 1]{group})")
    verdict = check(nursery, "pass_on", source)
    assert verdict.state == "passed", verdict


def test_what_is_wrong_everywhere_is_not_laid_on_a_setting(nursery: Nursery) -> None:
    verdict = check(nursery, "total", TOTAL.replace("return x", "return 2 * x"))
    assert verdict.points == 0 and not any("with " in note for note in notes(verdict))


def test_a_group_that_is_ignored_hangs_in_the_smaller_one_only(nursery: Nursery) -> None:
    verdict = check(nursery, "total", TOTAL.replace(", group=group", ""))
    assert [row.points for row in verdict.rows] == [1, 1, 1, 0]
    said = (
        "with a group smaller than the world: deadlock: nothing goes on any more; every rank: line 5: dist.all_reduce"
    )
    assert notes(verdict)[3].startswith(said)


def test_a_group_that_only_its_members_make_is_found(nursery: Nursery) -> None:
    source = OWN.replace("    return x", "    if dist.get_rank() == 0:\n        dist.new_group([0])\n    return x")
    verdict = check(nursery, "own_group", source)
    assert verdict.points == 0 and "some ranks have made 1 more than others" in verdict.note


def test_a_communication_that_one_rank_starts_alone_is_found(nursery: Nursery) -> None:
    alone = "    if dist.get_rank() == 0:\n        dist.barrier(async_op=True)\n    return x"
    verdict = check(nursery, "own_group", OWN.replace("    return x", alone))
    assert verdict.points == 0 and "no longer meet in the world" in notes(verdict)[0]
