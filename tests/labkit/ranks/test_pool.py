"""Warm ranks: results, the first cause of a failure, and a pool that is whole again afterwards."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from labkit.fresh import Nursery
from labkit.ranks.agent import marked
from labkit.ranks.fork_server import SHARED, Mail, send, share, trunk
from labkit.ranks.pool import WarmPool, shared_pool, this_process
from labkit.ranks.torchrun import Run, launch
from minimegatron.errors import ConfigError, DeadlineError, RankError
from minimegatron.launch import procs
from tests.faults import helpers
from tests.thorough import mostly_thorough


def add_up(rank: int, world: int, x: torch.Tensor, times: int = 1) -> list[float]:
    dist.all_reduce(x)
    print(f"rank {rank} of {world}")
    return (x * times).tolist()


def pids(rank: int, world: int) -> int:
    return os.getpid()


def fail(rank: int, world: int, how: str) -> None:
    if how == "everywhere":
        raise ValueError("the same")
    if rank == 1:
        if how == "raise":
            print("before")
            raise ConfigError("tp is 3", fix="choose 2")
        if how == "exit":
            sys.exit(3)
        if how == "_exit":
            os._exit(0)
        if how == "unpicklable":
            raise Unpicklable()
        if how == "sleep":
            time.sleep(100)
        if how.startswith("SIG"):
            os.kill(os.getpid(), getattr(signal, how))
    dist.all_reduce(torch.ones(3))


class Unpicklable(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not this one")


def habits(rank: int, world: int) -> tuple[int, bool, bool]:
    """Its policy; whether garbage is collected, and without what all ranks share."""
    policy = os.sched_getscheduler(0) if sys.platform == "linux" else 0
    return policy, gc.isenabled(), gc.get_freeze_count() > 100_000


def return_lambda(rank: int, world: int) -> Any:
    return lambda: None


def late_message(rank: int, world: int) -> None:
    """Leave a collective begun on rank 0 only: what would the next job receive?"""
    if rank == 0:
        dist.all_reduce(torch.full((3,), 1000.0), async_op=True)


def group_of_a_distributed_tensor(rank: int, world: int, groups_before: int) -> bool:
    """Whether the result of an operation is on the mesh of this job, and not on an equal one of the job before."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    for _ in range(groups_before):
        dist.new_group(list(range(world)))
    mesh = DeviceMesh.from_group(dist.new_group(list(range(world))), "cpu", mesh_dim_names=("dp",))
    result = torch.nn.Parameter(DTensor.from_local(torch.ones(2), mesh))
    return result.device_mesh.get_group().group_name == mesh.get_group().group_name


def works(pool: WarmPool) -> bool:
    n = pool.nranks
    return pool.run(add_up, torch.ones(3), timeout=20) == [[float(n)] * 3] * n


def test_results_and_output_come_by_rank(ranks: Any) -> None:
    results = ranks(3).run(add_up, torch.arange(2.0), times=10, timeout=20)
    assert results == [[0.0, 30.0]] * 3
    assert results.stdout == [f"rank {r} of 3\n" for r in range(3)]
    assert ranks(3).run(pids, timeout=20).stdout == ["", "", ""]


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("raise", "rank 1 raised ConfigError: tp is 3"),
        ("exit", "rank 1 raised SystemExit: 3"),
        ("unpicklable", "rank 1 raised Unpicklable: "),
        ("everywhere", "ranks 0-2 raised ValueError: the same"),
        ("_exit", "rank 1 left with exit status 0\n  where: in the middle of fail"),
        ("SIGKILL", "rank 1 was killed by SIGKILL\n  where: in the middle of fail"),
        pytest.param("SIGSEGV", "rank 1 was killed by SIGSEGV\n  where: in the middle", marks=pytest.mark.thorough),
    ],
)
def test_the_first_cause_is_raised_and_the_pool_heals(ranks: Any, how: str, said: str) -> None:
    pool = ranks(3)
    with pytest.raises(RankError) as caught:
        pool.run(fail, how, timeout=20)
    assert str(caught.value).startswith(said)
    assert works(pool)


def test_an_error_brings_its_line_its_traceback_and_itself(ranks: Any) -> None:
    with pytest.raises(RankError) as caught:
        ranks(3).run(fail, "raise", timeout=20)
    error = caught.value
    assert 'in fail: raise ConfigError("tp is 3", fix="choose 2")' in error.where
    assert error.where.endswith("; ranks 0, 2 then lost the connection: a consequence, not the cause")
    assert error.__notes__[0].startswith("On rank 1:\nTraceback") and "worker.py" not in error.__notes__[0]
    assert isinstance(error.__cause__, ConfigError) and error.__cause__.fix == "choose 2"
    assert ranks(3).stdout == ["", "before\n", ""]


