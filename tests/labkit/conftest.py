"""One nursery for all tests of the lab: its start costs two seconds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest

from labkit import grade
from labkit.fresh import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as server:
        server.warm_up()
        yield server


@pytest.fixture
def warm(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command takes the nursery of all tests: to start one costs two seconds."""
    monkeypatch.setattr(grade, "Nursery", lambda: contextlib.nullcontext(nursery))
