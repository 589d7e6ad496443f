"""What a rank prints when it fails: the cause once in a job, and what it leaves for torchrun to print."""

from __future__ import annotations

import datetime
import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from minimegatron.comm import agree
from minimegatron.comm.axis import Axis
from minimegatron.errors import DataError, DeadlineError, RankError
from minimegatron.launch import error_report
from minimegatron.launch.error_report import is_consequence, timed_out
from minimegatron.launch.ledger import Ledger, Position
from minimegatron.launch.procs import AGENT
from minimegatron.launch.watch import Overdue

ERROR = DataError("no such file", where="corpus.idx", fix="give the path without .idx")
WORLD = Axis("world", (0, 1, 2), 1)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a rank of plain torchrun writes; nobody is waited for."""
    found = list[str]()
    monkeypatch.setattr(error_report, "_write", found.append)
    monkeypatch.setattr(error_report, "SAME_SECONDS", 0.0)
    monkeypatch.setattr(error_report, "START_SECONDS", 0.0)
    monkeypatch.setattr(error_report, "CAUSE_SECONDS", 0.0)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for name in (AGENT, "RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)
    return found


def told(monkeypatch: pytest.MonkeyPatch) -> RankError:
    """The error of rank 1, to which rank 0 has told its own."""
    monkeypatch.setattr(agree, "gather_objects", lambda *_: ["DataError: no such file", None, None])
    with pytest.raises(RankError) as caught:
        agree.on_all_ranks(lambda: None, WORLD)
    return caught.value


@pytest.mark.parametrize("local", [0, 1])
def test_what_another_rank_told_is_not_an_error_of_its_own(
    written: list[str], monkeypatch: pytest.MonkeyPatch, local: int
) -> None:
    monkeypatch.setenv("LOCAL_RANK", str(local))
    store = dist.HashStore()
    assert error_report.fail(ERROR, Ledger(store, 0, 3), None, 1.0) == 4
    assert error_report.fail(told(monkeypatch), Ledger(store, 1, 3), None, 1.0) == 5
    mine, *others = written
    assert mine == f"DataError: {ERROR}\n"
    assert others == ["rank 1 ends because rank 0 failed: DataError: no such file\n"][local:]


def test_where_the_other_does_not_fail_it_is_the_cause(written: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    error = told(monkeypatch)
    assert error_report.fail(error, Ledger(dist.HashStore(), 1, 3), None, 1.0) == 5
    assert written == [f"RankError: {error}\n"]


@pytest.mark.parametrize(
    ("error", "again"),
    [(ERROR, f"DataError: {ERROR}"), (ValueError("shapes"), "ValueError: shapes (its traceback is above)")],
)
def test_torchrun_prints_the_error_again_and_not_its_traceback(
    written: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, again: str
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))

    def left() -> dict[str, Any]:
        try:
            raise error
        except Exception as raised:
            error_report.fail(raised, Ledger(dist.HashStore(), 0, 1), None, 1.0)
        return json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]

    found = left()
    assert found["py_callstack"] == again and found["traceback"].startswith("Traceback")
    monkeypatch.setenv(AGENT, "1")  # it prints nothing itself, and notebooks want the line
    assert left()["py_callstack"].startswith("Traceback")


# ------------------------------------------------------------------------------------------- who is missing


def test_the_error_names_who_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(error_report, "CAUSE_SECONDS", 0.1)
    store = dist.HashStore()
    Ledger(store, 2, 3).answer(Position("all_reduce", "dp", (0, 1, 2), "step.py:7"))
    late = Overdue(Position("all_reduce", "dp", (0, 1, 2), "step.py:7"), 2.0)
    error, silent = error_report._missing(late, Ledger(store, 0, 3), 2.0)
    assert isinstance(error, DeadlineError) and silent == [1]
    assert error.what == "all_reduce over dp (ranks 0-2): rank 1 did not come within 2 s"


def test_the_end_of_a_chain_of_waiting_ranks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 3 waits for 2, which waits for 1, which waits for 0, which sleeps: `is at`, or does not answer."""
    monkeypatch.setattr(error_report, "CAUSE_SECONDS", 0.1)
    for sleeps in (True, False):
        store = dist.HashStore()
        places = {r: Position(f"receive F7 from rank {r - 1}", "pp", (r - 1, r), "step.py:7") for r in (1, 2, 3)}
        places |= {0: Position("", "", (), "data.py:3")} if sleeps else {}
        for r, place in places.items():
            Ledger(store, r, 4).answer(place)
        error, silent = error_report._missing(Overdue(places[3], 2.0), Ledger(store, 3, 4), 2.0)
        assert isinstance(error, DeadlineError) and silent == ([] if sleeps else [0])
        assert error.what.endswith("rank 2 did not come, which waits for rank 0, within 2 s")
        assert ("rank 0 is at data.py:3" if sleeps else "rank 0 does not answer") in error.where


# ---------------------------------------------------------------------------------------------- consequences


def lose(rank: int, world: int) -> tuple[bool, bool] | None:
    """Rank 1 leaves, or is late; what do the others get?"""
    group = dist.new_group(timeout=datetime.timedelta(seconds=0.3))
    if rank == 1:
        time.sleep(1)
        return None
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        return is_consequence(error), timed_out(error)
    return None


def test_what_gloo_says_of_a_silent_peer_is_recognised(ranks: Any) -> None:
    assert ranks(2).run(lose, timeout=20)[0] == (True, True)


@pytest.mark.parametrize(
    ("error", "consequence"),
    [
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:27788. This is typically ..."), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (ConnectionResetError(104, "Connection reset by peer"), True),
        (RuntimeError("The size of tensor a (3) must match the size of tensor b (4)"), False),
        (ValueError("Connection closed by peer"), False),
        (RankError("rank 1 failed: RuntimeError: Connection closed by peer"), False),
    ],
)
def test_consequences_are_told_from_causes(error: BaseException, consequence: bool) -> None:
    assert is_consequence(error) is consequence
