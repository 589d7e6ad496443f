"""The executors under NCCL's rules of order: a communicator for each edge never deadlocks, one for a group does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from minimegatron.errors import ConfigError
from minimegatron.parallel.pipeline import overlapped
from minimegatron.parallel.pipeline import plain as pipeline
from minimegatron.parallel.pipeline.schedule_check import check
from minimegatron.parallel.pipeline.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    build_schedule,
    forward_only,
    round_robin,
    straight,
    v_shaped,
)
from tests.parallel.pipeline.nccl_order import HEADERS, KNOWN, ahead, programs, stuck


def shipped(p: int) -> Iterator[Schedule]:
    """The six schedules in several sizes, interleaved also with every group size up to 2p + 1."""
    for name in SCHEDULES:
        for v in (2, 3) if name == "interleaved" else (None,):
            for m in sorted({p, p + 1, 2 * p, 3 * p}):
                for group in range(p, 2 * p + 2) if name == "interleaved" else (None,):
                    options = {} if group is None else {"microbatch_group_size_per_vp_stage": group}
                    try:
                        yield build_schedule(name, p, m, v, **options)
                    except ConfigError:  # this group size does not fit m
                        continue


def evaluations(p: int) -> Iterator[Schedule]:
    for placement in (straight(p), round_robin(p, 2), round_robin(p, 3), v_shaped(p)):
        for m in (1, 2, p, 2 * p + 1):
            yield forward_only(p, m, placement)


def require_never_stuck(schedules: Iterator[Schedule]) -> None:
    """Neither with the plain executor nor with the overlapping one."""
    count = 0
    for schedule in schedules:
        for hidden, executor in itertools.product((KNOWN, HEADERS), (pipeline, overlapped)):
            calls = programs(schedule, hidden, executor.run)
            for buffered in (False, True):
                assert stuck(calls, "lazy", buffered=buffered) == {}, (
                    f"{schedule}\n{executor.__name__}, hidden {hidden}"
                )
        count += 1
    assert count > 20


@pytest.mark.slow
@pytest.mark.parametrize("p", [2, 3, *(pytest.param(p, marks=pytest.mark.thorough) for p in (4, 6, 8))])
def test_a_communicator_for_each_edge_never_deadlocks(p):
    require_never_stuck(shipped(p))


def test_nor_does_an_evaluation():
    require_never_stuck(schedule for p in (2, 3, 4) for schedule in evaluations(p))


def test_one_communicator_for_a_group_does():
    """What `device_id` gives: the known cases, so that this test could see a deadlock of the mode that is used.

    So no group of the package is made with it (`tests/test_repository.py`).
    """
    for p, v, m in [(3, 2, 1), (4, 2, 1), (4, 2, 2), (3, 2, 4), (3, 3, 1)]:
        calls = programs(forward_only(p, m, round_robin(p, v)))
        for buffered in (False, True):
            assert len(stuck(calls, "eager", buffered=buffered)) > 1, (p, v, m)
    for p, v, group, m in [(3, 2, 6, 6), (3, 2, 5, 9), (3, 2, 6, 12)]:
        schedule = build_schedule("interleaved", p, m, v, microbatch_group_size_per_vp_stage=group)
        assert stuck(programs(schedule), "eager"), (p, v, group, m)


# --------------------------------------------------------------------------------------------- one action ahead


@pytest.mark.parametrize("p", [2, 3, pytest.param(4, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("hidden", [KNOWN, HEADERS], ids=["known shapes", "headers"])
def test_a_receive_is_posted_at_most_one_action_before_it_is_needed(hidden, p):
    """Or before a later message of the same edge is: receives are posted in the sender's order."""
    for schedule in [*shipped(p), *evaluations(p)]:
        for rank, program in enumerate(programs(schedule, hidden)):
            waits = ahead(program)
            for (edge, number), posted, _ in waits:
                first = min(needed for (other, later), _, needed in waits if other == edge and later >= number)
                assert posted in (first - 1, first), f"rank {rank}, message {number} of {edge}, {schedule}"


@pytest.mark.parametrize("name", SCHEDULES)
def test_and_it_is_posted_one_action_before_so_that_it_travels_meanwhile(name):
    schedule = build_schedule(name, 4, 8)
    for program in programs(schedule):
        waits = ahead(program)
        assert waits and all(posted < needed for _, posted, needed in waits if needed), name


def test_where_the_receiver_needs_messages_in_another_order_the_edge_decides():
    """Rank 0 sends microbatches 0, 1, 2; rank 1 begins with the last: three receives are posted at once."""
    rows = ["F0 F1 F2 B2 B1 B0".split(), "F2 F1 F0 B2 B1 B0".split()]
    schedule = Schedule("reversed", tuple(tuple(map(Action.parse, row)) for row in rows), straight(2))
    assert check(schedule) == []
    posted = [posted for _, posted, _ in ahead(programs(schedule)[1])]
    assert posted == [0, 0, 0] and stuck(programs(schedule), "lazy") == {}
