"""Which rank is called slow, and in what: waiting for another is not being slow."""

from __future__ import annotations

import gc
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from minimegatron import trace
from minimegatron.comm import async_ops
from minimegatron.comm.async_ops import Work, blocking, issue
from minimegatron.comm.axis import Axis
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.transport import FakeTransport, Started
from minimegatron.config import ParallelConfig
from minimegatron.training.observers.stragglers import SECTIONS, Sections, lines, peers, report, tags

TP = Axis("tp", (0, 1), 0)
FORWARD, BACKWARD, SAVE = (SECTIONS.index(name) for name in ("forward", "backward", "save"))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still until something takes some."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


class Takes:
    def __init__(self, clock: list[float], seconds: float) -> None:
        self.clock, self.seconds = clock, seconds

    def wait(self, *_: Any) -> None:
        self.clock[0] += self.seconds


def test_each_moment_is_of_one_section_and_is_work_or_waiting(clock: list[float]) -> None:
    with async_ops.alone(FakeTransport()), Sections(torch.device("cpu")) as sections:
        clock[0] += 1  # other
        with trace.span("forward"):
            clock[0] += 2
            with trace.span("data"):
                clock[0] += 4
            with trace.span("a span that is no section"):
                clock[0] += 8
            work = issue(Work(None, "all_reduce", TP), lambda _: Started([Takes(clock, 16)]))
            clock[0] += 32  # it travels while this rank computes
            work.wait()
        with trace.span("backward"), blocking("all_gather_object", TP):
            clock[0] += 64
        with trace.span("save"), trace.span("forward"):
            clock[0] += 128
        with trace.span("forward"):
            for phase, generation, seconds in (("start", 2, 256), ("stop", 2, 0), ("start", 0, 512), ("stop", 0, 0)):
                sections._collection(phase, {"generation": generation})
                clock[0] += seconds
    assert sections._collection not in gc.callbacks
    own, wait = dict(zip(SECTIONS, times := sections.read(), strict=False)), times[len(SECTIONS) :]
    expected = {"data": 4, "forward": 42 + 512, "backward": 0, "optimizer": 0, "save": 128, "evaluation": 0}
    assert own == expected | {"garbage collection": 256, "other": 1}
    assert dict(zip(SECTIONS, wait, strict=True))["forward"] == 16 and wait[BACKWARD] == 64 and sum(wait) == 80
    assert sum(sections.read()) == 0 and not trace._ranges


def times_of(ranks: int, steps: int, slow: dict[tuple[int, int], list[float]]) -> list[list[list[float]]]:
    """Steps of 10 ms in each of forward and backward; `slow`: (rank, section) -> more seconds in each step. All others
    wait as long."""
    times = [[[0.0] * (2 * len(SECTIONS)) for _ in range(steps)] for _ in range(ranks)]
    for rank in range(ranks):
        for t in range(steps):
            row = times[rank][t]
            row[FORWARD], row[BACKWARD] = 0.010 + 1e-4 * rank, 0.010
            for (culprit, section), more in slow.items():
                row[section if rank == culprit else len(SECTIONS) + section] += more[t]
    return times


def found(slow: dict[tuple[int, int], list[float]], ranks: int = 4, steps: int = 10) -> dict[str, Any]:
    everybody = [[q for q in range(ranks) if q != r] for r in range(ranks)]
    return report(times_of(ranks, steps, slow), everybody, ["a", "a", "b", "b"][:ranks], 10)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rank_that_works_longer_is_named_and_those_that_wait_for_it_are_not(ranks: int) -> None:
    told = found({(1, FORWARD): [0.040] * 10}, ranks)
    (one,) = told["slow"]
    assert (one["rank"], one["section"], one["when"]) == (1, "forward", "always")
    assert one["excess_ms"] == pytest.approx(40, abs=0.5) and one["slow_steps"] == 10
    assert told["skew_ms"] == pytest.approx(40, abs=0.5) and told["wait_total_ms"][0] == pytest.approx(40)
    assert "straggler: rank 1 on a in forward" in lines(told)[1] and "always (in 10 of 10 steps)" in lines(told)[1]
    assert tags(told)["straggler/forward-ms max"] == pytest.approx(50.1)
    json.dumps(told)


def test_at_times_is_not_always_and_once_is_said_only_if_it_cost_a_step() -> None:
    (one,) = found({(3, BACKWARD): [0.03, 0, 0.03, 0, 0, 0.03, 0, 0, 0, 0]})["slow"]
    assert (one["rank"], one["when"], one["slow_steps"]) == (3, "at times", 3)
    assert found({(3, BACKWARD): [0.021] + [0.0] * 9})["slow"] == []
    (one,) = found({(2, FORWARD): [2.0] + [0.0] * 9})["slow"]
    assert (one["rank"], one["host"], one["when"]) == (2, "b", "once")


def test_small_differences_are_noise_and_two_slow_ranks_are_both_named() -> None:
    assert found({(0, FORWARD): [0.001] * 10})["slow"] == [] and len(lines(found({}))) == 1
    assert found({(0, SAVE): [0.1] + [0.0] * 9})["slow"] == [], "the first rank publishes a save"
    (one,) = found({(1, SAVE): [2.0]}, steps=1)["slow"]  # after the last step; the others wait as long
    assert (one["rank"], one["section"], one["when"]) == (1, "save", "once")
    told = found({(0, FORWARD): [0.02] * 10, (1, BACKWARD): [0.03] * 10})
    assert [(one["rank"], one["section"]) for one in told["slow"]] == [(1, "backward"), (0, "forward")]
    assert "on rank 0 the most" in lines(told, 2)[0] and lines(told, 2)[0].count(" ms on rank ") == 4


def test_ranks_are_compared_with_those_of_their_stage() -> None:
    mesh = Mesh.planned(ParallelConfig(pipeline_model_parallel_size=2), 0, 4)
    assert peers(mesh) == [[1], [0], [3], [2]]
    mesh = Mesh.planned(ParallelConfig(pipeline_model_parallel_size=2), 0, 2)
    assert peers(mesh) == [[1], [0]], "alone in its stage: with all others"


def slow_forward(rank: int, world: int, folder: str) -> None:
    """A training on warm ranks, in which rank 1 sleeps in its forward pass."""
    import shlex

    from minimegatron.training.arguments import parse_args
    from minimegatron.training.step import forward_step
    from tests.mock_data import small_trainer
    from tests.training.test_trainer import TINY

    def step(batches: Any, model: Any) -> Any:
        time.sleep(0.2 if rank == 1 else 0.0)
        return forward_step(batches, model)

    line = f"{TINY} --mock-data --train-iters 5 --log-interval 4 --log-straggler --log-file {folder}/log.jsonl"
    trainer = small_trainer(parse_args(shlex.split(line), world), forward_step=step)
    trainer.train()
    trainer.close()


def test_a_rank_that_sleeps_in_its_forward_pass_is_found_in_a_real_run(ranks: Any, tmp_path: Path, capfd: Any) -> None:
    ranks(2).run(slow_forward, str(tmp_path))
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    told = next(record for record in records if record["event"] == "stragglers")
    assert told["steps"] == 3, "without the first"
    worst = told["slow"][0]
    assert (worst["rank"], worst["section"], worst["when"]) == (1, "forward", "always")
    assert told["own_ms"]["forward"][1] > 180 and sum(told["wait_ms"][name][0] for name in SECTIONS) > 100
