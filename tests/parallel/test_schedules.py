"""The generated lists: small ones by eye, all of them by rule."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.errors import ConfigError
from minimegatron.parallel.pipeline.actions import Action, Schedule, round_robin, schedule_from_text, straight, v_shaped
from minimegatron.parallel.pipeline.schedule_sim import check, peak_live, simulate
from minimegatron.parallel.pipeline.schedules import SCHEDULES, build_schedule, forward_only, interleaved, one_f_one_b

sizes = st.tuples(st.integers(1, 6), st.integers(1, 14))


def rows(schedule: Schedule) -> list[str]:
    return [" ".join(map(schedule.label, row)) for row in schedule.actions]


def test_small_ones_by_eye() -> None:
    assert rows(build_schedule("gpipe", 2, 2)) == ["F0 F1 B0 B1"] * 2
    assert rows(build_schedule("1f1b", 3, 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]
    assert rows(build_schedule("1f1b", 3, 1)) == ["F0 B0"] * 3
    assert rows(build_schedule("interleaved", 2, 4, 2))[0] == (
        "F0.0 F1.0 F0.1 F1.1 F2.0 B0.1 F3.0 B1.1 F2.1 B0.0 F3.1 B1.0 B2.1 B3.1 B2.0 B3.0"
    )
    assert rows(build_schedule("zb_h1", 2, 3)) == ["F0 F1 B0 W0 F2 B1 W1 B2 W2", "F0 B0 F1 B1 W0 F2 B2 W1 W2"]
    assert rows(forward_only(2, 3)) == ["F0 F1 F2"] * 2
    assert rows(forward_only(2, 3, v_shaped(2))) == ["F0.0 F1.0 F0.1 F1.1 F2.0 F2.1"] * 2


def test_placements() -> None:
    assert straight(3) == ((0,), (1,), (2,))
    assert round_robin(2, 3) == ((0, 2, 4), (1, 3, 5))
    assert v_shaped(3) == ((0, 5), (1, 4), (2, 3))
    schedule = build_schedule("zb_v", 3, 6)
    assert [schedule.rank_of(stage) for stage in range(6)] == [(0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1)]
    assert all(schedule.stage_of(*schedule.rank_of(stage)) == stage for stage in range(6))


def test_what_a_schedule_says_of_itself() -> None:
    schedule = build_schedule("zb_h1", 2, 3)
    assert (schedule.p, schedule.v, schedule.m, schedule.stages) == (2, 1, 3, 2)
    assert schedule.splits and schedule.is_split(2, 1) and not schedule.is_split(3, 1)
    assert not build_schedule("1f1b", 2, 3).splits
    assert forward_only(2, 2).forward_only and not schedule.forward_only
    dual = build_schedule("dualpipe_v", 2, 4)
    assert dual.splits and not dual.is_split(2, 3), "DualPipeV splits only at both ends"
    assert str(build_schedule("gpipe", 1, 1)) == "gpipe: p=1 v=1 m=1\nrank 0: F0 B0"
    assert str(Action("B", 3, 1)) == "B3.1" and Action.parse("B3.1") == Action("B", 3, 1)
    assert Action.parse("W12") == Action("W", 12, 0)


def test_messages_are_in_the_order_in_which_they_are_made() -> None:
    schedule = schedule_from_text("mine", ["F1 F0 B1 B0", "F1 B1 F0 B0"])
    assert [str(m.kind) + str(m.microbatch) for m in schedule.messages(0, 1)] == ["F1", "F0"]
    assert [(m.kind, m.microbatch, m.to_stage) for m in schedule.messages(1, 0)] == [("B", 1, 0), ("B", 0, 0)]
    v = build_schedule("zb_v", 2, 3)
    # rank 1 holds stages 1 and 2, the bottom of the V: it sends itself nothing
    assert {(m.kind, m.to_stage) for m in v.messages(1, 0)} == {("F", 3), ("B", 0)}
    assert v.messages(1, 1) == []
    ring = build_schedule("interleaved", 2, 2, 2)
    assert {(m.kind, m.to_stage) for m in ring.messages(0, 1)} == {("F", 1), ("F", 3), ("B", 1)}


@pytest.mark.parametrize("name", SCHEDULES)
@settings(deadline=None, max_examples=40)
@given(sizes=sizes, v=st.integers(1, 4), extra=st.integers(0, 5))
def test_whatever_is_generated_runs(name: str, sizes: tuple[int, int], v: int, extra: int) -> None:
    p, m = sizes
    options = {"microbatch_group_size_per_vp_stage": p + extra} if name == "interleaved" else {}
    chunks = SCHEDULES[name].chunks or v
    try:
        schedule = build_schedule(name, p, m, chunks, **options)
    except ConfigError as refusal:
        n = p + extra
        assert name == "interleaved" and v > 1 and (p == 1 or not p <= n <= m or 0 < m % n < p), refusal
        return
    assert check(schedule) == []
    assert (schedule.p, schedule.m, schedule.v) == (p, m, chunks)
    assert schedule.placement == SCHEDULES[name].place(p, chunks)
    whole = simulate(schedule)
    assert whole.peak_live == peak_live(schedule)
    assert all(len(row) == len(spans) for row, spans in zip(schedule.actions, whole.spans, strict=True))
    edges = [(a, b) for a in range(p) for b in range(p)]
    sent = sum(len(schedule.messages(*edge)) for edge in edges)
    hand_over_to_itself = name in ("zb_v", "dualpipe_v") or p == 1
    assert sent == 2 * m * (schedule.stages - 1 - (1 if hand_over_to_itself and chunks == 2 else 0))


@settings(deadline=None, max_examples=40)
@given(sizes=sizes, v=st.integers(1, 3), vee=st.booleans())
def test_forward_only_runs_on_every_placement(sizes: tuple[int, int], v: int, vee: bool) -> None:
    p, m = sizes
    schedule = forward_only(p, m, v_shaped(p) if vee else round_robin(p, v))
    assert check(schedule) == []
    assert peak_live(schedule) == [1] * p


def test_1f1b_is_interleaved_with_one_chunk() -> None:
    for p in range(1, 5):
        for m in range(1, 9):
            assert interleaved(p, m, 1).actions == one_f_one_b(p, m).actions


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("1F1B", 2, 4), "no schedule `1F1B`.*fix: did you mean `1f1b`"),
        (("megatron", 2, 4), "fix: there are gpipe, 1f1b, interleaved, zb_h1, zb_v, dualpipe_v"),
        (("1f1b", 2, 4, 2), "1 chunk on every rank, not 2.*fix: take one of interleaved, zb_v, dualpipe_v"),
        (("zb_v", 2, 4, 3), "2 chunks on every rank, not 3.*set the number of virtual stages to 2"),
        (("gpipe", 0, 4), "0 ranks"),
        (("gpipe", 2, 0), "0 microbatches"),
        (("interleaved", 4, 3, 2), "p <= group <= m.*fix: raise the number of microbatches from 3 to at least 4"),
        (("interleaved", 4, 9, 2), "last group of 1, fewer than the 4 ranks.*e.g. 8 or 12.*one of 5, 9"),
        (("interleaved", 1, 4, 2), "only rank"),
    ],
)
def test_refusals_say_the_rule_and_the_fix(arguments: tuple, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        build_schedule(*arguments)
    assert re.search(says, str(refusal.value), re.DOTALL), refusal.value


def test_options_and_shapes_are_checked() -> None:
    with pytest.raises(ConfigError, match="groups of 3"):
        build_schedule("interleaved", 4, 8, 2, microbatch_group_size_per_vp_stage=3)
    with pytest.raises(ConfigError, match="did you mean `microbatch_group_size_per_vp_stage`"):
        build_schedule("interleaved", 4, 8, 2, microbatch_group_size=4)
    with pytest.raises(ConfigError, match="`zb_h1` has no option `v_min`"):
        build_schedule("zb_h1", 4, 8, v_min=4)
    with pytest.raises(ConfigError, match="`G0` is no action"):
        schedule_from_text("mine", ["G0"])
    with pytest.raises(ConfigError, match="lists for 1 ranks and a placement of 2"):
        Schedule("mine", ((),), straight(2))
    with pytest.raises(ConfigError, match="does not put stages 0 to 1 on 2 ranks"):
        Schedule("mine", ((), ()), ((0,), (0,)))
