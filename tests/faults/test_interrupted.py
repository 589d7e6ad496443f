"""Ctrl-C once, twice, while starting, while ranks are blocked: 130, quiet, and nothing is left."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from labkit.ranks.torchrun import launch
from minimegatron.launch import procs
from tests.faults import helpers
from tests.thorough import mostly_thorough

DEAF = """
import os, time
open(os.environ["MINIMEGATRON_RUN_DIR"] + "/started." + os.environ["RANK"], "w").close()
time.sleep(1000)
"""


WHEN = ["starting", "running", "twice", "in a script that knows nothing of us"]


@pytest.mark.parametrize("when", mostly_thorough(WHEN, [0, 1]))
def test_ctrl_c_is_quiet_and_leaves_nothing(tmp_path: Path, when: str, trial: int) -> None:
    command = helpers.agent(2, helpers.FOREVER)
    if "script" in when:
        command[command.index(str(helpers.VICTIM))] = str(tmp_path / "deaf.py")
        (tmp_path / "deaf.py").write_text(DEAF)
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
    assert len((tmp_path / "output").read_text().splitlines()) <= 5, (tmp_path / "output").read_text()


@pytest.mark.thorough
def test_a_rank_blocked_in_a_collective_obeys_ctrl_c(tmp_path: Path) -> None:
    with helpers.background(tmp_path, *helpers.agent(2, helpers.FOREVER, "1", "3", "sleep"), timeout=60) as (
        agent,
        token,
    ):
        helpers.all_checked_in(tmp_path, 2)
        time.sleep(1.0)
        procs.send(helpers.pids_by_rank(token)[0], signal.SIGINT)
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
    assert not procs.marked(f"MINIMEGATRON_RUN_DIR={tmp_path}")
