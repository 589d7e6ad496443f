"""One nursery for all tests of the lab: its start costs two seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from labkit.fresh import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery() as server:
        server.warm_up()
        yield server
