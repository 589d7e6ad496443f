"""The store as a second way to communicate: causes, meetings, positions."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from minimegatron.errors import DeadlineError
from minimegatron.launch.ledger import Cause, Ledger, Position


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
    store, came = dist.HashStore(), []

    def come(rank: int) -> None:
        Ledger(store, rank, 3).meet("start", 10)
        came.append(rank)

    threads = [threading.Thread(target=come, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    assert came == []
    come(2)
    for thread in threads:
        thread.join(10)
    assert sorted(came) == [0, 1, 2]


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


def test_a_meeting_waits_for_whom_another_machine_sees_starting() -> None:
    """Rank 0 sees nobody; rank 1 sees rank 2 start, three times; then rank 2 comes, later than anybody's deadline."""
    store, errors = dist.HashStore(), list[str]()
    looks = threading.Semaphore(0)
    left = [40]

    def sees() -> bool:
        looks.release()
        left[0] -= 1
        return left[0] > 0

    def meet(rank: int) -> None:
        try:
            Ledger(store, rank, 3).meet("start", 0.4, sees if rank == 1 else lambda: False)
        except DeadlineError as error:
            errors.append(error.what)

    threads = [threading.Thread(target=meet, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for _ in range(20):  # a look takes a tenth of a second, so twice the deadline has passed
        assert looks.acquire(timeout=20)
    Ledger(store, 2, 3).meet("start", 20)
    for thread in threads:
        thread.join(20)
    assert errors == []
