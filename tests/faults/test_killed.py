"""One rank dies, stops or raises; all end, and the first words name it."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from labkit.ranks.torchrun import launch
from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.errors import RankError
from tests.faults import helpers


def train(rank: int, world: int, folder: str) -> None:
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=2))
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    x = torch.ones(1000)
    while True:
        all_reduce(x.fill_(1.0), mesh.tp)
        all_reduce(x, mesh.dp)


@pytest.mark.parametrize("attempt", range(5))
def test_a_rank_killed_in_a_warm_pool_is_named(
    ranks: Any, tmp_path: Path, trial: int, moment: random.Random, attempt: int
) -> None:
    moment.seed(f"{trial} {attempt}")
    victim = moment.randrange(4)
    pid = tmp_path / f"{victim}.pid"

    def kill() -> None:
        helpers.wait_for(lambda: pid.exists() and pid.read_text(), 20, "the victim to run")
        time.sleep(moment.random() * 0.2)
        os.kill(int(pid.read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    begun = time.monotonic()
    with pytest.raises(RankError) as caught:
        ranks(4).run(train, str(tmp_path), timeout=60)
    killer.join(10)
    assert caught.value.what == f"rank {victim} was killed by SIGKILL"
    assert time.monotonic() - begun < 15


def test_a_rank_killed_under_torchrun_ends_the_job_and_is_named_first(tmp_path: Path, moment: random.Random) -> None:
    victim = moment.randrange(3)
    with helpers.background(tmp_path, *helpers.agent(3, helpers.FOREVER)) as (agent, token):
        helpers.all_checked_in(tmp_path, 3)
        time.sleep(moment.random())
        os.kill(helpers.pids_by_rank(token)[victim], signal.SIGKILL)
        assert agent.wait(15) == 5
        helpers.everything_gone(token, 1)
    assert (tmp_path / "output").read_text() == f"rank {victim} was killed by SIGKILL\n"


@pytest.mark.thorough
def test_a_stopped_rank_is_named_with_the_call_and_the_group(tmp_path: Path, moment: random.Random) -> None:
    victim, step = moment.randrange(3), moment.randrange(5, 60)
    args = [helpers.FOREVER, str(victim), str(step), "SIGSTOP"]
    begun = time.monotonic()
    run = launch(helpers.VICTIM, 3, tmp_path, timeout=60, args=args, env={"TIMEOUT": "2"})
    assert run.returncode == 7, run.explain()
    assert f"DeadlineError: all_reduce over dp (ranks 0-2): rank {victim} did not come within 2 s" in run.explain()
    assert f"rank {victim} does not answer (stopped?)" in run.explain()
    assert sum(text.count("DeadlineError") for text in run.stderr) == 1
    assert time.monotonic() - begun < 40
    helpers.everything_gone(str(tmp_path), 1)


@pytest.mark.thorough
def test_an_exception_is_printed_once_by_plain_torchrun_too(tmp_path: Path, moment: random.Random) -> None:
    victim = moment.randrange(3)
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    command += [str(helpers.VICTIM), helpers.FOREVER, str(victim), str(moment.randrange(5, 60)), "raise"]
    with helpers.background(tmp_path, *command) as (torchrun, token):
        assert torchrun.wait(60) == 1
        helpers.everything_gone(token, 1)
    output = (tmp_path / "output").read_text()
    assert output.startswith(f"rank {victim} failed: Traceback"), output
    ours = output.partition("Sending process")[0]  # what follows is torchrun's own report
    assert ours.count("Traceback") == 1
    said = [line for line in ours.splitlines() if " ends because " in line]
    assert set(said) <= {f"rank {r} ends because rank {victim} failed: ValueError: shape mismatch" for r in range(3)}
