"""Nothing of a job outlives it: its launcher is killed, Ctrl-C ends it, ranks have started daemons that hide."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from labkit.ranks.agent import marked
from labkit.ranks.fork_server import trunk
from labkit.ranks.torchrun import Run, launch
from minimegatron.errors import RankError
from minimegatron.launch import procs
from tests.faults import helpers
from tests.thorough import mostly_thorough

# ------------------------------------------------------------------------------------------ the launcher is killed

LAUNCH = """
import sys
from labkit.ranks.torchrun import launch
launch(sys.argv[1], 2, sys.argv[2], timeout=600, args=["1000000"])
"""


def test_the_process_that_launched(tmp_path: Path) -> None:
    with helpers.background(tmp_path, "-c", LAUNCH, str(helpers.VICTIM), str(tmp_path)) as (launcher, token):
        helpers.all_checked_in(tmp_path, 2)
        launcher.kill()
        launcher.wait(5)
        helpers.everything_gone(token)


@pytest.mark.thorough
def test_plain_torchrun(tmp_path: Path) -> None:
    command = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(helpers.VICTIM),
        helpers.FOREVER,
    ]
    with helpers.background(tmp_path, *command) as (torchrun, token):
        helpers.all_checked_in(tmp_path, 2)
        torchrun.kill()
        torchrun.wait(5)
        helpers.everything_gone(token)


def test_the_agent_under_a_launch(tmp_path: Path) -> None:
    script = tmp_path / "deaf.py"  # only the token finds its process
    script.write_text(helpers.DEAF)
    runs: list[Run] = []
    thread = threading.Thread(target=lambda: runs.append(launch(script, 2, tmp_path, timeout=60)))
    thread.start()
    helpers.all_checked_in(tmp_path, 2)
    token = f"MINIMEGATRON_RUN_DIR={tmp_path}"
    (agent,) = set(procs.children(trunk().process.pid)) & marked(token)
    os.kill(agent, signal.SIGKILL)
    thread.join(10)
    assert not marked(token)
    assert runs[0].returncode == 5
    assert runs[0].explain().startswith("FAILED: torchrun was killed by SIGKILL")


# -------------------------------------------------------------------------------------------------------- Ctrl-C

WHEN = ["starting", "running", "twice", "in a script without init"]


@pytest.mark.parametrize("when", mostly_thorough(WHEN, [0, 1]))
def test_ctrl_c_is_quiet_and_leaves_nothing(tmp_path: Path, when: str, trial: int) -> None:
    command = helpers.agent(2, helpers.FOREVER, fork=when == "running")
    if "script" in when:
        command[command.index(str(helpers.VICTIM))] = str(tmp_path / "deaf.py")
        (tmp_path / "deaf.py").write_text(helpers.DEAF)
    with helpers.background(tmp_path, *command) as (agent, token):
        if when == "starting":
            time.sleep(0.3 * (1 + trial % 12))  # imports of the agent, start of the ranks, their imports
        else:
            helpers.all_checked_in(tmp_path, 2)
        agent.send_signal(signal.SIGINT)
        if when == "twice":
            time.sleep(0.05)
            agent.send_signal(signal.SIGINT)
        status = agent.wait(15)
        # Before Python has set up its handlers the signal itself ends the process, which a shell reports as 130 too.
        assert status == 130 or (when == "starting" and status == -signal.SIGINT)
        helpers.everything_gone(token)
    assert when == "starting" or not list((tmp_path / "temporary").iterdir()), "torchrun's folder of logs"
    output = (tmp_path / "output").read_text()
    importing = when == "starting" and ", in main\n" not in output  # Python's own traceback, before there is a handler
    assert importing or len(output.splitlines()) <= 5, output


@pytest.mark.thorough
def test_a_rank_blocked_in_a_collective_obeys_ctrl_c(tmp_path: Path) -> None:
    with helpers.background(tmp_path, *helpers.agent(2, helpers.FOREVER, "1", "3", "sleep"), timeout=60) as (
        agent,
        token,
    ):
        helpers.all_checked_in(tmp_path, 2)
        time.sleep(1.0)
        procs.send(helpers.pids_by_rank(agent)[0], signal.SIGINT)
        assert agent.wait(15) == 130
        helpers.everything_gone(token)
    assert (tmp_path / "output").read_text() == ""


def test_ctrl_c_in_launch_ends_all_ranks(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 3.0)
    try:
        with pytest.raises(KeyboardInterrupt):
            launch(helpers.VICTIM, 2, tmp_path, timeout=60, args=[helpers.FOREVER])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert not marked(f"MINIMEGATRON_RUN_DIR={tmp_path}")


# ------------------------------------------------------------------------------------------------------- daemons


def hide(folder: str, name: str) -> None:
    """Leave a daemon that writes down its pid: two forks, a session of its own, no environment."""
    command = f"echo $$ > {folder}/{name}.part && mv {folder}/{name}.part {folder}/{name}.daemon && exec sleep 1000"
    subprocess.run(["sh", "-c", f'setsid env -i sh -c "{command}" & exit 0'.replace("$$", r"\$\$")], timeout=20)
    helpers.wait_for(Path(folder, f"{name}.daemon").exists, 60, "the daemon to say its pid")  # or it might end before


def daemons(folder: Path, number: int) -> list[int]:
    helpers.wait_for(lambda: len(list(folder.glob("*.daemon"))) == number, 100, "the daemons to be there")
    return [int(path.read_text()) for path in folder.glob("*.daemon")]


def gone(pids: list[int], seconds: float = 5.0) -> None:
    try:
        helpers.wait_for(lambda: not any(map(helpers.alive, pids)), seconds, "the daemons to end")
    finally:
        for pid in pids:
            procs.send(pid, 9)


SCRIPT = """
import sys
from minimegatron.launch.rank import init, run_rank
from tests.faults.test_ends import hide

