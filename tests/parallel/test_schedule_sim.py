"""The simulator gives the closed forms, with ==."""

from __future__ import annotations

import json
import random
from fractions import Fraction

import pytest

from minimegatron.errors import ConfigError
from minimegatron.parallel.pipeline.actions import Schedule, round_robin, schedule_from_text
from minimegatron.parallel.pipeline.schedule_sim import Costs, Simulation, simulate
from minimegatron.parallel.pipeline.schedules import (
    SCHEDULES,
    alternate,
    build_schedule,
    forward_only,
    interleaved_table,
)
from minimegatron.viz.timeline import chrome_trace


def run(name: str, p: int, m: int, v: int | None = None, costs: Costs | None = None) -> Simulation:
    """With the costs of a whole rank, divided over its chunks."""
    schedule = build_schedule(name, p, m, v)
    return simulate(schedule, (costs or Costs()).divided(schedule.v))


@pytest.mark.parametrize(
    ("p", "m", "v", "makespan"),
    [
        (4, 8, 1, 33), (4, 8, 2, Fraction(57, 2)), (4, 8, 4, Fraction(105, 4)), (2, 4, 2, Fraction(27, 2)),
        (8, 32, 1, 117), (8, 32, 2, Fraction(213, 2)), (8, 32, 4, Fraction(405, 4)), (3, 9, 3, 29),
        (4, 4, 2, Fraction(33, 2)), (4, 12, 3, 39),
    ],
)  # fmt: skip
def test_makespans_of_the_table(p: int, m: int, v: int, makespan: Fraction) -> None:
    found = run("interleaved" if v > 1 else "1f1b", p, m, v)
    assert found.makespan == makespan
    assert found.bubble == Fraction(p - 1, m * v)
    assert found.bubbles == [Fraction(p - 1, m * v)] * p


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


def test_zero_bubble_beats_1f1b_by_a_fifth() -> None:
    plain = run("1f1b", 8, 24).makespan
    assert plain == 93
    assert plain / run("zb_v", 8, 24).makespan == Fraction(186, 151)  # 1.23
    assert plain / run("zb_h1", 8, 24).makespan == Fraction(93, 79)  # 1.18


def with_factor(p: int, m: int, v: int, factor: int) -> Schedule:
    table = interleaved_table(m, v, p)
    back = [(i, v - 1 - c) for i, c in table]
    rows = [alternate(table, back, factor * (p - r - 1) + (v - 1) * p) for r in range(p)]
    return Schedule(f"warm-up factor {factor}", tuple(rows), round_robin(p, v))


@pytest.mark.parametrize(
    ("p", "m", "v", "share", "excesses"),
    [  # latency as a share of a chunk's forward; excess over the work with warm-up factor 1 and 2
        (8, 32, 4, Fraction(1, 10), (0.118, 0.071)),
        (8, 32, 4, Fraction(1, 2), (0.370, 0.135)),
        (4, 16, 1, Fraction(1, 2), (0.479, 0.250)),
        (8, 32, 4, Fraction(0), (0.0547, 0.0547)),
    ],
)
def test_a_longer_warm_up_hides_latency(p: int, m: int, v: int, share: Fraction, excesses: tuple) -> None:
    costs = Costs(latency=share / v).divided(v)
    found = [simulate(with_factor(p, m, v, factor), costs).bubble for factor in (1, 2)]
    assert [round(float(x), 3) for x in found] == [round(x, 3) for x in excesses]


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


def test_evaluation_takes_forwards_only() -> None:
    assert simulate(forward_only(4, 8)).makespan == 8 + 3


def test_events_are_those_of_a_run(tmp_path) -> None:
    events = simulate(build_schedule("interleaved", 2, 2, 2)).events(unit=0.01)
    assert [(e.name, e.note) for e in events if e.rank == 1][:3] == [("F", "0.0"), ("F", "1.0"), ("F", "0.1")]
    first = events[0]
    assert (first.kind, first.rank, first.start, first.end) == ("compute", 0, 0.0, 0.01)
    plain = simulate(schedule_from_text("mine", ["F0 B0"])).events()
    assert [(e.name, e.note, e.start, e.end) for e in plain] == [("F", "0", 0, 1), ("B", "0", 1, 3)]
    records = json.loads(chrome_trace(events, tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(r["ph"] == "X" for r in records) == len(events) == 16
