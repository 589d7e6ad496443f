"""One rank dies, stops, raises or does not come: all end, and the first words name it and what the others wait in."""

from __future__ import annotations

import os
import random
import re
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
from minimegatron.errors import DeadlineError, RankError
from tests.faults import chain, helpers

LAZY = helpers.VICTIM.with_name("lazy.py")


def train(rank: int, world: int, folder: str) -> None:
    mesh = Mesh.build(ParallelConfig(tensor_model_parallel_size=2))
    Path(folder, f"{rank}.pid").write_text(str(os.getpid()))
    x = torch.ones(1000)
    while True:
        all_reduce(x.fill_(1.0), mesh.tp)
        all_reduce(x, mesh.dp)


@pytest.mark.parametrize("attempt", range(2))
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
    victim = moment.randrange(2)
    with helpers.background(tmp_path, *helpers.agent(2, helpers.FOREVER)) as (agent, token):
        helpers.all_checked_in(tmp_path, 2)
        time.sleep(moment.random())
        os.kill(helpers.pids_by_rank(agent)[victim], signal.SIGKILL)
        assert agent.wait(15) == 5
        helpers.everything_gone(token, 1)
    assert (tmp_path / "output").read_text() == f"rank {victim} was killed by SIGKILL\n"
    assert not list((tmp_path / "temporary").iterdir()), "torchrun's folder of logs"


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


# ----------------------------------------------------------------------------- every way in which a rank can wait

ALL = list(chain.WAYS)
CHAIN = helpers.VICTIM.with_name("chain.py")


def test_a_deadline_of_warm_ranks_says_who_kept_whom_waiting_and_in_what(ranks: Any) -> None:
    last = len(ALL)
    with pytest.raises(DeadlineError) as caught:
        ranks(last + 1, fingerprints=False).run(chain.wait_for_the_next, ALL, timeout=5)
    assert caught.value.what.startswith(f"rank {last} kept ranks 0-{last - 1} waiting: wait_for_the_next")
    late, *others = caught.value.where.split("; ")
    assert late.startswith(f"rank {last} is at chain.py:") and late.endswith("time.sleep(seconds)")
    for rank, (way, line) in enumerate(zip(ALL, others, strict=True)):
        assert line.startswith(f"rank {rank} waits in {chain.said(way, rank)} at chain.py:"), way


def test_another_thread_of_a_rank_sees_what_it_waits_in(ranks: Any, tmp_path: Path) -> None:
    seen = ranks(len(ALL) + 1, fingerprints=False).run(chain.seen_by_a_thread, ALL, str(tmp_path), timeout=60)
    assert seen == [*(chain.said(way, rank) for rank, way in enumerate(ALL)), ""]


@pytest.mark.parametrize(
    "ways",
    [
        ["shared memory", "ring"],
        pytest.param(["p2p", "reduce_scatter", "objects"], marks=pytest.mark.thorough),
        pytest.param(["all_gather", "p2p", "all_reduce"], marks=pytest.mark.thorough),
    ],
    ids=" ".join,
)
def test_torchrun_names_the_collective_and_the_rank_at_the_end_of_the_chain(tmp_path: Path, ways: list[str]) -> None:
    last = len(ways)
    run = launch(CHAIN, last + 1, tmp_path, timeout=90, args=ways, env={"TIMEOUT": "3"})
    assert run.returncode == 7, run.explain() + "".join(run.stderr)
    found = re.search(r"DeadlineError: (.* over .* \(ranks (\d)-\d\)): rank (\d) did not come", run.explain())
    assert found, run.explain()
    rank = int(found[2])
    assert found[1] == chain.said(ways[rank], rank) and int(found[3]) == rank + 1
    assert (f"did not come, which waits for rank {last}, within 3 s" in run.explain()) == (rank < last - 1)
    assert (
        f"rank {last} is at chain.py:" in run.explain() and "in wait_for_the_next: time.sleep(seconds)" in run.explain()
    )


# ------------------------------------------------------------------------------ where no wait raises, as with NCCL


def run_victim(folder: Path, *args: str, timeout: str = "2") -> Any:
    return launch(LAZY, 3, folder, timeout=90, args=args, env={"TIMEOUT": timeout})


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["SIGSTOP", "sleep"])
def test_a_rank_that_does_not_come_is_named_with_status_7(tmp_path: Path, what: str) -> None:
    begun = time.monotonic()
    run = run_victim(tmp_path, helpers.FOREVER, "1", "7", what)
    assert run.returncode == 7, run.explain() + "".join(run.stderr)
    assert "DeadlineError: all_reduce over dp (ranks 0-2): rank 1 did not come within 2 s" in run.explain()
    assert sum(text.count("DeadlineError") for text in run.stderr) == 1
    assert time.monotonic() - begun < 60
    helpers.everything_gone(str(tmp_path), 1)


@pytest.mark.thorough
def test_a_message_that_does_not_come_is_named(tmp_path: Path) -> None:
    run = run_victim(tmp_path, helpers.FOREVER, "0", "7", "pp-SIGSTOP")
    assert run.returncode == 7, run.explain() + "".join(run.stderr)
    missing = ("rank 0 did not come within 2 s", "rank 1 did not come, which waits for rank 0, within 2 s")
    assert any(words in run.explain() for words in missing) and "rank 0 does not answer (stopped?)" in run.explain()
    helpers.everything_gone(str(tmp_path), 1)


@pytest.mark.thorough
def test_a_rank_that_is_killed_is_named_with_status_5(tmp_path: Path) -> None:
    run = run_victim(tmp_path, helpers.FOREVER, "2", "7", "SIGKILL", timeout="20")
    assert run.returncode == 5 and run.explain().startswith("FAILED: rank 2 was killed by SIGKILL")
    helpers.everything_gone(str(tmp_path), 1)


@pytest.mark.thorough
def test_a_run_that_is_idle_for_longer_than_the_deadline_is_no_hang(tmp_path: Path) -> None:
    run = run_victim(tmp_path, "20", "-1", "7", "idle")
    assert run.returncode == 0, run.explain() + "".join(run.stderr)
    assert run.stdout == ["done 57\n"] * 3
