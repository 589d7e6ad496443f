"""The magics in a real kernel: what a learner reads, and that nothing of theirs is left running."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from labkit.ranks.fork_server import SHARED
from minimegatron.commands.my_labs import SAID_IN
from minimegatron.launch import procs
from tests.labkit.kernel import Kernel, processes_of

OPEN = "%load_ext course\n%lab 00_mini tests.labkit.mini_course"
BUBBLE = "%%exercise bubble\ndef bubble(p, m):\n    return (p - 1) / (m + p - 1)\n"
STUB = "%%exercise bubble\ndef bubble(p, m):\n    raise NotImplementedError('your code here')\n"
RANK = """import torch, torch.distributed as dist
from minimegatron.launch.rank import init, finish, report
rank, world = init()
"""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with Kernel(tmp_path_factory.mktemp("notebook")) as running:
        running.run("import torch; torch.set_num_threads(2)")
        assert running.run(OPEN) == ("lab 00_mini: 0 of 12 points; next: bubble", "")
        yield running


def wait_until(done: object, what: str, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not done():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_the_kernel_computes_with_one_thread(kernel: Kernel) -> None:
    assert kernel.run("torch.get_num_threads()").text == "1"


# ---------------------------------------------------------------------------------------------------- exercises


def test_an_exercise_is_defined_and_checked(kernel: Kernel) -> None:
    assert kernel.run(BUBBLE) == ("", "")
    assert kernel.run("bubble(4, 8) == bubble(p=4, m=8) == 3 / 11").text == "True"
    assert kernel.run('check("bubble")').text == "✔ bubble   passed         5/5"
    assert kernel.run("progress()").text.splitlines()[-1].split() == ["lab", "00_mini", "5/12"]
    assert kernel.run("from exercises.bubble import bubble as same; same is bubble").text == "True"


def test_a_stub_is_not_done_and_cells_wait_for_it(kernel: Kernel) -> None:
    kernel.run(STUB)
    assert kernel.run('check("bubble")') == ("○ bubble   not done yet   0/5", "")
    for magic in ("%%torchrun -n 2 --needs bubble", "%%ranks 2 --needs bubble,double"):
        said = kernel.run(f"{magic}\nprint('never')")
        assert said.text.splitlines()[0] == "○ this cell waits for exercise bubble" and said.error == ""


def test_what_is_said_is_in_the_language_of_the_labs(kernel: Kernel) -> None:
    kernel.run(f"import os; os.environ['{SAID_IN}'] = 'zh'")
    try:
        assert kernel.run('check("bubble")').text.split() == ["○", "bubble", "还没做", "0/5"]
        assert kernel.run("%%needs bubble\n1").text == "○ 这个单元格在等练习 bubble"
        assert kernel.run('guess("gpus", None, "How many?")').text == "○ 还没有猜测：用一个数换掉 None"
    finally:
        kernel.run(f"del os.environ['{SAID_IN}']")
    assert kernel.run('check("bubble")').text == "○ bubble   not done yet   0/5"


def test_the_idea_comes_at_the_second_failure_and_in_grading_at_once(kernel: Kernel) -> None:
    later, idea, how = (
        "(the second try shows an idea)",
        "idea: Which part of the whole is idle?",
        '`hint("bubble")` says how',
    )
    kernel.run(BUBBLE)
    kernel.run('check("bubble")')
    cannot = "return = 1"
    for text, last in (("0.7", [later]), ("0.7", [later]), (cannot, []), ("0.6", [idea, how])):
        kernel.run(f"%%exercise bubble\ndef bubble(p, m):\n    {text if text == cannot else f'return {text}'}")
        said = kernel.run('check("bubble")').text.splitlines()
        assert [line.strip() for line in said[len(said) - len(last) :]] == last, text
        assert (f"  {idea}" in said) == (idea in last) and (f"  {later}" in said) == (later in last)
    assert kernel.run('hint("bubble")').text.startswith("The first stage works")
    kernel.run("import os; os.environ['NBGRADER_EXECUTION'] = 'autograde'")
    said = kernel.run('check("bubble")').text.splitlines()
    kernel.run("del os.environ['NBGRADER_EXECUTION']")
    assert f"  {idea}" in said


def test_cells_wait_for_an_exercise_that_fails(kernel: Kernel) -> None:
    kernel.run("%%exercise bubble\ndef bubble(p, m):\n    return 3 / 11")
    waits = '✘ this cell waits for exercise bubble, which is not right yet (2 of 5 points): see check("bubble")'
    for magic in ("%%torchrun -n 2 --needs bubble --out made", "%%ranks 2 --needs bubble", "%%needs bubble"):
        assert kernel.run(f"{magic}\nprint('never')") == (waits, "")
    kernel.run(BUBBLE)
    assert kernel.run("%%needs bubble\nprint('now')") == ("now", "")


def test_a_guess_is_kept_and_shown_again(kernel: Kernel) -> None:
    ask = 'guess("gpus", {}, "How many GPUs?")'
    assert kernel.run(ask.format(None)) == ("○ no guess yet: put a number in place of None", "")
    assert kernel.run(ask.format(12)) == ("✔ your guess: 12", "")
    kernel.run(OPEN.splitlines()[1])
    assert kernel.run('guessed("gpus", 7.3, "GPUs")') == ("it is 7.3 GPUs; you guessed 12", "")
    assert kernel.run(ask.format("'x'")) == ("✘ 'x' is no number: write one in its place, for example 12", "")


def test_what_the_kernel_did_to_torch_does_not_reach_the_check(kernel: Kernel) -> None:
    kernel.run(BUBBLE)
    kernel.run(
        "import torch; before = torch.isclose; torch.isclose = lambda *a, **k: False\ntorch.set_grad_enabled(False)"
    )
    assert "passed" in kernel.run('check("bubble")').text
    kernel.run("torch.isclose = before; torch.set_grad_enabled(True)")


def test_mistakes_in_calling_are_one_message(kernel: Kernel) -> None:
    assert "did you mean `bubble`?" in kernel.run('check("buble")').error
    assert "lab 00_mini has no exercise `nothing`" in kernel.run("%%exercise nothing\nx = 1").error
    assert "there is no lab" in kernel.run("%lab 77_nowhere").error
    assert "SyntaxError" in kernel.run("%%exercise bubble\ndef bubble(p, m):\n    return = 1").error
    assert "SyntaxError" in kernel.run("%%torchrun -n 2\nx = = 1").error
    assert "cannot name a cell" in kernel.run("%%torchrun -n 2 --name torch\nx = 1").error
    assert kernel.run("%%torchrun -n 2 --bogus\nx = 1").text == "UsageError: unrecognized arguments: --bogus"
    assert "'0' is no number of 1 or more" in kernel.run("%%torchrun -n 0\nx = 1").text
    for source in ('check("buble")', "%lab 77_nowhere"):
        assert "Traceback" not in kernel.run(source).error


# ------------------------------------------------------------------------------------------------------ torchrun


@pytest.mark.thorough
def test_torchrun_shows_its_line_and_one_block_a_rank(kernel: Kernel) -> None:
    kernel.run(BUBBLE)
    cell = (
        f"%%torchrun -n 2 --name talk --needs bubble --out run\n{RANK}from exercises.bubble import bubble\n"
        "print('together', bubble(2, 1))\nprint('alone') if rank else None\nreport([rank, world])\nfinish()"
    )
    said = kernel.run(cell)
    assert said.error == ""
    assert said.text.splitlines() == [
        "$ CUDA_VISIBLE_DEVICES= torchrun --standalone --nproc-per-node=2 .work/00_mini/talk.py",
        "2 ranks on CPUs (gloo)",
        "[rank 0] together 0.5",
        "[rank 1] together 0.5",
        "[rank 1] alone",
    ]
    assert kernel.run("run.reports").text == "[[0, 2], [1, 2]]"


@pytest.mark.thorough  # `ranks/test_torchrun` has the words, `test_going_on` an error of ranks under the magic
def test_torchrun_says_who_failed_and_where(kernel: Kernel) -> None:
    cell = f"{RANK}if rank == 1:\n    raise ValueError('planted')\ndist.barrier()\nfinish()"
    said = kernel.run(f"%%torchrun -n 2 --name fails\n{cell}")
    assert said.error.splitlines()[:2] == [
        "FAILED on rank 1: ValueError: planted",
        "  at line 6 of this cell: raise ValueError('planted')",
    ]


@pytest.mark.thorough
def test_a_failure_that_does_not_come_is_an_error(kernel: Kernel) -> None:
    assert "was expected to fail" in kernel.run("%%torchrun -n 1 --expect-failure\nprint(1)").error


@pytest.mark.thorough
def test_torchrun_says_where_each_rank_of_a_hang_waits(kernel: Kernel) -> None:
    said = kernel.run(
        f"%%torchrun -n 2 --name hangs --timeout 2\n{RANK}if rank == 0:\n    dist.recv(torch.ones(1), 1)\nfinish()"
    )
    assert said.error.splitlines()[0].startswith("HANG: not finished 2 s after")
    assert "rank 0: line 6: dist.recv(torch.ones(1), 1)" in said.error and "rank 1: line 7: finish()" in said.error
    assert processes_of(kernel, "hangs") == set()


@pytest.mark.thorough
def test_an_interrupt_leaves_no_rank(kernel: Kernel) -> None:
    message = kernel.start(f"%%torchrun -n 2 --name sleeps\n{RANK}import time\ntime.sleep(600)")
    wait_until(lambda: len(processes_of(kernel, "sleeps")) >= 3, "the ranks did not start", 60)
    kernel.manager.interrupt_kernel()
    said = kernel.wait(message)
    assert said.error == "interrupted; no rank is left running"
    assert processes_of(kernel, "sleeps") == set()
    assert kernel.run("1 + 1").text == "2"


def test_an_interrupted_check_leaves_no_process_and_the_next_works(kernel: Kernel) -> None:
    kernel.run("%%exercise bubble\nimport time\ndef bubble(p, m):\n    time.sleep(600)")
    message = kernel.start('check("bubble")')
    time.sleep(0.7)
    kernel.manager.interrupt_kernel()
    assert "interrupted" in kernel.wait(message).error
    kernel.run(BUBBLE)
    assert "passed" in kernel.run('check("bubble")').text


# --------------------------------------------------------------------------------------------------------- ranks


def test_ranks_know_rank_world_and_report(kernel: Kernel) -> None:
    kernel.run(BUBBLE)
    said = kernel.run(
        "%%ranks 2 --needs bubble --out said\nimport torch.distributed as dist\nfrom exercises.bubble import bubble\n"
        "print('of', world, bubble(2, 1), dist.get_world_size())\nreport(rank * 10)"
    )
    assert said == ("[ranks 0-1] of 2 0.5 2", "")
    assert kernel.run("said").text == "[0, 10]"
    assert kernel.run("%%needs bubble\ntwice = 2 * said\ntwice[2:]").text == "[0, 10]", "shown as in any cell"


def test_ranks_see_the_exercise_as_it_is_now(kernel: Kernel) -> None:
    cell = "%%ranks 2\nfrom exercises.bubble import bubble\nprint(bubble(1, 1))"
    kernel.run("%%exercise bubble\ndef bubble(p, m):\n    return 'old'")
    assert kernel.run(cell).text == "[ranks 0-1] old"
    kernel.run("%%exercise bubble\ndef bubble(p, m):\n    return 'new'")
    assert kernel.run(cell).text == "[ranks 0-1] new"


def test_ranks_say_who_failed_and_where_a_hang_waits(kernel: Kernel) -> None:
    said = kernel.run("%%ranks 2 --name fails2\nif rank == 1:\n    raise ValueError('planted')")
    assert said.error.splitlines() == [
        "FAILED on rank 1: ValueError: planted",
        "  at line 3 of this cell: raise ValueError('planted')",
    ]
    imports = "import torch, torch.distributed as dist"
    wait = "if rank == 0:\n    dist.recv(torch.ones(1), 1)"
    said = kernel.run(f"%%ranks 2 --name hangs2 --timeout 1\n{imports}\n{wait}")
    assert said.error.splitlines() == [
        "HANG: the cell did not finish within 1 s",
        "  rank 0 is at line 4 of this cell: dist.recv(torch.ones(1), 1)",
    ]
    other = "if rank == 0:\n    dist.recv(torch.zeros(2), 1)  # the same file, another text"
    said = kernel.run(f"%%ranks 2 --name hangs2 --timeout 1\n{imports}\n{other}")
    assert said.error.splitlines()[1].startswith("  rank 0 is at line 4 of this cell: dist.recv(torch.zeros(2), 1)")
    assert kernel.run("%%ranks 2\nprint('again')").text == "[ranks 0-1] again"


def test_interrupted_ranks_are_gone_and_the_next_cell_runs(kernel: Kernel, tmp_path: Path) -> None:
    """Also when they wait for each other in C, where Python's handler of the signal cannot run."""
    kernel.run("%%ranks 2\nprint(rank)")
    barrier = "import torch.distributed as dist\nrank or dist.barrier()\nrank and sleep()"
    for stuck in ("sleep()", barrier):
        sign = tmp_path / f"started{len(stuck)}"
        sleep = "import time\nsleep = lambda: time.sleep(600)"
        cell = f"%%ranks 2 --name stuck\n{sleep}\nopen({str(sign)!r}, 'w').close()\n{stuck}"
        message = kernel.start(cell)
        wait_until(sign.exists, "the ranks did not start", 60)
        kernel.manager.interrupt_kernel()
        assert kernel.wait(message).error == "interrupted; no rank is left running"
        assert kernel.run("%%ranks 2\nprint('again', world)").text == "[ranks 0-1] again 2"


