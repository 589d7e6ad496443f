"""Lab 03's checks: what they take for right beside the package; answers that take it from there."""

from __future__ import annotations

from fractions import Fraction
from importlib import import_module
from typing import Any

import pytest

from labkit.exercises import Draw
from labkit.fresh import Nursery
from minimegatron.parallel.pipeline import schedules
from minimegatron.parallel.pipeline.schedule_sim import Costs, peak_live, simulate
from tests.course.marked import LABS, said

LAB = LABS["03_pipeline_1f1b"]
SCHEDULES = import_module("course.03_pipeline_1f1b.checks.schedules")
PREDICTED = import_module("course.03_pipeline_1f1b.checks.predicted")
WARM_UP = import_module("course.03_pipeline_1f1b.checks.warm_up")


# Others of the kind are among the lab's wrong answers (`test_answers`).
@pytest.mark.parametrize(
    ("exercise", "how", "words"),
    [
        ("zb_h1", "imports", "`minimegatron.parallel.pipeline.schedules` is closed"),
        ("one_f_one_b", "reads", "may not read"),
    ],
)
def test_the_packages_own_generators_are_closed(nursery: Nursery, exercise: str, how: str, words: str) -> None:
    verdict = LAB.check(nursery, exercise, LAB.source(f"{exercise}: {how} the package"))
    assert (verdict.state, verdict.points) == ("wrong", 0) and words in said(verdict), verdict


@pytest.mark.parametrize("sizes", SCHEDULES._SOME, ids=str)
def test_the_interleaved_lists_that_are_asked_for_are_the_packages(sizes: dict[str, int]) -> None:
    want = schedules.interleaved(**sizes)
    assert SCHEDULES._as_asked(**sizes).actions == want.actions
    assert (
        SCHEDULES._WARM(want, sizes) is SCHEDULES._FASTER(want, sizes) is SCHEDULES._hides_messages(want, sizes) is None
    )


def test_half_the_warm_up_is_as_fast_while_messages_are_free_and_slower_when_they_are_not() -> None:
    sizes = {"p": 4, "m": 8, "v": 2}
    table = schedules.interleaved_table(8, 2, 4)
    back = [(i, 1 - c) for i, c in table]
    rows = tuple(schedules.alternate(table, back, 3 - rank + 4) for rank in range(4))
    half = schedules.Schedule("half", rows, schedules.round_robin(4, 2))
    assert SCHEDULES._FASTER(half, sizes) is None
    assert "when messages take time (0.1 of" in str(SCHEDULES._hides_messages(half, sizes))


@pytest.mark.parametrize("sizes", [*WARM_UP._RUNS, *(WARM_UP._borders(Draw(seed)) for seed in range(12))], ids=str)
def test_the_warm_up_asked_for_is_as_fast_as_gpipe_and_one_forward_less_is_not(sizes: dict[str, Any]) -> None:
    least = WARM_UP.enough(**sizes)
    assert WARM_UP._time(least, **sizes) is None and least[-1] == 0
    for rank in range(len(least) - 1):
        shorter = [w - (r == rank) for r, w in enumerate(least)]
        assert WARM_UP._time(shorter, **sizes), (rank, least)
    for rank in range(len(least)):  # and no longer list hides behind a longer one
        assert WARM_UP._time([w + (r <= rank) for r, w in enumerate(least)], **sizes) is None


@pytest.mark.parametrize(("p", "m"), [(2, 3), (4, 8), (5, 20)])
@pytest.mark.parametrize("late", [0, 1, 7, 20])
def test_lists_over_borders_are_played_as_the_simulator_plays_them(p: int, m: int, late: int) -> None:
    slots = [(i, 0) for i in range(m)]
    for warmups in ([m] * p, WARM_UP.enough(10, 20, [late] * (p - 1)), list(range(p))[::-1]):
        rows = tuple(schedules.alternate(slots, slots, min(m, warmup)) for warmup in warmups)
        lists = schedules.Schedule("x", rows, schedules.round_robin(p, 1))
        want = simulate(lists, Costs(10, 10, 10, latency=late)).makespan
        assert WARM_UP.makespan(warmups, m, 10, 20, [late] * (p - 1)) == want
        if warmups[0] == m:
            assert want == (p - 1) * (30 + 2 * late) + 30 * m, "GPipe's"


