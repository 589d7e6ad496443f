"""Launching ranks: what a run returns, how a failure reads, which exit status says what."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from labkit.ranks import agent
from labkit.ranks.torchrun import Run, launch, render
from minimegatron.errors import ConfigError, DeadlineError
from minimegatron.launch import procs, rank
from minimegatron.launch.ledger import Cause, Ledger, Position
from tests.thorough import mostly_thorough

# Scripts without torch start in a moment; `TALK` is what a learner's cell looks like.
TALK = """
    import torch
    import torch.distributed as dist
    from minimegatron.launch.rank import finish, init, report

    rank, world = init(timeout_seconds=20)
    x = torch.full((2,), float(rank))
    dist.all_reduce(x)
    print("sum", x.tolist())
    report({"rank": rank, "sum": x.tolist()})
    if "fail" in __import__("sys").argv and rank == 1:
        raise ValueError("shape mismatch")
    dist.barrier()
    finish()
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "cell.py"


def write(script: Path, text: str) -> str:
    source = textwrap.dedent(text)
    script.write_text(source)
    return source


# ----------------------------------------------------------------------------------------------------- whole runs


def test_a_run_brings_back_output_and_reports_and_nothing_of_an_earlier_run(script: Path, tmp_path: Path) -> None:
    write(script, TALK)
    for stale in ("report.1.json", "started.0", "agent.json"):
        (tmp_path / stale).write_text("[]")
    run = launch(script, 2, tmp_path, timeout=60, args=["--fast", "a b"])
    assert run.returncode == 0 and run.explain() == "", run.explain()
    assert render(run.stdout) == "[ranks 0-1] sum [1.0, 1.0]"
    assert run.reports == [{"rank": r, "sum": [1.0, 1.0]} for r in range(2)]
    assert run.cmd == f"CUDA_VISIBLE_DEVICES= torchrun --standalone --nproc-per-node=2 {script} --fast 'a b'"
    assert run.where() == "2 ranks on CPUs (gloo)"
    assert not run.hung and run.errors == [None, None] and run.seconds > 0
    assert "".join(run.stderr) + run.agent_output == ""


def test_a_failure_names_the_rank_the_line_and_the_consequences(script: Path, tmp_path: Path) -> None:
    source = write(script, TALK)
    run = launch(script, 2, tmp_path, timeout=60, args=["fail"])
    assert run.returncode == 5
    assert run.explain(source) == (
        "FAILED on rank 1: ValueError: shape mismatch\n"
        '  at line 12 of this cell: raise ValueError("shape mismatch")\n'
        "  (rank 0 was ended with it: a consequence, not the cause)"
    )
    assert run.stderr[0] == ""
    assert run.stderr[1].count("Traceback") == 1


EXPLAINED = [
    ("if rank == 1: os.kill(os.getpid(), 9)", 5, "FAILED: rank 1 was killed by SIGKILL"),
    ("if rank == 1: sys.exit(3)", 3, "FAILED: rank 1 left with exit status 3"),
    ("if rank == 1: sys.exit(77)", 5, "FAILED: rank 1 left with exit status 77"),
    (
        "if rank == 1: rank / 0",
        5,
        "FAILED on rank 1: ZeroDivisionError: division by zero\n  at line 6 of this cell",
    ),
    ("rank = = 1", 5, "FAILED on rank"),
]


@pytest.mark.parametrize(("body", "returncode", "said"), mostly_thorough(EXPLAINED, [3]))
def test_a_script_that_knows_nothing_of_us_is_explained_too(
    script: Path, tmp_path: Path, body: str, returncode: int, said: str
) -> None:
    source = write(
        script,
        f"import os, sys, time\n\nrank = int(os.environ['RANK'])\nif rank == 0:\n    pass\n{body}\ntime.sleep(60)\n",
    )
    run = launch(script, 2, tmp_path, timeout=60)
    assert run.returncode == returncode
    assert run.explain(source).startswith(said), run.explain(source)
    if "= =" in body:
        assert "SyntaxError" in run.explain(source)


def test_a_hang_shows_where_each_rank_waits(script: Path, tmp_path: Path) -> None:
    source = write(
        script,
        """
        import os, signal, time
        rank = int(os.environ["RANK"])
        open(os.environ["MINIMEGATRON_RUN_DIR"] + f"/started.{rank}", "w").close()
        if rank == 0:
            time.sleep(600)
        elif rank == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif rank == 2:
            while True: pass
        """,
    )
    run = launch(script, 4, tmp_path, timeout=1)
    assert run.hung and run.returncode == 7
    assert run.explain(source).splitlines() == [
        "HANG: not finished 1 s after every rank had checked in. Where each rank was:",
        "  rank 0: line 6: time.sleep(600)",
        "  rank 1: did not answer (stopped, or stuck in the kernel)",
        "  rank 2: line 10: while True: pass",
        "  rank 3: had ended",
    ]


@pytest.mark.thorough
def test_the_clock_of_a_hang_starts_when_all_have_checked_in_or_should_have(script: Path, tmp_path: Path) -> None:
    write(script, "import time; time.sleep(600)")
    begun = time.monotonic()
    run = launch(script, 1, tmp_path, timeout=0.5, start_seconds=4)
    assert run.hung and time.monotonic() - begun > 4


