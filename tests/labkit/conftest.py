"""One nursery for all tests of the lab: its start costs two seconds."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator

import pytest

from labkit import grade
from labkit.fresh import Nursery
from labkit.ranks.pool import WarmPool


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """It starts beside a secret, and in a temporary folder of its own: `test_fresh` looks what ranks see and leave."""
    with Nursery() as server:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SECRET_KEY", "hunter2")
            patch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("nursery")))
            server.warm_up()
        yield server


@pytest.fixture
def warm(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command takes the nursery of all tests: to start one costs two seconds."""
    monkeypatch.setattr(grade, "Nursery", lambda: contextlib.nullcontext(nursery))


@pytest.fixture(scope="session")
def ranks(pools: Callable[..., WarmPool]) -> Callable[..., WarmPool]:
    """The pools themselves, which these tests are about."""
    return lambda nranks, fingerprints=True: pools(nranks, fingerprints=fingerprints)