def test_of_two_ranks_that_keep_each_other_waiting_the_pair_is_named() -> None:
    said = str(WARM_UP._time([4, 3, 2, 0], 10, 20, [1, 1, 1]))
    assert "Ranks 1 and 2 keep each other waiting: these two alone need 31 ms" in said
    said = str(WARM_UP._time([1, 2, 0], 10, 20, [0, 0]))
    assert "deadlock. Rank 1 does 3 forwards before its first backward, rank 0 only 2" in said


@pytest.mark.parametrize("sizes", SCHEDULES._FEW + SCHEDULES._MANY, ids=str)
def test_the_bounds_are_what_the_packages_lists_reach(sizes: dict[str, int]) -> None:
    one, zb = schedules.one_f_one_b(**sizes), schedules.zb_h1(**sizes)
    assert simulate(one, Costs()).makespan == 3 * (sizes["m"] + sizes["p"] - 1)
    assert SCHEDULES._TIME(one, sizes) is SCHEDULES._MEMORY(one, sizes) is SCHEDULES._AS_BEFORE(zb, sizes) is None
    assert SCHEDULES._third_if_many(zb, sizes) is None
    assert max(peak_live(zb)) == min(sizes["m"], sizes["p"])


def test_the_fewest_microbatches_are_counted_out() -> None:
    for p in range(1, 10):
        for v in range(1, 5):
            step = p if v > 1 else 1
            few = next(n for n in range(0, 1000, step) if Fraction(p - 1) <= Fraction(v * n, 20))
            assert PREDICTED._fewest(p, v) == few


@pytest.mark.parametrize(
    ("exercise", "old", "new", "mistake"),
    [("one_f_one_b", "p - rank - 1", "rank", "Rank r warms up with r forwards"), ("interleaved", "v - 1 - c", "c", "")],
)
def test_why_lists_cannot_run_is_said_once(nursery: Nursery, exercise: str, old: str, new: str, mistake: str) -> None:
    verdict = LAB.check(nursery, exercise, LAB.solutions[exercise].replace(old, new))
    notes = [row.note for row in verdict.rows if row.note]
    assert len(notes) == 5 and sum("deadlock" in note for note in notes) == 1, verdict
    assert "deadlock" in verdict.rows[0].note and "see above" in verdict.rows[1].note
    assert verdict.mistake.startswith(mistake)


def test_a_row_of_its_own_sizes_says_why_where_the_rows_above_run(nursery: Nursery) -> None:
    without = LAB.solutions["one_f_one_b"].replace("min(m, p - rank - 1)", "p - rank - 1")
    first, many, few, *_ = LAB.check(nursery, "one_f_one_b", without).rows
    assert (first.points, many.points, few.points) == (1, 1, 0) and "is no action" in few.note


def test_the_row_about_activations_says_nothing_about_steps(nursery: Nursery) -> None:
    at_once = LAB.solutions["zb_h1"].replace("if i >= rank:", "if True:").replace("W{i - rank}", "W{i}")
    verdict = LAB.check(nursery, "zb_h1", at_once.replace("range(max(0, m - rank), m)", "[]"))
    time, memory = verdict.rows[-2:]
    assert "steps" in time.note and "steps" not in memory.note, verdict
    assert "counts only for a list as fast as the row above asks" in memory.note


