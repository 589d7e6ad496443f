"""Fresh processes: answers come back as plain data, and every other end is seen, named and cleaned up."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import mmap
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from labkit import plain, sandbox
from labkit.fresh import Nursery
from labkit.nursery import Failed, Limits
from minimegatron.errors import RankError
from tests.thorough import mostly_thorough

ENOUGH = Limits()
LARGE = 1 << 21  # bytes of a large page


def echo(rank: int, world: int, job: Any) -> Any:
    return {"rank": rank, "world": world, "job": job}


def misbehave(rank: int, world: int, job: Any) -> Any:
    """Runs the source it is given, in the fresh process."""
    exec(job, {"os": os, "signal": signal, "time": time, "sys": sys, "Failed": Failed, "is_pipe": is_pipe})
    return "answered"


def is_pipe(descriptor: int) -> bool:
    try:
        return stat.S_ISFIFO(os.fstat(descriptor).st_mode)
    except OSError:
        return False


def test_ranks_get_their_jobs_and_answer_in_order(nursery: Nursery) -> None:
    replies = nursery.call(echo, [torch.ones(2), [1, "two"], None], ENOUGH)
    assert [reply.value["rank"] for reply in replies] == [0, 1, 2]
    assert torch.equal(replies[0].value["job"], torch.ones(2)) and replies[1].value["job"] == [1, "two"]
    assert all(reply.value["world"] == 3 and reply.ended == "" for reply in replies)


ENDS = [
    ("os._exit(0)", "left with exit status 0"),
    ("os._exit(3)", "left with exit status 3"),
    ("sys.exit(0)", "left with exit status 70"),
    ("raise ValueError", "left with exit status 70"),
    ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
    ("os.killpg(0, signal.SIGTERM)", "was killed by SIGTERM"),
    ("import ctypes; ctypes.string_at(0)", "was killed by SIGSEGV"),
    ("while True: pass", "late"),
    ("time.sleep(1000)", "late"),
    ("os.kill(os.getpid(), signal.SIGSTOP)", "late"),
    ("[signal.signal(s, signal.SIG_IGN) for s in (2, 6, 15)]; time.sleep(99)", "late"),
    ("bytearray(20 << 30)", "left with exit status 70"),
    ("open('big', 'wb').write(bytes(65 << 20))", "left with exit status 70"),
    ("[os.write(fd, b'no json' + bytes([10])) for fd in range(3, 9) if is_pipe(fd)]", "sent what cannot be read: not"),
]  # fmt: skip


LATE = mostly_thorough(ENDS, [1, 3, 4, 6, 7, 11, 12, 13])


@pytest.mark.parametrize(("source", "ended"), LATE)
def test_every_other_end_is_named(nursery: Nursery, source: str, ended: str) -> None:
    [reply] = nursery.call(misbehave, [source], Limits(seconds=0.3) if ended == "late" else ENOUGH)
    assert reply.value is None and reply.ended.startswith(ended)
    [reply] = nursery.call(echo, [7], ENOUGH)
    assert reply.value["job"] == 7, "the nursery must survive"


def test_a_late_rank_says_where_it_is(nursery: Nursery) -> None:
    busy, idle = nursery.call(misbehave, ["def wait():\n    while True: pass\nwait()", "pass"], Limits(seconds=0.5))
    assert busy.ended == "late" and [(f.line, f.function) for f in busy.stack[:2]] == [(2, "wait"), (3, "<module>")]
    assert idle.value == "answered"


def test_who_fails_answers_and_leaves(nursery: Nursery) -> None:
    [reply] = nursery.call(misbehave, ["raise Failed({'why': 'planted'})"], ENOUGH)
    assert reply.value == {"why": "planted"}


@pytest.mark.parametrize("error", [ProcessLookupError, PermissionError])
def test_a_rank_may_end_before_it_is_taken_hold_of(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
) -> None:
    def pidfd_open(pid: int) -> int:
        raise error

    monkeypatch.setattr(os, "pidfd_open", pidfd_open, raising=False)
    [reply] = nursery.call(misbehave, ["raise Failed('at once')"], ENOUGH)
    assert reply.value == "at once"


def test_a_rank_holds_nothing_of_others(nursery: Nursery) -> None:
    """Standard streams, its answer, its stack: no socket of the nursery, no job, no end of another rank."""
    for reply in nursery.call(descriptors, [None] * 3, ENOUGH):
        assert list(reply.value)[:3] == [0, 1, 2]
        assert list(reply.value.values())[3:] == ["pipe", "pipe"]


def descriptors(rank: int, world: int, job: None) -> dict[int, str]:
    """{descriptor: kind} of all that are open."""
    found = {}
    for descriptor in range(4096):
        with contextlib.suppress(OSError):
            mode = os.fstat(descriptor).st_mode
            found[descriptor] = "pipe" if stat.S_ISFIFO(mode) else "socket" if stat.S_ISSOCK(mode) else "other"
    return found


def waits(rank: int, world: int, job: str) -> str:
    """On loopback, for a rank that never comes; or at work."""
    import threading

    if rank == 0 and job == "returns":
        return "returned"
    if rank == 0 and job == "computes":
        end = time.monotonic() + 6
        while time.monotonic() < end:
            sum(range(1000))
        return "computed"
    if rank == 0 and job == "sleeps now and then":
        for _ in range(60):
            time.sleep(0.1)
            sum(range(100_000))
        return "slept"
    threading.Event().wait(30)
    return "waited"


@pytest.mark.parametrize(
    ("job", "ends"),
    [
        ("all wait", ["stuck", "stuck"]),
        ("returns", ["", "stuck"]),
        pytest.param("computes", ["", "stuck"], marks=pytest.mark.thorough),
        pytest.param("sleeps now and then", ["", "stuck"], marks=pytest.mark.thorough),
    ],
)
def test_ranks_that_only_wait_are_not_waited_for(nursery: Nursery, job: str, ends: list[str]) -> None:
    replies = nursery.call(waits, [job] * 2, Limits(seconds=25))
    assert [reply.ended for reply in replies] == ends
    assert any(frame.function == "waits" for frame in replies[1].stack)


def says(rank: int, world: int, job: str) -> Iterator[Any]:
    """Two values; then it ends as the job says."""
    yield {"rank": rank}
    yield torch.ones(2)
    if job == "waits":
        waits(rank, world, job)
    elif job != "ends":
        exec(job, {"os": os})


@pytest.mark.parametrize(
    ("job", "ended"),
    [
        ("ends", ""),
        ("os._exit(3)", "left with exit status 3"),
        pytest.param("waits", "stuck", marks=pytest.mark.thorough),
    ],
)
def test_what_a_generator_has_yielded_is_known_whatever_comes_then(nursery: Nursery, job: str, ended: str) -> None:
    [reply] = nursery.call(says, [job], ENOUGH)
    first, second = reply.value
    assert first == {"rank": 0} and torch.equal(second, torch.ones(2)) and reply.ended == ended


def test_half_a_value_is_none(nursery: Nursery) -> None:
    """Of whatever a process writes into its pipe."""
    source = "for fd in range(3, 64):\n if is_pipe(fd): os.write(fd, {!r})\nos._exit(0)"
    for text, value in ((b"[1]\x1e[2", [[1]]), (b"[\x1e", None), (b"\x1e\x1e", None)):
        [reply] = nursery.call(misbehave, [source.format(text)], ENOUGH)
        assert (reply.value, reply.ended) == (value, "left with exit status 0")


def test_ranks_share_a_folder_that_goes(nursery: Nursery) -> None:
    first, second = nursery.call(shares, [None] * 2, ENOUGH)
    assert first.value == second.value == ["from 0", "from 1"]


def shares(rank: int, world: int, job: None) -> list[str]:
    folder = sandbox.shared_folder()
    (folder / f"new.{rank}").write_text(f"from {rank}")
    (folder / f"new.{rank}").rename(folder / f"file.{rank}")
    while len(list(folder.glob("file.*"))) < world:
        time.sleep(0.01)
    return [(folder / f"file.{one}").read_text() for one in range(world)]


def test_an_answer_too_long_is_no_answer(nursery: Nursery) -> None:
    [reply] = nursery.call(echo, ["x" * 5000], Limits(seconds=2.0, answer=1000))
    assert reply.value is None and reply.ended == "sent more than an answer may be"


def test_the_outside_is_not_seen(nursery: Nursery) -> None:
    source = "raise Failed([dict(os.environ), os.getcwd(), os.listdir(), open('/proc/self/environ').read()])"
    [reply] = nursery.call(misbehave, [source], ENOUGH)
    environment, folder, files, start = reply.value
    assert "hunter2" not in str(environment) + start and environment["HOME"] == folder
    assert files == []
    assert not Path(folder).exists()


@pytest.mark.thorough
def test_an_exercise_is_judged_with_the_instructions_of_the_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    source = "import torch; raise Failed(torch.backends.cpu.get_cpu_capability())"
    with Nursery() as server:
        [reply] = server.call(misbehave, [source], ENOUGH)
    assert reply.value in ("DEFAULT", "NO AVX")


def test_nothing_outlives_a_job(nursery: Nursery, tmp_path: Path) -> None:
    """Children of a rank die with it, and its folder goes."""
    note = str(tmp_path / "pid")
    source = f"pid = os.fork()\nif pid == 0: time.sleep(60)\nopen({note!r}, 'w').write(str(pid))\ntime.sleep(60)"
    nursery.call(misbehave, [source], Limits(seconds=0.5))
    pid = int((tmp_path / "pid").read_text())
    for _ in range(100):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().split()[2] == "Z":
            break
        time.sleep(0.02)
    else:
        pytest.fail("a grandchild lives on")


@pytest.mark.thorough
def test_a_nursery_that_is_killed_or_given_up_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is given up when an error of the caller's interrupts it; and none of the three leaves a folder."""

    def between(question: Any) -> Any:
        raise KeyError("between")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Nursery() as mine:
        with pytest.raises(KeyError, match="between"):
            mine.confer(converse, 1, ENOUGH, between)
        assert mine.call(echo, [1], ENOUGH)[0].ended == ""
        assert mine._server is not None
        with pytest.raises(RankError):
            mine.call(
                misbehave, [f"os.kill({mine._server.process.pid}, signal.SIGKILL); time.sleep(60)"], Limits(seconds=1.0)
            )
        [reply] = mine.call(echo, [2], ENOUGH)
        assert reply.value["job"] == 2
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
def test_all_end_when_the_caller_is_killed(tmp_path: Path) -> None:
    source = f"open({str(tmp_path / 'up')!r}, 'w').write(str(os.getpid())); time.sleep(99)"
    code = (
        "from labkit.fresh import Nursery; from labkit.nursery import Limits\n"
        f"from tests.labkit.test_fresh import misbehave; Nursery().call(misbehave, [{source!r}], Limits(60.0))"
    )
    root = str(Path(__file__).resolve().parents[2])
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "PYTHONPATH": root, "TMPDIR": str(scratch)}
    caller = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "up").exists() or not (tmp_path / "up").read_text():
            assert time.monotonic() < deadline and caller.poll() is None
            time.sleep(0.05)
    finally:
        caller.kill()
        caller.wait(10)
    rank = Path("/proc") / (tmp_path / "up").read_text()
    deadline = time.monotonic() + 5
    while rank.exists() and rank.joinpath("stat").read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the rank outlives its caller"
        time.sleep(0.02)
    while list(scratch.iterdir()):
        assert time.monotonic() < deadline, "its folder outlives its caller"
        time.sleep(0.02)


