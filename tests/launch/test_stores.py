"""The stores in which the ranks of a job meet."""

from __future__ import annotations

import socket
import threading
import warnings

import pytest
import torch.distributed as dist

from minimegatron.errors import ConfigError, DeadlineError
from minimegatron.launch import blame, launchers, rank, stores
from minimegatron.launch.launchers import RUN_DIR
from minimegatron.launch.ledger import Ledger
from tests.faults.helpers import wait_for


def test_a_restarted_rank_does_not_see_the_addresses_of_dead_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun's agent keeps one store for all attempts, so gloo's keys must say which attempt they are of."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port), "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in {**given, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    found = []
    for attempt in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", attempt)
        store, ledger = stores.stores(launchers.Place(0, 1, "torchrun"), 20)
        for one in (store, ledger.store):
            found.append(one.check(["address"]))
            one.set("address", attempt)
    assert found == [False] * 4


BY_HAND = launchers.Place(1, 3, "torchrun")


@pytest.fixture
def by_hand(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Variables of a rank that no launcher has started; what it says."""
    said = list[str]()
    for name, value in {"MASTER_ADDR": "here", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setattr(stores, "SOON_SECONDS", 0.01)
    monkeypatch.setattr(blame, "say", said.append)
    return said


@pytest.mark.parametrize(("come", "others"), [((), "ranks 0, 2"), ((0, 1), "rank 2")])
def test_a_rank_that_no_launcher_started_says_whom_it_waits_for(
    by_hand: list[str], monkeypatch: pytest.MonkeyPatch, come: tuple[int, ...], others: str
) -> None:
    if come:
        monkeypatch.setattr(rank._here, "ledger", Ledger(dist.HashStore(), 1, 3))
        for one in come:
            Ledger(rank._here.ledger.store, one, 3).come("start")
    with stores.who_is_waited_for(BY_HAND, lambda: rank._here.ledger):
        wait_for(lambda: by_hand, 20, "it says so")
    assert by_hand == [
        f"rank 1 of 3 waits for {others} at here:29500, because RANK and WORLD_SIZE are set; "
        "`unset RANK WORLD_SIZE` runs alone"
    ]


def test_where_nobody_waits_or_a_launcher_started_the_ranks_nothing_is_said(
    by_hand: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stores, "SOON_SECONDS", 3600.0)
    with stores.who_is_waited_for(BY_HAND, lambda: rank._here.ledger):
        assert sum(isinstance(t, threading.Timer) for t in threading.enumerate()) == 1
    wait_for(lambda: not any(isinstance(t, threading.Timer) for t in threading.enumerate()), 20, "the timer has ended")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with stores.who_is_waited_for(BY_HAND, lambda: rank._here.ledger):
        assert not any(isinstance(t, threading.Timer) for t in threading.enumerate())


def test_a_warning_of_several_ranks_is_printed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, shown = dist.HashStore(), list[tuple[int, str]]()
    monkeypatch.delenv(RUN_DIR, raising=False)
    for number in (1, 0):
        ledger = Ledger(store, number, 2)
        monkeypatch.setattr(rank._here, "ledger", ledger)
        monkeypatch.setattr(warnings, "showwarning", lambda text, *_, n=number: shown.append((n, str(text))))
        rank._warn_once(ledger)
        for text in ("of all", "of all", f"of rank {number}"):
            warnings.showwarning(UserWarning(text), UserWarning, "file.py", 1)
    assert shown == [(1, "of all"), (1, "of all"), (1, "of rank 1"), (0, "of rank 0")]


def test_where_rank_zero_does_not_serve_the_error_says_where_it_was_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(ConfigError, match=f"rank 0 cannot meet others at 127.0.0.1:{port}: .*in use"):
            stores.stores(launchers.Place(0, 2, "torchrun"), 5)
    with pytest.raises(DeadlineError, match=f"rank 0 did not come within 0.1 s: nobody listens at 127.0.0.1:{port}"):
        stores.stores(BY_HAND, 0.1)
