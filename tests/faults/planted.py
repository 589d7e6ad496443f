"""Programs with a planted fault of order or of time, on real ranks over gloo.

    planted.py FAULT            four ranks, tp 2 and dp 2, three good steps and one with the fault; rank 1 does it
    planted.py train FAULT ...  a training with these flags and the fault

`on_warm_ranks` runs the first kind on ranks of a pool and returns their flight records.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from minimegatron.comm import flight_recorder
from minimegatron.comm.axis import Axis
from minimegatron.comm.collectives import all_gather, all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.comm.p2p import PointToPoint
from minimegatron.config import ParallelConfig
from minimegatron.launch import flight_dump
from minimegatron.launch import rank as launch
from minimegatron.launch.flight_records import SIGNAL

FAULTY, STEPS, SECONDS = 1, 4, 2.0  # the rank, steps, deadline
STUCK = "stuck"


class Ranks:
    """What the steps of a program use.

    Attributes:
        fault: what happens now, or "".
        leave: called by a rank that is stuck in user code, again and again.
    """

    def __init__(self, mesh: Mesh, leave: Callable[[], None] = lambda: None) -> None:
        self.mesh, self.fault, self.leave = mesh, "", leave
        group = dist.new_group(timeout=timedelta(seconds=mesh.parallel.distributed_timeout_seconds))
        self.all = dataclasses.replace(mesh.world, group=group)  # with the short deadline on warm ranks, too
        self.p2p = PointToPoint(mesh)

    def of(self, what: str) -> bool:
        """Whether this rank does this fault now."""
        return self.fault == what and self.mesh.rank == FAULTY


def step(ranks: Ranks) -> None:
    """A step: a sum over tp, one over dp, two gathers of all, in the tested order."""
    reduce_activations(ranks, torch.ones(8))
    if ranks.of(STUCK):
        while True:
            ranks.leave()
            time.sleep(0.02)
    if ranks.of("SIGKILL") or ranks.of("SIGSTOP"):
        time.sleep(1.0)  # the others have read where its last calls are
        os.kill(os.getpid(), getattr(signal, ranks.fault))
    if not ranks.of("left out"):
        reduce_gradients(ranks, torch.ones(99 if ranks.of("shape") else 100))
    calls = [lambda: all_gather(torch.ones(4), ranks.all), lambda: all_reduce(torch.ones(4), ranks.all)]
    for call in calls[::-1] if ranks.of("order") else calls:
        call()
    lines = [first_line, second_line]
    for line in lines[::-1] if ranks.of("lines") else lines:
        line(ranks.all)


def reduce_activations(ranks: Ranks, x: torch.Tensor) -> None:
    all_reduce(x, ranks.mesh.tp)


def reduce_gradients(ranks: Ranks, x: torch.Tensor) -> None:
    if ranks.of("operation"):
        all_gather(x, ranks.mesh.dp)
        return
    if ranks.of("dtype"):
        x = x.double()
    all_reduce(x, ranks.mesh.tp if ranks.of("group") else ranks.mesh.dp)


def first_line(axis: Axis) -> None:
    all_reduce(torch.ones(4), axis)


def second_line(axis: Axis) -> None:
    all_reduce(torch.full((4,), 2.0), axis)


def messages(ranks: Ranks, receives: int) -> None:
    """A pipeline of two stages: three activations down; one rank posts fewer receives and goes on."""
    mesh, p2p, x = ranks.mesh, ranks.p2p, torch.ones(4)
    if mesh.pp.is_first:
        for number in range(3):
            p2p.isend(x, 1, f"F{number}")
        p2p.wait_sends()
    else:
        for number in range(receives):
            p2p.irecv(0, f"F{number}", x.shape, x.dtype).wait()
    all_reduce(x, mesh.pp)


def mesh_of(fault: str, seconds: float) -> Mesh:
    layout = {"pipeline_model_parallel_size": 2} if fault == "receive" else {"tensor_model_parallel_size": 2}
    return Mesh.build(ParallelConfig(distributed_timeout_seconds=seconds, **layout))


def run(ranks: Ranks, fault: str) -> None:
    for number in range(STEPS):
        ranks.fault = fault if number == STEPS - 1 else ""
        if fault == "receive":
            messages(ranks, 2 if ranks.fault and ranks.mesh.rank == ranks.mesh.pp.ranks[1] == 2 else 3)
        else:
            step(ranks)


# ------------------------------------------------------------------------------------------------------ on warm ranks


class Stopped(Exception):
    pass


def on_warm_ranks(rank: int, world: int, fault: str, folder: str) -> dict[str, Any]:
    """The flight record of this rank, taken when its deadline is over, or another's."""
    recorder = flight_recorder.start(200)
    assert recorder is not None
    taken = list[dict[str, Any]]()

    def take() -> None:
        taken.append(flight_dump.dump(recorder, rank, world, "a test"))

    def leave() -> None:
        if any(Path(folder).iterdir()):
            take()
            raise Stopped

    try:
        run(Ranks(mesh_of(fault, SECONDS), leave), fault)
    except (RuntimeError, Stopped):
        Path(folder, str(rank)).touch()
    finally:
        flight_recorder.start(0)
    if not taken:
        take()
    return taken[0]


# ---------------------------------------------------------------------------------------------------- under torchrun


def main() -> None:
    fault = sys.argv[1]
    if fault == "train":
        train(sys.argv[2], sys.argv[3:])
        return
    rank, _ = launch.init(timeout_seconds=SECONDS)
    run(Ranks(mesh_of(fault, SECONDS)), fault)
    if fault == "lines" and rank == 0:
        os.kill(os.getpid(), SIGNAL)
        time.sleep(2.0)
    launch.finish()


def train(fault: str, words: list[str]) -> None:
    """A training in which one rank is slow, or stuck, in some steps: FAULT is `SECTION:RANK:STEPS` for each, joined
    by commas; STEPS are counted modulo 8, or `stuck`."""
    from minimegatron.checkpoint import save as saving
    from minimegatron.commands.pretrain_gpt import pretrain
    from minimegatron.data.gpt_dataset import MockGPTDataset
    from minimegatron.optim import optimizer
    from minimegatron.training import step as steps
    from minimegatron.training.trainer import Trainer

    sys.path.insert(0, str(Path(__file__).parents[2]))  # an installed package does not bring its tests
    from tests.mock_data import few_documents

    faults = [one.split(":") for one in fault.split(",")]
    now: list[Trainer] = []

    def happen(section: str) -> None:
        for where, rank, when in faults:
            if where == section and now and now[0].mesh.rank == int(rank):
                if when == STUCK and now[0].state.iteration == 2:
                    threading.Event().wait(600)
                elif when != STUCK and str(now[0].state.iteration % 8) in when:
                    time.sleep(2.0 if section == "save" else 0.25)

    def slow(owner: Any, name: str, section: str) -> None:
        real = getattr(owner, name)

        def call(*args: Any, **options: Any) -> Any:
            happen(section)
            return real(*args, **options)

        setattr(owner, name, call)

    real_step = Trainer._step

    def step(trainer: Trainer, asks: bool) -> Any:
        now[:] = [trainer]
        return real_step(trainer, asks)

    Trainer._step = step  # type: ignore[method-assign]
    slow(MockGPTDataset, "batch", "data")
    slow(steps, "loss_func", "forward")
    slow(optimizer, "look", "optimizer")
    slow(saving, "_write", "save")
    with few_documents():
        pretrain(words)


if __name__ == "__main__":
    launch.run_rank(main)
