"""A hang where no wait raises (NCCL): the same error and status as on gloo, from a thread, before torch's watchdog."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from labkit.ranks.torchrun import launch
from minimegatron.comm import watchdog
from minimegatron.comm.async_ops import Started, Work, blocking, issue
from minimegatron.comm.mesh import Axis
from minimegatron.comm.watchdog import WATCHDOG_SECONDS, Watchdog, group_timeout
from minimegatron.errors import DeadlineError
from minimegatron.launch import blame
from minimegatron.launch import watch as watching
from minimegatron.launch.ledger import Ledger, Position
from minimegatron.launch.watch import Overdue, Watch
from tests.faults import helpers

LAZY = helpers.VICTIM.with_name("lazy.py")
DP = Axis("dp", (0, 1, 2), 0)


class Handle:
    def __init__(self) -> None:
        self.arrived = False

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return self.arrived


def begin(op: str, handle: Handle | None = None) -> Work:
    return issue(Work(None, op, DP), lambda _: Started([handle or Handle()]))


@pytest.fixture
def calls() -> Iterator[Watchdog]:
    watchdog.watch("nccl", 0.05)
    running = watchdog.running()
    assert running is not None
    yield running
    watchdog.watch("gloo", 0.05)


def test_what_was_called_stays_on_the_list_until_it_has_arrived(calls: Watchdog) -> None:
    first, second = Handle(), Handle()
    work = begin("all_reduce", first)
    begin("all_gather", second).wait()
    work.wait()
    assert calls.oldest() == ("all_reduce", "dp", (0, 1, 2))
    assert calls.oldest(seconds=60) is None
    first.arrived = True
    assert (oldest := calls.oldest()) is not None and oldest.op == "all_gather"
    second.arrived = True
    assert calls.oldest() is None
    begin("all_reduce")
    assert len(calls._entries) == 1, "what has arrived is forgotten at the next call"


def test_a_call_that_does_not_return_is_on_the_list(calls: Watchdog) -> None:
    def connects(_: Any) -> Started:
        assert (oldest := calls.oldest()) is not None and oldest.op == "all_reduce"
        raise ConnectionError("the rank's own error")

    with pytest.raises(ConnectionError):
        issue(Work(None, "all_reduce", DP), connects)
    assert calls.oldest() is None
    with blocking("all_gather_object", DP):
        assert (oldest := calls.oldest()) is not None and oldest.op == "all_gather_object"
    assert calls.oldest() is None


def test_a_group_that_may_take_longer_is_waited_for_longer(calls: Watchdog) -> None:
    begin("all_reduce")
    time.sleep(0.06)
    assert (late := calls.overdue()) is not None and late[1] == 0.05
    watchdog.allow(60)
    assert calls.overdue() is None


def test_gloo_keeps_no_list_and_its_own_deadline(calls: Watchdog) -> None:
    watchdog.watch("gloo", 0.05)
    begin("all_reduce")
    assert watchdog.running() is None and calls.oldest() is None
    assert group_timeout(20, "gloo").total_seconds() == 20
    assert group_timeout(20, "nccl").total_seconds() == 20 + WATCHDOG_SECONDS


def test_the_watch_finds_what_is_overdue_and_answers_with_what_is_under_way(calls: Watchdog) -> None:
    ledger, found = Ledger(dist.HashStore(), 0, 3), list[Overdue]()
    watch = Watch(ledger, {}, print, found.append)
    try:
        begin("all_reduce")
        ledger.ask()
        watch._look()
        assert found == [] and ledger.answers([0], 0)[0][:3] == ("all_reduce", "dp", (0, 1, 2))
        time.sleep(0.06)
        watch._look()
    finally:
        watch.start()
        watch.stop()
    assert found[0].position[:3] == ("all_reduce", "dp", (0, 1, 2))


def test_without_a_store_the_watch_ends_its_rank_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 served the store and was killed: the ledger cannot say it, and a rank may wait where nothing ends."""

    class Gone(Ledger):
        def cause(self) -> Any:
            raise dist.DistNetworkError("Connection reset by peer")

    said, left = list[str](), list[int]()
    monkeypatch.setattr(watching, "FAILED_SECONDS", 0.0)
    monkeypatch.setattr(watching.os, "_exit", left.append)
    watch = Watch(Gone(dist.HashStore(), 1, 2), {}, said.append, lambda _: None)
    watch.start()
    helpers.wait_for(lambda: left, 20, "the rank is ended")
    watch.stop()
    assert left == [5] and said[0].startswith(
        "rank 1 ends because the store of the job is gone: rank 0 or the launcher"
    )


