"""Launching ranks: what a run returns, and how a failure reads."""

from __future__ import annotations

import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labkit.ranks import agent
from labkit.ranks.fork_server import dumped_frames
from labkit.ranks.torchrun import Run, launch, render
from minimegatron.errors import ConfigError
from tests.thorough import mostly_thorough

# `TALK` is what a learner's cell looks like.
TALK = """
    import atexit, os, sys
    import numpy
    import torch
    import torch.distributed as dist
    from minimegatron.launch.rank import finish, init, report

    rank, world = init(timeout_seconds=20)
    x = torch.full((2,), float(rank))
    dist.all_reduce(x)
    print("sum", x.tolist())
    own = [__name__, sys.argv[1:], sys.path[0], os.getsid(0) == os.getpid()]
    report({"rank": rank, "sum": x.tolist(), "own": own, "random": numpy.random.rand()})
    atexit.register(print, "the end")
    if "fail" in sys.argv and rank == 1:
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
    assert render(run.stdout) == "[ranks 0-1] sum [1.0, 1.0]\n[ranks 0-1] the end"
    assert len({report.pop("random") for report in run.reports}) == 2, "forked ranks do not draw the same numbers"
    own = ["__main__", ["--fast", "a b"], str(tmp_path), True]
    assert run.reports == [{"rank": r, "sum": [1.0, 1.0], "own": own} for r in range(2)]
    assert run.cmd == f"CUDA_VISIBLE_DEVICES= torchrun --standalone --nproc-per-node=2 {script} --fast 'a b'"
    assert run.where() == "2 ranks on CPUs (gloo)"
    assert not run.hung and run.errors == [None, None] and run.seconds > 0
    assert "".join(run.stderr) + run.agent_output == ""


def test_ranks_get_what_libraries_read_when_they_are_loaded(script: Path, tmp_path: Path) -> None:
    """It is not in the trunk's environment: then the agent is executed."""
    write(script, "import torch\nprint(torch.get_num_threads())")
    run = launch(script, 1, tmp_path, timeout=60, env={"OMP_NUM_THREADS": "2"})
    assert (run.stdout, run.returncode) == (["2\n"], 0), run.explain()


EXPLAINED = [
    ("os.kill(os.getpid(), 9)", 5, "FAILED: rank 1 was killed by SIGKILL"),
    ("sys.exit(3)", 3, "FAILED: rank 1 left with exit status 3"),
    ("sys.exit(77)", 5, "FAILED: rank 1 left with exit status 77"),
    (
        "raise ValueError('shapes')",
        5,
        "FAILED on rank 1: ValueError: shapes\n"
        "  at line 6 of this cell: raise ValueError('shapes')\n"
        "  (rank 0 was ended with it: a consequence, not the cause)",
    ),
    ("rank = = 1", 5, "FAILED on rank"),
]


@pytest.mark.parametrize(("body", "returncode", "said"), mostly_thorough(EXPLAINED, [3]))
def test_a_script_that_knows_nothing_of_us_is_explained_too(
    script: Path, tmp_path: Path, body: str, returncode: int, said: str
) -> None:
    before = "import os, sys, time\n\nrank = int(os.environ['RANK'])\nwhile rank == 0:\n    time.sleep(60)\n"
    source = write(script, before + body)
    run = launch(script, 2, tmp_path, timeout=60)
    assert run.returncode == returncode
    assert run.explain(source).startswith(said), run.explain(source)
    if "= =" in body:
        assert "SyntaxError" in run.explain(source)
    if "raise" in body:
        assert run.explain(source) == said
        assert run.stderr[0] == "" and run.stderr[1].count("Traceback") == 1


@pytest.mark.thorough
def test_a_rank_that_waits_in_a_collective_is_ended_with_the_one_that_failed(script: Path, tmp_path: Path) -> None:
    source = write(script, TALK)
    run = launch(script, 2, tmp_path, timeout=60, args=["fail"])
    assert run.returncode == 5
    assert run.explain(source) == (
        "FAILED on rank 1: ValueError: shape mismatch\n"
        '  at line 16 of this cell: raise ValueError("shape mismatch")\n'
        "  (rank 0 was ended with it: a consequence, not the cause)"
    )
    assert run.stderr[0] == "" and run.stderr[1].count("Traceback") == 1


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
    assert dumped_frames(dump) == [("/lib/x.py", 7, "f"), ("/a/cell.py", 9, "<module>")]
    assert dumped_frames("nothing") == []
