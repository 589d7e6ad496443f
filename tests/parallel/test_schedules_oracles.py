"""The order of every rank is Megatron's (interleaved) and that of torch.distributed.pipelining (all of them).

torch plans every rank's list on any rank, so one process with a fake group is enough. Where the two differ:

* torch's interleaved schedule takes other groups when m is no multiple of p: m / (m // p) microbatches instead of N.
  With that N given, the lists are equal.
* torch's ZB-V and ours are the same plan; so is torch's interleaved zero bubble with one chunk a rank and our ZB-H1.
* torch's printed 1F1B counts the last rank's forwards from 1, though what it runs counts from 0: shifted, it is ours.
* torch marks pairs of DualPipeV as overlapped, and refuses fewer microbatches than stages. Read one after the other,
  the pairs are our list; for fewer microbatches ours is the plan for 2p without the microbatches that are not there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minimegatron.parallel.pipeline.actions import Action, Schedule
from minimegatron.parallel.pipeline.schedules import build_schedule, interleaved_table, interleaved_warmup
from tests import golden

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


@pytest.mark.parametrize(
    ("cls", "stages", "name", "m"),
    [
        *[("ScheduleGPipe", [0], "gpipe", m) for m in (4, 7)],
        *[("Schedule1F1B", [0], "1f1b", m) for m in (4, 8, 11)],
        *[("ScheduleInterleaved1F1B", [0, 4], "interleaved", m) for m in (4, 8, 12)],
        ("ScheduleInterleaved1F1B", [0, 4, 8], "interleaved", 8),
        *[("ScheduleInterleavedZeroBubble", [0], "zb_h1", m) for m in (4, 8, 12)],
        *[("ScheduleZBVZeroBubble", [0, 7], "zb_v", m) for m in (2, 4, 7, 8, 13)],
        *[("ScheduleDualPipeV", [0, 7], "dualpipe_v", m) for m in (8, 9, 14)],
    ],
)
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
