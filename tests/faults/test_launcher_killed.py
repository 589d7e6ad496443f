"""Whoever started the ranks is killed without a chance to clean up; the ranks are gone within 5 s."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest

from labkit.ranks.torchrun import Run, launch
from minimegatron.launch import procs
from tests.faults import helpers

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
    script = tmp_path / "deaf.py"  # knows nothing of us, so only the token finds it
    script.write_text(
        "import os, time\n"
        "open(os.environ['MINIMEGATRON_RUN_DIR'] + '/started.' + os.environ['RANK'], 'w').close()\n"
        "time.sleep(1000)\n"
    )
    runs: list[Run] = []
    thread = threading.Thread(target=lambda: runs.append(launch(script, 2, tmp_path, timeout=60)))
    thread.start()
    helpers.all_checked_in(tmp_path, 2)
    token = f"MINIMEGATRON_RUN_DIR={tmp_path}"
    ranks = set(helpers.pids_by_rank(token).values())
    (agent,) = {int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) for pid in ranks}
    os.kill(agent, signal.SIGKILL)
    thread.join(10)
    assert not procs.marked(token)
    assert runs[0].returncode == 5
    assert runs[0].explain().startswith("FAILED: torchrun was killed by SIGKILL")
