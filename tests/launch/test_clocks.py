"""Clocks of machines, compared through the store."""

from __future__ import annotations

import threading
import time

import torch.distributed as dist

from minimegatron.launch.clocks import offset
from minimegatron.launch.ledger import Ledger


def offsets(machines: list[str], ahead: dict[str, int]) -> tuple[list[int], int]:
    """What each rank, a thread, finds; and how long all took, which bounds the error."""
    store, found = dist.HashStore(), [0] * len(machines)

    def rank(r: int) -> None:
        found[r] = offset(Ledger(store, r, len(machines)), machines, lambda: time.time_ns() + ahead[machines[r]])

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(len(machines))]
    begin = time.time_ns()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found, time.time_ns() - begin


def test_a_clock_that_is_ahead_is_put_back_to_that_of_rank_zero() -> None:
    hour = 3600 * 10**9
    found, took = offsets(["a", "b", "a", "c", "b"], {"a": 5 * hour, "b": 0, "c": 7 * hour})
    assert found[0] == found[2] == 0 and found[1] == found[4]
    assert abs(found[1] - 5 * hour) <= took and abs(found[3] + 2 * hour) <= took


def test_ranks_of_one_machine_ask_nobody() -> None:
    store = dist.HashStore()
    assert [offset(Ledger(store, r, 2), ["a", "a"]) for r in range(2)] == [0, 0] and store.num_keys() <= 1