@pytest.mark.parametrize("p", range(1, 9))
def test_no_w_is_in_the_way_of_lists_that_are_as_fast_as_asked(p: int) -> None:
    for m in (p, p + 1, 2 * p, 3 * p):
        assert SCHEDULES._in_the_way(simulate(schedules.zb_h1(p, m))) == ""
        assert SCHEDULES._in_the_way(simulate(schedules.one_f_one_b(p, m))) == ""


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        # every W at once: rank 1's W0 makes B1 late, with B0, W0, F1 and B1 in one piece
        (["F0 F1 B0 W0 B1 W1", "F0 B0 W0 F1 B1 W1"],
         "rank 0 waits from step 5 to 6 for the input of B1: rank 1, which sends it, does W0 first"),
        # every W at the end
        (["F0 F1 B0 B1 W0 W1", "F0 B0 F1 B1 W0 W1"],
         "rank 0 waits from step 4 to 5 for the input of B1: rank 0 could do W0 meanwhile, but its list has it later"),
        # both
        (["F0 F1 B0 B1 W0 W1", "F0 B0 W0 F1 B1 W1"],
         "rank 0 waits from step 4 to 6 for the input of B1: rank 1, which sends it, does W0 first, and "
         "rank 0 could do W0 meanwhile, but its list has it later"),
        # rank 1 has done W0 too, but then waits for F1: its W0 makes nothing late
        (["F0 B0 F1 B1 W0 W1", "F0 B0 W0 F1 B1 W1"],
         "rank 0 waits from step 5 to 7 for the input of B1: rank 0 could do W0 meanwhile, but its list has it later"),
    ],
)  # fmt: skip
def test_a_slow_list_is_told_which_w_is_in_the_way(rows: list[str], why: str) -> None:
    assert SCHEDULES._in_the_way(simulate(schedules.schedule_from_text("x", rows))) == f". An example of it: {why}"


def test_a_stage_that_keeps_a_microbatch_is_told_so_at_once(nursery: Nursery) -> None:
    never = LAB.solutions["split_stage"].replace(".pop(microbatch)", "[microbatch]")
    verdict = LAB.check(nursery, "split_stage", never)
    assert [row.points for row in verdict.rows] == [1, 0, 1, 1] and "are still kept" in verdict.rows[1].note


def test_a_group_of_its_members_only_is_refused(nursery: Nursery) -> None:
    makes, leaves = (
        "    group = dist.new_group([0, dist.get_world_size() - 1])\n",
        "    if grad is None:\n        return None\n",
    )
    members = LAB.solutions["sync_tied"].replace(makes + leaves, leaves + makes)
    verdict = LAB.check(nursery, "sync_tied", members)
    assert verdict.points == 2 and "the next one would hang" in verdict.rows[2].note, verdict


def ends(schedule: schedules.Schedule) -> bool:
    """Whether all ranks end where each posts one word ahead and, before a send, waits for its last one of that kind,
    which is over when its receiver has posted."""
    steps = []
    for rank, row in enumerate(schedule.actions):
        sent: dict[str, object] = {}
        todo: list[tuple[str, object]] = [("post", schedule.input_of(rank, row[0]))]
        for at, action in enumerate(row):
            todo += [("post", schedule.input_of(rank, after)) for after in row[at + 1 : at + 2]]
            todo.append(("receive", schedule.input_of(rank, action)))
            if (out := schedule.output_of(rank, action)) is not None:
                todo += [("sent", sent.get(action.kind)), ("send", out)]
                sent[action.kind] = out
        steps.append([one for one in todo if one[1] is not None])
    done: set[tuple[str, object]] = set()
    at, before = [0] * schedule.p, [-1]
    while before != at:
        before = list(at)
        for rank, todo in enumerate(steps):
            while at[rank] < len(todo):
                what, message = todo[at[rank]]
                if {"receive": ("send", message), "sent": ("post", message)}.get(what, None) not in done | {None}:
                    break
                done.add((what, message))
                at[rank] += 1
    return at == [len(todo) for todo in steps]


@pytest.mark.parametrize("name", ["gpipe", "one_f_one_b", "zb_h1", "interleaved"])
def test_no_list_of_the_lab_waits_for_itself_where_sends_are_waited_for_before_the_next_of_their_kind(
    name: str,
) -> None:
    for p in range(2, 6):
        for m in (p, 2 * p, 5 * p):
            chunks = ({"v": 2}, {"v": 3}) if name == "interleaved" else ({},)
            assert all(ends(getattr(schedules, name)(p=p, m=m, **more)) for more in chunks), (p, m)
    assert not ends(schedules.schedule_from_text("wrong", ["F0 B0 F1 B1", "F0 F1 B0 B1"]))