def test_no_folder_is_left(nursery: Nursery) -> None:
    """Of a job; the nursery's own goes with it, see above."""
    folder = Path(nursery.warm_up().folder)
    nursery.call(echo, [1, 2], ENOUGH)
    nursery.call(untidy, [1], ENOUGH)
    assert folder.is_dir() and not list(folder.glob("*/")) and len(list(folder.parent.iterdir())) == 1


def untidy(rank: int, world: int, job: int) -> None:
    """Folders deeper than a path may be long, and one that nobody may enter."""
    os.mkdir("closed")
    Path("closed/file").write_text("x")
    os.chmod("closed", 0)
    for _ in range(2100):
        os.mkdir("d")
        os.chdir("d")


def test_the_disk_has_a_limit(nursery: Nursery) -> None:
    small = dataclasses.replace(ENOUGH, disk=1 << 20)
    replies = nursery.call(fill, [{"many": True}, {"many": False}], small)
    assert {reply.ended for reply in replies} == {"wrote more than 1 MiB of files"}


def fill(rank: int, world: int, job: dict[str, bool]) -> None:
    for i in range(100 if job["many"] else 0):
        Path(f"file{i}").write_bytes(bytes(100_000))
    time.sleep(1000)


def frozen(rank: int, world: int, job: None) -> int:
    return gc.get_freeze_count()