@pytest.mark.parametrize(
    ("how", "late"),
    [("sleep", "in fail: time.sleep(100)"), ("SIGSTOP", "does not answer (stopped, or stuck in the kernel)")],
)
def test_a_deadline_names_who_kept_whom_waiting_and_where(ranks: Any, how: str, late: str) -> None:
    pool = ranks(3)
    with pytest.raises(DeadlineError) as caught:
        pool.run(fail, how, timeout=1)
    assert caught.value.what == "rank 1 kept ranks 0, 2 waiting: fail did not finish within 1 s"
    first, *others = caught.value.where.split("; ")
    assert first.startswith("rank 1 ") and first.endswith(late)
    assert [o.partition(" is at ")[0] for o in others] == ["rank 0", "rank 2"]
    assert all(o.endswith("in fail: dist.all_reduce(torch.ones(3))") for o in others)
    assert works(pool)


def test_only_the_ranks_that_failed_to_answer_are_replaced(ranks: Any) -> None:
    pool = ranks(3)
    before = pool.run(pids, timeout=20)
    with pytest.raises(RankError):
        pool.run(fail, "raise", timeout=20)
    assert pool.run(pids, timeout=20) == before
    with pytest.raises(RankError):
        pool.run(fail, "SIGKILL", timeout=20)
    after = pool.run(pids, timeout=20)
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]


def test_no_message_of_a_job_arrives_in_the_next(ranks: Any) -> None:
    pool = ranks(2)
    for _ in range(3):
        pool.run(late_message, timeout=20)
        assert works(pool)


def test_a_distributed_tensor_is_of_no_earlier_job(ranks: Any) -> None:
    assert list(ranks(2).run(group_of_a_distributed_tensor, 0)) == [True, True]
    assert list(ranks(2).run(group_of_a_distributed_tensor, 2)) == [True, True]


@pytest.mark.parametrize("times", mostly_thorough([10, 100], [0]))
def test_a_job_that_ends_at_once_ends_after_all_have_met(ranks: Any, times: int) -> None:
    """gloo lets a rank go on while others still connect; one that then left took their connections away (1 in 30)."""
    pool = ranks(3)
    for _ in range(times):
        # a result that cannot travel is the ranks' error
        with pytest.raises(RankError, match="ranks 0-2 raised (PicklingError|AttributeError)"):
            pool.run(return_lambda, timeout=20)
    assert works(pool)


def test_ranks_are_batch_jobs_and_collect_garbage(ranks: Any) -> None:
    policies, *collected = zip(*ranks(2).run(habits, timeout=20), strict=True)
    assert collected == [(True, True)] * 2
    assert sys.platform != "linux" or policies == (os.SCHED_BATCH, os.SCHED_BATCH)


def test_megabytes_travel(ranks: Any) -> None:
    x = torch.arange(500_000.0)
    assert ranks(2).run(add_up, x, timeout=20)[1] == (2 * x).tolist()


def test_what_cannot_be_imported_by_a_rank_is_refused_at_once(ranks: Any) -> None:
    def inner(rank: int, world: int) -> None: ...

    for fn in (inner, lambda rank, world: None):
        with pytest.raises(ConfigError, match="cannot be sent to the ranks"):
            ranks(2).run(fn)
    main_function = type(works)(works.__code__, {}, "f")
    main_function.__module__ = "__main__"
    with pytest.raises(ConfigError, match="lives in the main program"):
        ranks(2).run(main_function)
    with pytest.raises(ConfigError, match="a pool of 0 ranks"):
        WarmPool(0)


def test_ctrl_c_ends_the_job_and_the_pool_goes_on(ranks: Any) -> None:
    pool = ranks(2)
    before = pool.run(pids, timeout=20)
    timer = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.run(fail, "sleep", timeout=60)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, timer)
    assert works(pool)
    helpers.wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in before), 10, "the ranks to end")


def test_a_pool_ends_its_ranks_and_is_then_closed() -> None:
    with WarmPool(2) as pool:
        ended = pool.run(pids, timeout=20)
        assert works(pool)
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ended)
    pool.close()
    with pytest.raises(ConfigError, match="closed"):
        pool.run(pids)


def test_shared_pools_are_kept_and_all_pools_have_one_server() -> None:
    server = this_process().running_server()
    assert shared_pool(2) is shared_pool(2) is not shared_pool(2, fingerprints=True)
    with WarmPool(1):
        assert this_process().running_server() is server


def test_messages_that_arrive_at_once_are_several(tmp_path: Path) -> None:
    """As a trunk finds them when it has imported, and its answers find a process that waited for them."""
    near, far = socket.socketpair()
    with near, far, open(tmp_path / "a", "w") as a, open(tmp_path / "b", "w") as b:
        for message, files in (("first", []), ("second", [a]), ("third", []), ("fourth", [b, a])):
            send(near, message, [file.fileno() for file in files])
        mail, messages, descriptors = Mail(far), list[str](), list[int]()
        while len(messages) < 4:
            messages += mail.arrived()
        for number, names in ((1, "a"), (2, "ba")):
            descriptors += (fds := mail.fds(number))
            assert [os.readlink(f"/proc/self/fd/{fd}")[-1] for fd in fds] == list(names)
    for descriptor in descriptors:
        os.close(descriptor)
    assert messages == ["first", "second", "third", "fourth"]