def test_what_a_cell_does_to_its_ranks_does_not_reach_the_next(kernel: Kernel) -> None:
    """A cell's names too; `ranks/test_worker` has all that a job may do."""
    probe = (
        "%%ranks 2\nimport builtins, os, sys, torch, torch.distributed as dist\nx = torch.ones(1)\ndist.all_reduce(x)\n"
        "print(torch.get_default_dtype(), os.environ.get('DIRTY'), 'mine' in globals(), hasattr(builtins, 'mine'),"
        " torch.allclose(x, torch.zeros(1)), x.item(), [p for p in sys.path if p == '/nowhere'])"
    )
    clean = kernel.run(probe)
    assert clean == ("[ranks 0-1] torch.float32 None False False False 2.0 []", "")
    for dirt in (
        "import os, sys, torch\ntorch.set_default_dtype(torch.float64)\nmine = 1\nos.environ['DIRTY'] = 'yes'\n"
        "sys.path.append('/nowhere')\nos.chdir('/')",
        "import builtins, torch, torch.distributed as dist\nbuiltins.mine = 1\ntorch.allclose = lambda *a: True\n"
        "rank or dist.all_reduce(torch.full((1,), 1000.0), async_op=True)",
    ):
        assert kernel.run(f"%%ranks 2 --name dirt\n{dirt}").error == ""
        assert kernel.run(probe) == clean, dirt
    assert kernel.run("%%ranks 2 --name dies\nimport os\nos._exit(0)").error.splitlines() == [
        "FAILED: rank 0 left with exit status 0; rank 1 left with exit status 0",
        "  in the middle of the cell",
    ]
    assert kernel.run(probe) == clean