def test_a_garbage_collection_of_a_rank_looks_at_nothing_that_all_share(nursery: Nursery) -> None:
    [reply] = nursery.call(frozen, [None], Limits())
    assert reply.value > 100_000


def converse(control: socket.socket, job: Any) -> Any:
    """Ask for what is twice the job, in a process of the judge's own."""
    if job == "ends":
        os._exit(3)
    if job == "fails":
        raise Failed("no question")
    return ["answered", os.getpid(), plain.confer(control, [job, os.getpid()])]


def test_a_process_asks_on_the_way_and_goes_on_with_the_answer(nursery: Nursery) -> None:
    asked, pids = [], []

    def between(question: Any) -> Any:
        asked.append(question)
        pids.append(nursery.call(pid_of, [None], ENOUGH)[0].value)
        return {"tensor": 2 * question[0]}

    reply = nursery.confer(converse, torch.ones(3), ENOUGH, between)
    said, pid, given = reply.value
    assert (reply.ended, said) == ("", "answered") and torch.equal(given["tensor"], torch.full((3,), 2.0))
    assert asked[0][1] == pid, "the process that asked is the one that answers"
    assert pids[0] != pid
    for one in (pid, pids[0]):
        assert not Path(f"/proc/{one}").exists() or sys.platform != "linux"