def test_warm_ranks_and_the_judges_processes_have_one_trunk(nursery: Nursery) -> None:
    """What imports torch is one process."""
    assert nursery.warm_up().trunk is this_process().running_server().trunk is trunk()


CHILD = """
import os, signal
from labkit.ranks import fork_server
first = fork_server.trunk()
pids = [first.process.pid]
assert first.children() == [] and first.process.poll() is None
first.process.kill()
assert first.process.wait(20) == -signal.SIGKILL
pids.append(fork_server.trunk().process.pid)
assert fork_server.trunk().process.poll() is None
os.environ["PATH"] += ":/elsewhere"
assert fork_server._shared(fork_server._environment()) is None, "a trunk has one environment"
print(*pids)
"""


def test_processes_share_a_trunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a fork of it, gets another when that has died, and takes its own with it."""
    monkeypatch.setenv(SHARED, "")  # to be as before afterwards
    with tempfile.TemporaryDirectory() as folder:
        share(folder)
        said = subprocess.run([sys.executable, "-c", CHILD], text=True, capture_output=True, timeout=60)
        assert (said.returncode, said.stderr) == (0, "")
        first, second = map(int, said.stdout.split())
        assert first != second
        helpers.wait_for(lambda: not any(map(helpers.alive, (first, second))), 10, "both to end")


def test_ranks_see_the_callers_environment_and_directory(
    ranks: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("MINIMEGATRON_TEST", "here")
    monkeypatch.chdir(tmp_path)
    assert ranks(1).run(surroundings, timeout=20) == [("here", str(tmp_path), "1", 1)]


def surroundings(rank: int, world: int) -> tuple[str | None, str, str | None, int]:
    return os.environ.get("MINIMEGATRON_TEST"), os.getcwd(), os.environ.get("OMP_NUM_THREADS"), torch.get_num_threads()


def chatter(rank: int, world: int, text: str) -> None:
    print(text * (rank + 1))


def test_what_a_job_prints_begins_at_the_beginning(ranks):
    """The log is emptied before each job; writing on at the old offset would leave a hole of zero bytes."""
    for text in ("a long first line, ", "short "):
        printed = ranks(2).run(chatter, text).stdout
        assert printed == [f"{text}\n", f"{text * 2}\n"]


# ---------------------------------------------------------------------------------- several at once, and in a row


def wait_at(rank: int, world: int, folder: str) -> tuple[int, set[str]]:
    """Stay until told, so that somebody can look; who I am, and where I listen."""
    Path(folder, f"pool.{rank}").touch()
    helpers.wait_for(lambda: Path(folder, "go").exists(), 60, "the word to go")
    return os.getpid(), helpers.listening([os.getpid()])


def rank_id(rank: int, world: int) -> int:
    return rank


def occupied(port: int) -> socket.socket | None:
    try:
        return socket.create_server(("", port))
    except OSError:  # somebody else occupies it already, which does as well
        return None


@pytest.mark.thorough
def test_jobs_at_once_with_the_usual_ports_taken_listen_on_loopback_only(tmp_path: Path) -> None:
    sockets = [occupied(port) for port in (29500, 2333)]
    folders = [tmp_path / name for name in ("a", "b", "c")]
    try:
        with WarmPool(2) as pool, concurrent.futures.ThreadPoolExecutor(3) as threads:

            def start(folder: Path) -> Run:
                return launch(helpers.VICTIM, 2, folder, timeout=60, args=["150"])

            runs = [threads.submit(start, folder) for folder in folders[:2]]
            folders[2].mkdir()
            job = threads.submit(pool.run, wait_at, str(folders[2]), timeout=60)
            for folder in folders[:2]:
                helpers.all_checked_in(folder, 2)
            addresses = helpers.listening(list(marked(f"MINIMEGATRON_RUN_DIR={tmp_path}")))
            (folders[2] / "go").touch()
            assert [run.result(60).explain() for run in runs] == ["", ""]
            addresses |= {address for _, heard in job.result(60) for address in heard}
    finally:
        for held in filter(None, sockets):
            held.close()
    assert addresses == {"0100007F"}, addresses  # 127.0.0.1


def test_starting_and_stopping_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def possessions() -> tuple[int, int, int, set[str]]:
        temporary = set(os.listdir(tmp_path))
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(procs.children(os.getpid())), temporary

    def cycle() -> None:
        with WarmPool(2) as pool:
            assert pool.run(rank_id, timeout=20) == [0, 1]

    cycle()
    first, memory = possessions(), resident()
    for _ in range(4):
        cycle()
    assert possessions() == first
    assert resident() < 1.05 * memory


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1])
