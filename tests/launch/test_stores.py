"""The stores in which the ranks of a job meet."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from minimegatron.launch import rank


def test_a_restarted_rank_does_not_see_the_addresses_of_dead_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's agent keeps one store for all attempts, so gloo's keys must say which attempt they are of."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in {**given, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    found = []
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        store, ledger = rank._stores(0, 1, 20)
        for one in (store, ledger.store):
            found.append(one.check(["address"]))
            one.set("address", attempt)
    assert found == [False] * 4