def pid_of(rank: int, world: int, job: Any) -> int:
    return os.getpid()


@pytest.mark.parametrize(
    ("job", "value", "ended"), [("ends", None, "left with exit status 3"), ("fails", "no question", "")]
)
def test_a_process_that_asks_nothing_is_not_waited_for(nursery: Nursery, job: str, value: Any, ended: str) -> None:
    reply = nursery.confer(converse, job, ENOUGH, lambda question: pytest.fail("it asked nothing"))
    assert (reply.value, reply.ended) == (value, ended)
    assert nursery.call(echo, [1], ENOUGH)[0].ended == ""


def can_gather() -> bool:
    """Whether this kernel makes large pages of small ones when it is asked to."""
    if sys.platform != "linux":
        return False
    with mmap.mmap(-1, 4 * LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.write(b"x" * len(memory))
        first = ctypes.addressof(held := ctypes.c_char.from_buffer(memory))
        start = -(-first // LARGE) * LARGE
        done = ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(LARGE), 25)
        del held
    return done == 0


@pytest.mark.skipif(not can_gather(), reason="this kernel has no MADV_COLLAPSE")
def test_ranks_share_large_pages(nursery: Nursery) -> None:
    nursery.call(echo, [1], ENOUGH)
    sizes = Path(f"/proc/{nursery.warm_up().process.pid}/smaps_rollup").read_text()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in sizes.splitlines()[1:]}
    assert kib["AnonHugePages"] > kib["Anonymous"] // 8  # a machine that is short of whole pages gives fewer