def main():
    rank, _ = init(timeout_seconds=20)
    hide(sys.argv[1], str(rank))
    if sys.argv[2] == "raise":
        raise ValueError("shape mismatch")

run_rank(main)
"""


@pytest.mark.parametrize(
    ("launcher", "how"),
    [
        ("labkit.ranks.agent", "raise"),
        pytest.param("labkit.ranks.agent", "end", marks=pytest.mark.thorough),
        pytest.param("torch.distributed.run", "end", marks=pytest.mark.thorough),
    ],
)
def test_daemons_of_a_job_end_with_it(tmp_path: Path, launcher: str, how: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ["-m", launcher, "--standalone", "--nproc-per-node=1", str(tmp_path / "script.py"), str(tmp_path), how]
    with helpers.background(tmp_path, *command) as (process, _):
        pids = daemons(tmp_path, 1)
        assert process.wait(60) == (5 if how == "raise" else 0), (tmp_path / "output").read_text()
        gone(pids)


def leave_daemons(rank: int, world: int, folder: str) -> int:
    hide(folder, str(rank))
    return os.getpid()


def test_daemons_of_a_pools_job_end_before_the_next(ranks: Any, tmp_path: Path) -> None:
    first = ranks(2).run(leave_daemons, str(tmp_path), timeout=30)
    pids = daemons(tmp_path, 2)
    again = ranks(2).run(pid_of, timeout=30)
    assert not set(first) & set(again), "ranks that left something are replaced"
    gone(pids)


def pid_of(rank: int, world: int) -> int:
    return os.getpid()


def die_with_a_daemon(rank: int, world: int) -> None:
    """A daemon that holds every descriptor of its rank, the channel among them, outlives it."""
    if rank == 1:
        if os.fork() == 0:
            os.setsid()
            time.sleep(1000)
        os._exit(3)


def test_a_daemon_does_not_keep_the_caller_waiting_for_a_dead_rank(ranks: Any) -> None:
    with pytest.raises(RankError, match="rank 1 left with exit status 3"):  # else a deadline
        ranks(2).run(die_with_a_daemon, timeout=20)


OWNER = """
import sys
from labkit.ranks.pool import WarmPool
from tests.faults.test_ends import stay
WarmPool(2).run(stay, sys.argv[1], timeout=600)
"""


def stay(rank: int, world: int, folder: str) -> None:
    hide(folder, str(rank))
    time.sleep(1000)


@pytest.mark.thorough
def test_a_killed_pool_leaves_no_rank_no_daemon_and_no_file(tmp_path: Path) -> None:
    place = tmp_path / "temporary"  # of the owner's
    with helpers.background(tmp_path, "-c", OWNER, str(tmp_path)) as (owner, token):
        pids = daemons(tmp_path, 2)
        assert list(place.glob("minimegatron-*")), "the ranks meet somewhere"
        pids += procs.descendants(owner.pid)  # ranks, their server and its trunk
        owner.kill()
        owner.wait(5)
        helpers.everything_gone(token)
        gone(pids)
        helpers.wait_for(lambda: not list(place.glob("minimegatron-*")), 5, "the folder of the pool to go")
