"""Schedules on paper: what the checker refuses, and that the simulator gives the closed forms with ==."""

from __future__ import annotations

import graphlib
import json
import random
from collections import Counter
from fractions import Fraction

import pytest

from minimegatron.errors import ConfigError
from minimegatron.parallel.pipeline.actions import Action, Schedule, schedule_from_text, v_shaped
from minimegatron.parallel.pipeline.schedule_check import check, require_runnable, stuck
from minimegatron.parallel.pipeline.schedule_sim import Costs, Simulation, live_activations, peak_live, simulate
from minimegatron.parallel.pipeline.schedules import (
    SCHEDULES,
    build_schedule,
)
from minimegatron.viz.timeline import chrome_trace
from tests.thorough import mostly_thorough


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
@pytest.mark.parametrize("how", mostly_thorough(["swap", "drop", "duplicate", "move"], [0, 3]))
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


def run(name: str, p: int, m: int, v: int | None = None, costs: Costs | None = None) -> Simulation:
    """With the costs of a whole rank, divided over its chunks."""
    schedule = build_schedule(name, p, m, v)
    return simulate(schedule, (costs or Costs()).divided(schedule.v))


@pytest.mark.parametrize("costs", [Costs(), Costs(5, 7, 3), Costs(2, 1, 9)])
@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_bubbles_whatever_an_action_costs(p: int, costs: Costs) -> None:
    f, b, w = (Fraction(c) for c in (costs.forward, costs.backward_input, costs.backward_weight))
    for m in (p, 2 * p, 3 * p):
        for name in ("gpipe", "1f1b"):
            assert run(name, p, m, costs=costs).makespan == (m + p - 1) * (f + b + w)
        for v in (2, 3, 4) if p > 1 else ():
            assert run("interleaved", p, m, v, costs).bubble == Fraction(p - 1, m * v)
        zb_h1 = run("zb_h1", p, m, costs=costs)
        if m >= 2 * p - 1:
            assert zb_h1.makespan == m * (f + b + w) + (p - 1) * max(f, b, f + b - w)


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_the_zero_bubble_family_with_equal_costs(p: int) -> None:
    for m in (2 * p, 2 * p + 1, 3 * p):
        h1, vee, dual = (run(name, p, m) for name in ("zb_h1", "zb_v", "dualpipe_v"))
        assert h1.bubble == Fraction(p - 1, 3 * m), "a third of 1F1B's"
        assert vee.makespan == dual.makespan == 3 * m + Fraction(p - 1, 2)
        assert vee.inner_bubbles == [0] * p, "once it has started, no rank is idle"
        assert [row[0].start for row in vee.spans] == [Fraction(r, 2) for r in range(p)]


def test_costs_per_stage() -> None:
    slow = Costs(forward=[1, 1, 5, 1], backward_input=[1, 1, 5, 1], backward_weight=[1, 1, 5, 1])
    found = simulate(build_schedule("1f1b", 4, 10), slow)
    # the slow stage is the clock; before its first and after its last action the others fill and drain
    assert found.makespan == 10 * 15 + 2 * (1 + 2)
    assert found.busy == [30, 30, 150, 30]
    assert found.bubbles[2] == Fraction(6, 150)
    with pytest.raises(ConfigError, match="3 costs for the 4 stages"):
        simulate(build_schedule("1f1b", 4, 10), Costs(forward=[1, 2, 3]))
    with pytest.raises(ConfigError, match="already costs of chunks"):
        slow.divided(2)


def test_latency_counts_between_ranks_only() -> None:
    costs = Costs(latency=10)
    assert simulate(build_schedule("gpipe", 2, 1), costs).makespan == 1 + 10 + 1 + 2 + 10 + 2
    assert simulate(build_schedule("zb_v", 1, 1), costs).makespan == 2 * 3, "a V hands over to itself at its bottom"


def test_no_start_is_too_early_and_none_is_late() -> None:
    rng = random.Random(0)
    for name, entry in SCHEDULES.items():
        p, m = rng.choice([(2, 4), (3, 6), (4, 8)])
        schedule = build_schedule(name, p, m, entry.chunks or 2)
        costs = Costs(*([rng.randint(1, 9) for _ in range(schedule.stages)] for _ in range(3)), latency=3)
        found = simulate(schedule, costs)
        ends = {(s.rank, s.action): s.end for row in found.spans for s in row}
        for row in found.spans:
            for before, span in zip([None, *row], row, strict=False):
                ready = [ends[n] + 3 * (n[0] != span.rank) for n in schedule.needs(span.rank, span.action)]
                assert span.start == max([before.end if before else 0, *ready])
                assert span.end - span.start == costs.of(schedule, span.rank, span.action)


def test_events_are_those_of_a_run(tmp_path) -> None:
    events = simulate(build_schedule("interleaved", 2, 2, 2)).events(unit=0.01)
    assert [(e.name, e.note) for e in events if e.rank == 1][:3] == [("F", "0.0"), ("F", "1.0"), ("F", "0.1")]
    first = events[0]
    assert (first.kind, first.rank, first.start, first.end) == ("compute", 0, 0.0, 0.01)
    plain = simulate(schedule_from_text("mine", ["F0 B0"])).events()
    assert [(e.name, e.note, e.start, e.end) for e in plain] == [("F", "0", 0, 1), ("B", "0", 1, 3)]
    records = json.loads(chrome_trace(events, tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(r["ph"] == "X" for r in records) == len(events) == 16
