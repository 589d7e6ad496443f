"""Runs a pipeline schedule with real processes and messages, and with sleep in the place of computation.

Four ranks that compute need four GPUs, or cores that do not slow each other down; four ranks that sleep do not. The
order of actions, the waiting and the messages are those of a training step, and every action takes as long as the
simulator says (`schedule_sim.Costs`): F one step, an undivided B two, B and W of a split backward one each; on a chunk
1/v of that.

    every rank:   mine = [rehearse(schedule, mail, 0.02) for _ in range(5)]
    afterwards:   fastest(reports)       the events of all ranks in the run that was disturbed least

Results are tuples and numbers, which a process can send to a notebook.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from minimegatron import trace
from minimegatron.parallel.pipeline.actions import Schedule
from minimegatron.parallel.pipeline.execution import FunctionStage, TensorSpec
from minimegatron.parallel.pipeline.plain import run
from minimegatron.trace import Event

if TYPE_CHECKING:
    from minimegatron.comm.p2p import PointToPoint

Row = tuple[str, int, float, float, str]  # name, rank, start, end, note
RankReport = tuple[list[Row], int]  # what a rank did, and the most activations it held


def rehearse(schedule: Schedule, mail: PointToPoint, step: float = 0.02) -> RankReport:
    """Run this rank's list, all ranks starting together; every rank calls it with the same schedule.

    Args:
        mail: messages to the other ranks; `mail.pp.rank` is this one.
        step: seconds of a forward through all layers of a rank.

    Raises:
        ConfigError: the schedule cannot run (`schedule_check.check`), or is for another number of ranks.
    """

    def sleep(steps: int) -> None:
        time.sleep(steps * step / schedule.v)

    def work(steps: int) -> torch.Tensor:
        sleep(steps)
        return torch.zeros(1)

    rank = mail.pp.rank

    def stage(chunk: int) -> FunctionStage:
        at = schedule.stage_of(rank, chunk)
        hidden = TensorSpec(torch.Size([1]), torch.float32)
        back = lambda i, dy: work(2 - schedule.is_split(i, at))  # noqa: E731
        return FunctionStage(lambda i, x: work(1), back, lambda i: sleep(1), hidden)

    dist.barrier()
    with trace.record(rank) as log:
        run(schedule, [stage(chunk) for chunk in range(schedule.v)], mail)
    rows = [(e.name, e.rank, e.start, e.end, e.note) for e in log.select(kind="compute")]
    return rows, max(int(e.note) for e in log.select("live"))


def fastest(reports: Sequence[Sequence[RankReport]]) -> list[Event]:
    """The events of all ranks in the shortest of several runs; a note names its chunk only where there are several.

    Args:
        reports: `[rank][run]`, each what `rehearse` returned.
    """
    runs = [[_event(row) for rows, _ in run_of_ranks for row in rows] for run_of_ranks in zip(*reports, strict=True)]
    found = min(runs, key=lambda events: max(e.end for e in events) - min(e.start for e in events))
    if any(e.note.partition(".")[2] not in ("", "0") for e in found):
        return found
    return [dataclasses.replace(e, note=e.note.partition(".")[0]) for e in found]


def most_live(reports: Sequence[Sequence[RankReport]]) -> list[int]:
    """Of each rank, the most activations that it held in any run."""
    return [max(live for _, live in runs) for runs in reports]


def _event(row: Row) -> Event:
    name, rank, start, end, note = row
    return Event(name, "compute", rank, start, end, note=note)
