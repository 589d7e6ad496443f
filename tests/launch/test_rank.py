"""One rank: what it says while others are missing, and which exit status says what happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import warnings
from pathlib import Path

import pytest
import torch.distributed as dist

from minimegatron.launch import error_report, procs, rank
from minimegatron.launch.ledger import Ledger
from minimegatron.launch.procs import RUN_DIR
from minimegatron.launch.rendezvous import Place
from tests.faults.helpers import wait_for

BY_HAND = Place(1, 3, "torchrun")


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Variables of a rank that no launcher has started; what it says."""
    said = list[str]()
    for name, value in {"MASTER_ADDR": "here", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(rank, "SOON_SECONDS", 0.01)
    monkeypatch.setattr(error_report, "say", said.append)
    return said


@pytest.mark.parametrize(("come", "others"), [((), "ranks 0, 2"), ((0, 1), "rank 2")])
def test_a_rank_that_no_launcher_started_says_whom_it_waits_for(
    by_hand: list[str], monkeypatch: pytest.MonkeyPatch, come: tuple[int, ...], others: str
) -> None:
    if come:
        monkeypatch.setattr(rank._rank, "ledger", Ledger(dist.HashStore(), 1, 3))
        for one in come:
            Ledger(rank._rank.ledger.store, one, 3).come("start")
    with rank._tell_who_is_missing(BY_HAND):
        wait_for(lambda: by_hand, 20, "it says so")
    assert by_hand == [
        f"rank 1 of 3 waits for {others} at here:29500, because RANK and WORLD_SIZE are set; "
        "`unset RANK WORLD_SIZE` runs alone"
    ]


def test_where_nobody_waits_or_a_launcher_started_the_ranks_nothing_is_said(
    by_hand: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "SOON_SECONDS", 3600.0)
    with rank._tell_who_is_missing(BY_HAND):
        assert sum(isinstance(t, threading.Timer) for t in threading.enumerate()) == 1
    wait_for(lambda: not any(isinstance(t, threading.Timer) for t in threading.enumerate()), 20, "the timer has ended")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with rank._tell_who_is_missing(BY_HAND):
        assert not any(isinstance(t, threading.Timer) for t in threading.enumerate())


def test_a_warning_of_several_ranks_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, shown = dist.HashStore(), list[tuple[int, str]]()
    monkeypatch.delenv(RUN_DIR, raising=False)
    for number in (1, 0):
        ledger = Ledger(store, number, 2)
        monkeypatch.setattr(rank._rank, "ledger", ledger)
        monkeypatch.setattr(warnings, "showwarning", lambda text, *_, n=number: shown.append((n, str(text))))
        rank._warn_once(ledger)
        for text in ("of all", "of all", f"of rank {number}"):
            warnings.showwarning(UserWarning(text), UserWarning, "file.py", 1)
    assert shown == [(1, "of all"), (1, "of all"), (1, "of rank 1"), (0, "of rank 0")]


STATUSES = """
    import json, os, sys
    import torch.distributed as dist
    from minimegatron import errors
    from minimegatron.launch.rank import finish, init, report, run_rank

    def world_of_one():
        assert init() == init() == (0, 1) and dist.is_initialized()
        report([1.0])

    def leave_group_open():
        init()
        raise errors.NumericsError("nan")

    def unreportable():
        report(object())

    def stop(error):
        def main():
            raise error
        return main

    cases = {"fine": world_of_one, "open": leave_group_open, "unreportable": unreportable}
    for error in (errors.ConfigError("c"), errors.CheckpointError("c"), errors.DataError("d"), errors.RankError("r"),
                  errors.DeadlineError("d"), ValueError("v"), KeyboardInterrupt(), SystemExit(3), SystemExit(0)):
        cases[repr(error)] = stop(error)
    statuses = {}
    for name, main in cases.items():
        sys.stderr.write(f"== {name}\\n")
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            try:
                run_rank(main)
            except SystemExit as status:
                os._exit(status.code or 0)
        statuses[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    print(json.dumps(statuses))
"""


def test_the_exit_status_says_what_happened(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(STATUSES))
    package = str(Path(procs.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=60, env={"PYTHONPATH": package}
    )
    assert done.returncode == 0, done.stderr
    statuses = {name.partition("(")[0]: status for name, status in json.loads(done.stdout.splitlines()[-1]).items()}
    assert json.loads(done.stdout.splitlines()[-1])["SystemExit(0)"] == 0
    assert json.loads(done.stdout.splitlines()[-1])["SystemExit(3)"] == 3
    del statuses["SystemExit"]
    assert statuses == {
        "fine": 0,
        "open": 6,
        "unreportable": 2,
        "ConfigError": 2,
        "CheckpointError": 3,
        "DataError": 4,
        "RankError": 5,
        "DeadlineError": 7,
        "ValueError": 5,
        "KeyboardInterrupt": 130,
    }
    said = dict(part.split("\n", 1) for part in done.stderr.split("== ")[1:])
    assert said["KeyboardInterrupt()"] == said["fine"] == ""
    assert said["open"] == "NumericsError: nan\n"
    assert "Traceback" in said["ValueError('v')"]


def test_ranks_of_one_machine_listen_on_its_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    rank._listen_on_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7", "a choice of the user's stands"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    rank._listen_on_loopback()
    assert os.environ["GLOO_SOCKET_IFNAME"] in ("lo", "lo0")


def test_half_an_environment_is_refused() -> None:
    code = "from minimegatron.launch.rank import init, run_rank; run_rank(init)"
    package = str(Path(procs.__file__).parents[2])
    env = {"PYTHONPATH": package, "RANK": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 2 and "fix: start with `torchrun" in done.stderr
