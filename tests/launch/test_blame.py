"""What a rank prints when it fails: the cause once in a job, and what it leaves for torchrun to print."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from minimegatron.comm import agree
from minimegatron.comm.axis import Axis
from minimegatron.errors import DataError, RankError
from minimegatron.launch import blame
from minimegatron.launch.launchers import AGENT
from minimegatron.launch.ledger import Ledger

ERROR = DataError("no such file", where="corpus.idx", fix="give the path without .idx")
WORLD = Axis("world", (0, 1, 2), 1)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a rank of plain torchrun writes; nobody is waited for."""
    found = list[str]()
    monkeypatch.setattr(blame, "_write", found.append)
    monkeypatch.setattr(blame, "SAME_SECONDS", 0.0)
    monkeypatch.setattr(blame, "CAUSE_SECONDS", 0.0)
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
    assert blame.fail(ERROR, Ledger(store, 0, 3), None, 1.0) == 4
    assert blame.fail(told(monkeypatch), Ledger(store, 1, 3), None, 1.0) == 5
    mine, *others = written
    assert mine == f"DataError: {ERROR}\n"
    assert others == ["rank 1 ends because rank 0 failed: DataError: no such file\n"][local:]


def test_where_the_other_does_not_fail_it_is_the_cause(written: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    error = told(monkeypatch)
    assert blame.fail(error, Ledger(dist.HashStore(), 1, 3), None, 1.0) == 5
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
            blame.fail(raised, Ledger(dist.HashStore(), 0, 1), None, 1.0)
        return json.loads((tmp_path / "error.json").read_text())["message"]["extraInfo"]

    found = left()
    assert found["py_callstack"] == again and found["traceback"].startswith("Traceback")
    monkeypatch.setenv(AGENT, "1")  # it prints nothing itself, and notebooks want the line
    assert left()["py_callstack"].startswith("Traceback")
