"""The checker: what it refuses, in which words, and that nothing wrong gets past it."""

from __future__ import annotations

import graphlib
import random
from collections import Counter

import pytest

from minimegatron.errors import ConfigError
from minimegatron.parallel.pipeline.actions import Action, Schedule, schedule_from_text, v_shaped
from minimegatron.parallel.pipeline.schedule_sim import (
    check,
    live_activations,
    peak_live,
    require_runnable,
    simulate,
    stuck,
)
from minimegatron.parallel.pipeline.schedules import SCHEDULES, build_schedule


@pytest.mark.parametrize(
    ("rows", "sentences"),
    [
        (["F0 B0", "F0"], ["rank 1 never does B0"]),
        (["F0 F1 B0 B1", "F0 F1 B0"], ["rank 1 never does B1"]),
        (["F0 F1 B0 B1", "F0 B0"], ["rank 1 never does F1 and B1"]),
        (["F0 F1 B0 B1 B0", "F0 B0 F1 B1"], ["rank 0 does B0 2 times (places 2 and 4 of its list)"]),
        (["B0 F0", "F0 B0"], ["rank 0 does B0 before its own F0, which it needs"]),
        (["F0 B0 W0", "F0 W0 B0"], ["rank 1 does W0 before its own B0, which it needs"]),
        (["F0.1 B0", "F0 B0"], ["rank 0 does F0.1, but has only chunk 0"]),
        (["", ""], ["no rank does anything"]),
        (
            ["F0 B0 F1 B1", "F0 F1 B0 B1"],
            [
                "deadlock: rank 0, before B0, waits for the gradient of microbatch 0 that rank 1 makes in B0, which "
                "rank 1 does after F1; rank 1, before F1, waits for the activation of microbatch 1 that rank 0 makes "
                "in F1, which rank 0 does after B0"
            ],
        ),
        (
            ["F0 F1 F2 B0 B1 B2", "F0 F1 B1 F2 B0 B2", "F0 F1 F2 B0 B1 B2"],
            [
                "deadlock: rank 1, before B1, waits for the gradient of microbatch 1 that rank 2 makes in B1, which "
                "rank 2 does after F2; rank 2, before F2, waits for the activation of microbatch 2 that rank 1 makes "
                "in F2, which rank 1 does after B1"
            ],
        ),
    ],
    ids=lambda x: None if isinstance(x[0], str) and " " in x[0] and len(x) == 1 else str(x)[:30],
)
def test_what_is_wrong_is_said(rows: list[str], sentences: list[str]) -> None:
    assert check(schedule_from_text("mine", rows)) == sentences


def test_the_circle_of_a_deadlock_comes_as_data_too() -> None:
    wrong = schedule_from_text("wrong", ["F0 B0 F1 B1", "F0 F1 B0 B1"])
    assert stuck(wrong) == ([1, 1], [(0, 1, 1, 2), (1, 1, 0, 2)])
    behind = schedule_from_text("behind", ["F0 F1 B0 B1", "F0 B0 F1 B1", "F0 F1 B0 B1"])
    at, circle = stuck(behind)
    assert at == [2, 1, 1] and [(wait[0], wait[2]) for wait in circle] == [(1, 2), (2, 1)], (
        "rank 0 waits, but in no circle"
    )
    for name in SCHEDULES:
        at, circle = stuck(build_schedule(name, 4, 8))
        assert not circle and at == [len(row) for row in build_schedule(name, 4, 8).actions]


def test_a_rank_of_a_v_can_wait_for_itself() -> None:
    rows = ["F0.1 F0.0 B0.1 B0.0"]
    assert check(schedule_from_text("mine", rows, v_shaped(1))) == [
        "rank 0 does F0.1 before its own F0.0, which it needs"
    ]
    # through the other rank: 0 wants its second stage's input, which comes back from rank 1
    rows = ["F0.0 F0.1 B0.1 B0.0", "F0.0 B0.1 F0.1 B0.0"]
    found = check(schedule_from_text("mine", rows, v_shaped(2)))
    assert found == ["rank 1 does B0.1 before its own F0.1, which it needs"]


def test_a_schedule_that_cannot_run_is_refused_before_it_runs() -> None:
    wrong = schedule_from_text("mine", ["F0 B0 F1 B1", "F0 F1 B0 B1"])
    for use in (require_runnable, simulate):
        with pytest.raises(ConfigError, match="`mine` cannot run: deadlock: rank 0, before B0, waits"):
            use(wrong)
    many = schedule_from_text("mine", ["F0 F0", "F1 F1", "F2 F2", "F3 F3"])
    with pytest.raises(ConfigError, match="and 3 more"):
        require_runnable(many)
    with pytest.raises(ConfigError, match="does X0.0, which is none of F, B, W; .* microbatches count from 0"):
        require_runnable(Schedule("mine", ((Action("X", 0), Action("F", -1)),), ((0,),)))


