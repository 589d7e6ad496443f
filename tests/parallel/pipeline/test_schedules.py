"""The lists of actions: small ones by eye, all of them by rule, and in the order of Megatron and of torch.

torch plans every rank's list on any rank, so one process with a fake group is enough. Where the two differ:

* torch's interleaved schedule takes other groups when m is no multiple of p: m / (m // p) microbatches instead of N.
  With that N given, the lists are equal.
* torch's ZB-V and ours are the same plan; so is torch's interleaved zero bubble with one chunk a rank and our ZB-H1.
* torch's printed 1F1B counts the last rank's forwards from 1, though what it runs counts from 0: shifted, it is ours.
* torch marks pairs of DualPipeV as overlapped, and refuses fewer microbatches than stages. Read one after the other,
  the pairs are our list; for fewer microbatches ours is the plan for 2p without the microbatches that are not there.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from minimegatron.errors import ConfigError
from minimegatron.parallel.pipeline.actions import Action, Schedule, round_robin, schedule_from_text, straight, v_shaped
from minimegatron.parallel.pipeline.schedule_check import check
from minimegatron.parallel.pipeline.schedule_sim import peak_live, simulate
from minimegatron.parallel.pipeline.schedules import (
    SCHEDULES,
    build_schedule,
    forward_only,
    interleaved_table,
    interleaved_warmup,
)
from tests import golden
from tests.thorough import mostly_thorough

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


P = 4


@pytest.mark.parametrize("case", golden.load("slots")["cases"], ids=lambda c: f"p{c['p']}v{c['v']}m{c['m']}")
def test_slots_and_warmups_are_megatrons(case: dict[str, Any]) -> None:
    p, v, m, group = (case[key] for key in ("p", "v", "m", "group"))
    assert [list(slot) for slot in interleaved_table(m, v, group)] == case["table"]
    assert [min(m * v, interleaved_warmup(p, rank, v, group)) for rank in range(p)] == case["warmups"]
    name, options = ("interleaved", {"microbatch_group_size_per_vp_stage": group}) if v > 1 else ("1f1b", {})
    schedule = build_schedule(name, p, m, v, **options)
    for row, warmup in zip(schedule.actions, case["warmups"], strict=True):
        forward = [[a.microbatch, a.chunk] for a in row if a.kind == "F"]
        backward = [[a.microbatch, v - 1 - a.chunk] for a in row if a.kind == "B"]
        assert forward == backward == case["table"]
        steady = "FB" * (m * v - warmup)
        assert "".join(a.kind for a in row) == "F" * warmup + steady + "B" * warmup


@pytest.fixture(scope="module")
def four_fake_ranks() -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    assert not dist.is_initialized()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=P)
    yield
    dist.destroy_process_group()


def torch_plan(cls: str, stages: list[int], m: int) -> dict[int, list[Any]]:
    from torch.distributed.pipelining import PipelineStage, schedules

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mine = [PipelineStage(torch.nn.Linear(2, 2), i, P * len(stages), torch.device("cpu")) for i in stages]
        single = issubclass(getattr(schedules, cls), schedules.PipelineScheduleSingle)
        plan = getattr(schedules, cls)(
            mine[0] if single else mine, n_microbatches=m, loss_fn=lambda a, b: (a - b).sum()
        )
    return plan._get_pipeline_order() if single else plan.pipeline_order


def before(action: Any) -> Any:
    """The same action of the microbatch before."""
    return action._replace(microbatch_index=action.microbatch_index - 1)


def as_actions(plan: dict[int, list[Any]], schedule: Schedule) -> list[list[Action]]:
    """torch's list per rank in our terms: chunks for stages, I and B as one kind, pairs one after the other."""

    def flat(step: Any) -> list[Any]:
        return [] if step is None else list(step.sub_actions or [step])

    kinds = {"F": "F", "B": "B", "I": "B", "W": "W"}
    return [
        [
            Action(kinds[a.computation_type.value], a.microbatch_index, schedule.rank_of(a.stage_index)[1])
            for step in plan[rank]
            for a in flat(step)
            if a.computation_type.value in kinds
        ]
        for rank in range(P)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "stages", "name", "m"),
    mostly_thorough([
        *[("ScheduleGPipe", [0], "gpipe", m) for m in (4, 7)],
        *[("Schedule1F1B", [0], "1f1b", m) for m in (4, 8, 11)],
        *[("ScheduleInterleaved1F1B", [0, 4], "interleaved", m) for m in (4, 8, 12)],
        ("ScheduleInterleaved1F1B", [0, 4, 8], "interleaved", 8),
        *[("ScheduleInterleavedZeroBubble", [0], "zb_h1", m) for m in (4, 8, 12)],
        *[("ScheduleZBVZeroBubble", [0, 7], "zb_v", m) for m in (2, 4, 7, 8, 13)],
        *[("ScheduleDualPipeV", [0, 7], "dualpipe_v", m) for m in (8, 9, 14)],
    ], lambda case: case[-1] in (7, 8)),
)  # fmt: skip
def test_lists_are_torchs(four_fake_ranks: None, cls: str, stages: list[int], name: str, m: int) -> None:
    schedule = build_schedule(name, P, m, len(stages))
    theirs = torch_plan(cls, stages, m)
    if name == "1f1b":
        assert theirs[P - 1][P - 1].microbatch_index == 1, "torch now counts from 0: drop the shift"
        theirs[P - 1] = [a if a is None or a.computation_type.value != "F" else before(a) for a in theirs[P - 1]]
    assert [list(row) for row in schedule.actions] == as_actions(theirs, schedule)
    halves = {
        (a.stage_index, a.microbatch_index)
        for row in theirs.values()
        for a in row
        if a is not None and a.computation_type.value == "I"
    }
    assert halves == {(s, i) for s in range(schedule.stages) for i in range(m) if schedule.is_split(i, s)}


def test_torchs_interleaving_of_ten_microbatches_is_ours_with_groups_of_five(four_fake_ranks: None) -> None:
    schedule = build_schedule("interleaved", P, 10, 2, microbatch_group_size_per_vp_stage=5)
    theirs = torch_plan("ScheduleInterleaved1F1B", [0, 4], 10)
    assert [list(row) for row in schedule.actions] == as_actions(theirs, schedule)