def test_what_cannot_be_launched_is_refused(script: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no script"):
        launch(script, 2, tmp_path)
    write(script, "")
    with pytest.raises(ConfigError, match="cannot start 0 ranks"):
        launch(script, 0, tmp_path)


# ------------------------------------------------------------------------------------------------- texts, unlaunched


def end(rank: int, returncode: int, message: str = "", moment: int = 0) -> agent.RankEnd:
    return agent.RankEnd(rank, returncode, message, "", moment)


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (
            [end(0, 1, "RuntimeError: Connection closed by peer", 4), end(1, -9, moment=5)],
            "FAILED: rank 1 was killed by",
        ),
        (
            [end(0, 1, "RuntimeError: Connection reset by peer", 5), end(1, 1, "KeyError: 'x'", 5)],
            "FAILED on rank 1: Key",
        ),
        ([end(0, -15, moment=5), end(1, -9, moment=5)], "FAILED: rank 1 was killed by SIGKILL"),
        ([end(r, 2, "ConfigError: no", 5) for r in range(2)], "FAILED on ranks 0-1: ConfigError: no"),
        ([end(0, -9, moment=5), end(1, 7, "DeadlineError: rank 0 did not come", 5)], "FAILED on rank 1: DeadlineError"),
    ],
)
def test_the_cause_is_found_among_the_ends(ends: list[agent.RankEnd], said: str, script: Path) -> None:
    run = Run("torchrun", script, 2, 1.0, returncode=5, errors=list(ends))
    assert run.explain("\n").startswith(said), run.explain("\n")


def test_render_merges_ranks_that_wrote_the_same() -> None:
    assert render(["a\nb\n", "c\n", "a\nb", "", "a\nb\n"]) == "[ranks 0, 2, 4] a\n[ranks 0, 2, 4] b\n[rank 1] c"


@given(st.lists(st.sampled_from(["", "x\n", "x\ny\n", "y"]), max_size=6))
def test_render_keeps_every_line_of_every_rank(stdout: list[str]) -> None:
    seen: list[list[str]] = [[] for _ in stdout]
    for line in render(stdout).splitlines():
        tag, _, text = line[1:].partition("] ")
        for part in tag.split(maxsplit=1)[1].split(", "):
            first, _, last = part.partition("-")
            for r in range(int(first), int(last or first) + 1):
                seen[r].append(text)
    assert seen == [text.splitlines() for text in stdout]


def test_a_stack_dump_is_read_from_the_thread_that_was_asked(tmp_path: Path) -> None:
    dump = (
        'Thread 0x01 (most recent call first):\n  File "/a/watch.py", line 3 in run\n\n'
        "Current thread 0x02 (most recent call first):\n"
        '  File "/lib/x.py", line 7 in f\n  File "/a/cell.py", line 9 in <module>\n'
    )
    assert procs.dumped_frames(dump) == [("/lib/x.py", 7, "f"), ("/a/cell.py", 9, "<module>")]
    assert procs.dumped_frames("nothing") == []


# -------------------------------------------------------------------------------------------------------- the ledger


def test_the_first_cause_stands() -> None:
    store = dist.HashStore()
    first, second = Ledger(store, 0, 2), Ledger(store, 1, 2)
    assert first.cause() is None
    assert second.claim(0, "was killed by SIGKILL") == Cause(0, "was killed by SIGKILL", 1)
    assert first.claim(0, "failed: ValueError") == second.cause() == Cause(0, "was killed by SIGKILL", 1)


def test_a_meeting_names_who_did_not_come() -> None:
    store = dist.HashStore()
    Ledger(store, 0, 4).come("start")
    Ledger(store, 3, 4).come("start")
    with pytest.raises(DeadlineError, match=r"start: ranks 1-2 did not come within 0\.05 s"):
        Ledger(store, 3, 4).meet("start", 0.05)


def test_a_meeting_ends_when_the_last_has_come() -> None:
    store, here = dist.HashStore(), []

    def come(rank: int) -> None:
        Ledger(store, rank, 3).meet("start", 10)
        here.append(rank)

    threads = [threading.Thread(target=come, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert here == []
    come(2)
    for thread in threads:
        thread.join(10)
    assert sorted(here) == [0, 1, 2]


def test_positions_are_asked_for_and_a_certain_answer_stands() -> None:
    store = dist.HashStore()
    ledgers = [Ledger(store, r, 3) for r in range(3)]
    assert not ledgers[1].asked()
    ledgers[0].ask()
    assert ledgers[1].asked()
    mine = Position("all_reduce", "dp", (0, 1, 2), "cell.py:3 in f")
    ledgers[0].answer(mine)
    ledgers[0].answer(Position("", "", (), "elsewhere"), certain=False)
    ledgers[1].answer(Position("", "", (), "cell.py:9 in g"), certain=False)
    assert ledgers[0].answers([0, 1, 2], 0.05) == {0: mine, 1: Position("", "", (), "cell.py:9 in g")}


# ------------------------------------------------------------------------------------------------- one rank's status

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


def test_the_exit_status_says_what_happened(script: Path) -> None:
    write(script, STATUSES)
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