# --------------------------------------------------------------------------------------------------- a dead kernel

ALONE = {SHARED: ""}  # its ranks are its descendants, and not those of a run of tests


@pytest.mark.thorough
def test_a_restart_ends_the_ranks_and_keeps_the_progress(tmp_path: Path) -> None:
    with Kernel(tmp_path, **ALONE) as kernel:
        kernel.run(OPEN)
        kernel.run(BUBBLE)
        kernel.run('check("bubble")')
        sign = tmp_path / "started"
        kernel.start(f"%%ranks 2\nopen({str(sign)!r}, 'w').close()\nimport time\ntime.sleep(600)")
        wait_until(sign.exists, "the ranks did not start", 60)
        family = descendants(kernel.pid)
        kernel.manager.restart_kernel(now=True)
        wait_until(lambda: not [pid for pid in family if alive(pid)], "orphans")
        kernel.client.wait_for_ready(timeout=60)
        said = kernel.run(OPEN).text.splitlines()
        assert said[0] == "lab 00_mini: 5 of 12 points; next: ring_all_reduce" and said[1].startswith("your exercises")
        assert kernel.run("%%ranks 2 --needs bubble\nprint(world)").text == "[ranks 0-1] 2", "no need to check again"
        kernel.run(STUB)
        assert kernel.run("%%ranks 2 --needs bubble\nprint(world)").text == "○ this cell waits for exercise bubble"
        assert kernel.run(OPEN.splitlines()[1]).text.splitlines()[0] == "lab 00_mini: 0 of 12 points; next: bubble"


@pytest.mark.thorough
def test_a_killed_kernel_takes_everything_with_it(tmp_path: Path) -> None:
    with Kernel(tmp_path, **ALONE) as kernel:
        kernel.run(OPEN)
        kernel.run("%%ranks 2\nprint(rank)")
        kernel.run(BUBBLE)
        kernel.run('check("bubble")')
        family = descendants(kernel.pid)
        assert len(family) >= 4, "the nursery, the fork server and its ranks"
        kernel.start(f"%%torchrun -n 2 --name orphans\n{RANK}import time\ntime.sleep(600)")
        wait_until(lambda: len(processes_of(kernel, "orphans")) >= 3, "the ranks did not start", 60)
        family |= descendants(kernel.pid)
        procs.send(kernel.pid, signal.SIGKILL)
        wait_until(lambda: not [pid for pid in family if alive(pid)], "orphans")


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    for child in procs.children(pid):
        found |= {child} | descendants(child)
    return found


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and procs.zombie_status(pid) is None