def test_the_error_names_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blame, "CAUSE_SECONDS", 0.1)
    store = dist.HashStore()
    Ledger(store, 2, 3).answer(Position("all_reduce", "dp", (0, 1, 2), "step.py:7"))
    late = Overdue(Position("all_reduce", "dp", (0, 1, 2), "step.py:7"), 2.0)
    error, silent = blame._missing(late, Ledger(store, 0, 3), 2.0)
    assert isinstance(error, DeadlineError) and silent == [1]
    assert error.what == "all_reduce over dp (ranks 0-2): rank 1 did not come within 2 s"


def test_the_end_of_a_chain_of_waiting_ranks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3 waits for 2, which waits for 1, which waits for 0, which sleeps: `is at`, or does not answer."""
    monkeypatch.setattr(blame, "CAUSE_SECONDS", 0.1)
    for sleeps in (True, False):
        store = dist.HashStore()
        places = {r: Position(f"receive F7 from rank {r - 1}", "pp", (r - 1, r), "step.py:7") for r in (1, 2, 3)}
        places |= {0: Position("", "", (), "data.py:3")} if sleeps else {}
        for r, place in places.items():
            Ledger(store, r, 4).answer(place)
        error, silent = blame._missing(Overdue(places[3], 2.0), Ledger(store, 3, 4), 2.0)
        assert isinstance(error, DeadlineError) and silent == ([] if sleeps else [0])
        assert error.what.endswith("rank 2 did not come, which waits for rank 0, within 2 s")
        assert ("rank 0 is at data.py:3" if sleeps else "rank 0 does not answer") in error.where


# ------------------------------------------------------------------------------------------------- whole runs


def run_victim(folder: Path, *args: str, timeout: str = "2") -> Any:
    return launch(LAZY, 3, folder, timeout=90, args=args, env={"TIMEOUT": timeout})


@pytest.mark.thorough
@pytest.mark.parametrize("what", ["SIGSTOP", "sleep"])
def test_a_rank_that_does_not_come_is_named_with_status_7(tmp_path: Path, what: str) -> None:
    begun = time.monotonic()
    run = run_victim(tmp_path, helpers.FOREVER, "1", "7", what)
    assert run.returncode == 7, run.explain() + "".join(run.stderr)
    assert "DeadlineError: all_reduce over dp (ranks 0-2): rank 1 did not come within 2 s" in run.explain()
    assert sum(text.count("DeadlineError") for text in run.stderr) == 1
    assert time.monotonic() - begun < 60
    helpers.everything_gone(str(tmp_path), 1)


@pytest.mark.thorough
def test_a_message_that_does_not_come_is_named(tmp_path: Path) -> None:
    run = run_victim(tmp_path, helpers.FOREVER, "0", "7", "pp-SIGSTOP")
    assert run.returncode == 7, run.explain() + "".join(run.stderr)
    missing = ("rank 0 did not come within 2 s", "rank 1 did not come, which waits for rank 0, within 2 s")
    assert any(words in run.explain() for words in missing) and "rank 0 does not answer (stopped?)" in run.explain()
    helpers.everything_gone(str(tmp_path), 1)


@pytest.mark.thorough
def test_a_rank_that_is_killed_is_named_with_status_5(tmp_path: Path) -> None:
    run = run_victim(tmp_path, helpers.FOREVER, "2", "7", "SIGKILL", timeout="20")
    assert run.returncode == 5 and run.explain().startswith("FAILED: rank 2 was killed by SIGKILL")
    helpers.everything_gone(str(tmp_path), 1)


@pytest.mark.thorough
def test_a_run_that_is_idle_for_longer_than_the_deadline_is_no_hang(tmp_path: Path) -> None:
    run = run_victim(tmp_path, "20", "-1", "7", "idle")
    assert run.returncode == 0, run.explain() + "".join(run.stderr)
    assert run.stdout == ["done 57\n"] * 3