def test_live_activations_are_counted_during_each_action() -> None:
    schedule = schedule_from_text("mine", ["F0 F1 B0 W0 B1", "F0 B0 F1 B1 W1"])
    assert live_activations(schedule) == [[1, 2, 2, 2, 1], [1, 1, 1, 1, 1]]
    assert live_activations(build_schedule("gpipe", 2, 3))[0] == [1, 2, 3, 3, 2, 1]


@pytest.mark.parametrize(
    ("p", "m", "v", "peaks"),
    [  # of 1F1B and interleaved 1F1B, min(T, warm-up + 1)
        (4, 8, 1, [4, 3, 2, 1]), (4, 8, 2, [11, 9, 7, 5]), (4, 8, 4, [19, 17, 15, 13]), (2, 4, 2, [5, 3]),
        (8, 32, 1, [8, 7, 6, 5, 4, 3, 2, 1]), (8, 32, 2, [23, 21, 19, 17, 15, 13, 11, 9]),
        (8, 32, 4, [39, 37, 35, 33, 31, 29, 27, 25]), (3, 9, 3, [11, 9, 7]), (4, 4, 2, [8, 8, 7, 5]),
        (4, 12, 3, [15, 13, 11, 9]),
    ],
)  # fmt: skip
def test_peaks_of_1f1b(p: int, m: int, v: int, peaks: list[int]) -> None:
    assert peak_live(build_schedule("interleaved" if v > 1 else "1f1b", p, m, v)) == peaks


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_peaks_of_the_others_are_as_published(p: int) -> None:
    for m in range(1, 3 * p + 2):
        assert peak_live(build_schedule("gpipe", p, m)) == [m] * p
        assert max(peak_live(build_schedule("zb_h1", p, m))) == min(m, p), "no more than rank 0 of 1F1B"
        zb_v, dual = peak_live(build_schedule("zb_v", p, m)), peak_live(build_schedule("dualpipe_v", p, m))
        assert max(zb_v) <= 2 * p, "p activations of a whole rank, as 1F1B"
        assert max(dual) <= 2 * p + 1
        if m > 2 * p:
            assert (zb_v, dual) == ([2 * p] * p, [2 * p + 1] * p), "and every rank has the same"


# ------------------------------------------------------------------------------------------------------------


def mutate(rows: list[list[Action]], how: str, rng: random.Random) -> None:
    """Change the lists in place; `how` is one of swap, drop, duplicate, move."""
    row = rng.choice([row for row in rows if len(row) > 1])
    i, j = rng.sample(range(len(row)), 2)
    if how == "swap":
        row[i], row[j] = row[j], row[i]
    elif how == "drop":
        del row[i]
    elif how == "duplicate":
        row.insert(j, row[i])
    else:
        row.insert(j, row.pop(i))


def can_run(rows: list[list[Action]], original: Schedule) -> bool:
    """Judged without the checker: the same actions as the original's (a W less is B undivided), and no circle.

    One graph: an edge from each action of a list to the next, and from what stages hand over.
    """
    for mine, theirs in zip(rows, original.actions, strict=True):
        lacking, extra = Counter(theirs) - Counter(mine), Counter(mine) - Counter(theirs)
        if extra or any(a.kind != "W" for a in lacking):
            return False
    graph: dict[tuple[str, int, int], set[tuple[str, int, int]]] = {}
    for rank, row in enumerate(rows):
        nodes = [(a.kind, a.microbatch, original.placement[rank][a.chunk]) for a in row]
        for before, (kind, i, stage) in zip([None, *nodes], nodes, strict=False):
            needs = {before} if before else set()
            needs |= {("F", i, stage - 1)} if kind == "F" and stage else set()
            needs |= {("F", i, stage)} if kind == "B" else set()
            needs |= {("B", i, stage + 1)} if kind == "B" and stage + 1 < original.stages else set()
            needs |= {("B", i, stage)} if kind == "W" else set()
            graph[kind, i, stage] = needs
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError:
        return False
    return True


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("how", ["swap", "drop", "duplicate", "move"])
def test_mutations_are_refused_or_are_as_good(name: str, how: str) -> None:
    rng = random.Random(f"{name} {how}")
    verdicts = Counter()
    for _ in range(50):
        p, m = rng.choice([(2, 4), (3, 6), (4, 8), (4, 4)])
        original = build_schedule(name, p, m)
        rows = [list(row) for row in original.actions]
        mutate(rows, how, rng)
        mutant = Schedule("mutant", tuple(map(tuple, rows)), original.placement)
        problems = check(mutant)
        assert (problems == []) == can_run(rows, original), f"{mutant}\n{problems}"
        if not problems:
            assert len(simulate(mutant).spans) == p
        verdicts[not problems] += 1
    assert verdicts[False] >= 20, "most mutations break a schedule"
    if how in ("swap", "move"):
        assert verdicts[True] >= 1, "and some do not"
