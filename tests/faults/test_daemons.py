"""What a rank has started ends with the job, whatever it did to hide: a session, no environment, two forks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from minimegatron.errors import RankError
from minimegatron.launch import procs
from tests.faults import helpers


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
from tests.faults.test_daemons import hide

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
from tests.faults.test_daemons import stay
WarmPool(2).run(stay, sys.argv[1], timeout=600)
"""


def stay(rank: int, world: int, folder: str) -> None:
    hide(folder, str(rank))
    time.sleep(1000)


@pytest.mark.thorough
def test_a_killed_pool_leaves_no_rank_no_daemon_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "a temporary folder"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    with helpers.background(tmp_path, "-c", OWNER, str(tmp_path)) as (owner, token):
        pids = daemons(tmp_path, 2)
        assert list(place.glob("minimegatron-*")), "the ranks meet somewhere"
        owner.kill()
        owner.wait(5)
        helpers.everything_gone(token)  # ranks and their server
        gone(pids)
        helpers.wait_for(lambda: not list(place.glob("minimegatron-*")), 5, "the folder of the pool to go")


def test_a_tree_is_walked_and_ended_but_for_who_is_spared() -> None:
    code = "import subprocess, sys; subprocess.Popen(['sleep', '1000']); print(1, flush=True); sys.stdin.read()"
    trees = [
        subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)
    ]
    try:
        for tree in trees:
            assert tree.stdout is not None and tree.stdout.readline() == b"1\n"
        inside = [procs.descendants(tree.pid) for tree in trees]
        assert [len(pids) for pids in inside] == [1, 1]
        assert set(procs.descendants(os.getpid())) >= {*inside[0], *inside[1], trees[0].pid, trees[1].pid}
        others = [pid for pid in procs.children(os.getpid()) if pid != trees[0].pid]
        procs.end_descendants(spare=others)
        assert procs.descendants(trees[1].pid) == inside[1] and trees[1].poll() is None
        assert trees[0].poll() is not None
    finally:
        for pid in {pid for pids in inside for pid in pids}:
            procs.send(pid, 9)
        for tree in trees:
            tree.kill()
            tree.communicate(timeout=5)


def test_without_the_kernels_list_of_children_the_tree_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    try:
        with_list = procs.children(os.getpid())
        real = os.path.exists
        monkeypatch.setattr(os.path, "exists", lambda path: not str(path).endswith("/children") and real(path))
        assert child.pid in with_list and procs.children(os.getpid()) == with_list
    finally:
        child.kill()
        child.wait(5)
