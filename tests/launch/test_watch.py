"""The thread beside a rank, and the watchdog of communications where no wait raises (NCCL)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from minimegatron.comm import watchdog
from minimegatron.comm.async_ops import Work, blocking, issue
from minimegatron.comm.mesh import Axis
from minimegatron.comm.transport import Started
from minimegatron.comm.watchdog import WATCHDOG_SECONDS, Watchdog, group_timeout
from minimegatron.launch import watch as watching
from minimegatron.launch.ledger import Ledger
from minimegatron.launch.watch import Overdue, Watch
from tests.faults import helpers

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
