"""A rehearsal does what the lists say, in their order, and keeps as many activations as the plan says."""

from __future__ import annotations

from course.rehearsal import RankReport, fastest, most_live, rehearse
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.p2p import PointToPoint
from minimegatron.config import ParallelConfig
from minimegatron.parallel.pipeline.schedule_sim import peak_live
from minimegatron.parallel.pipeline.schedules import build_schedule

NAMES = ("1f1b", "interleaved", "dualpipe_v")


def rehearsed(rank: int, world: int) -> dict[str, list[RankReport]]:
    mail = PointToPoint(Mesh.build(ParallelConfig(pipeline_model_parallel_size=world)))
    return {name: [rehearse(build_schedule(name, world, 4), mail, 1e-3) for _ in range(2)] for name in NAMES}


def test_every_rank_does_its_list(ranks) -> None:
    reports = ranks(2).run(rehearsed)
    for name in NAMES:
        schedule = build_schedule(name, 2, 4)
        found = [one[name] for one in reports]
        assert most_live(found) == peak_live(schedule)
        events = fastest(found)
        for rank, row in enumerate(schedule.actions):
            did = [e.name + e.note for e in events if e.rank == rank]
            assert did == list(map(schedule.label, row))


def test_a_divided_backward_sleeps_half_as_long(ranks) -> None:
    reports = ranks(2).run(rehearsed)
    schedule = build_schedule("dualpipe_v", 2, 4)
    for rank, runs in enumerate(reports):
        for rows, _ in runs["dualpipe_v"]:
            for name, _, start, end, note in rows:
                i, chunk = map(int, note.split("."))
                whole = name == "B" and not schedule.is_split(i, schedule.stage_of(rank, chunk))
                assert end - start >= (1 + whole) * 0.5e-3 * 0.99, "sleep is never shorter than it was asked to be"


def test_the_shortest_of_several_runs_is_taken() -> None:
    slow, quick = ([("F", 0, 0.0, 3.0, "0.0")], 1), ([("F", 0, 5.0, 6.0, "0.0")], 2)
    late, soon = ([("F", 1, 3.0, 4.0, "0.0")], 1), ([("F", 1, 6.0, 7.5, "0.0")], 1)
    events = fastest([[slow, quick], [late, soon]])
    assert [(e.rank, e.start, e.end, e.note) for e in events] == [(0, 5.0, 6.0, "0"), (1, 6.0, 7.5, "0")]
    assert most_live([[slow, quick], [late, soon]]) == [2, 1]
