"""Faults strike at random moments: `--trials 50` tries fifty of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from labkit.ranks.pool import WarmPool


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "trial" in metafunc.fixturenames:
        metafunc.parametrize("trial", range(metafunc.config.getoption("--trials")))


@pytest.fixture
def moment(trial: int) -> random.Random:
    """Random numbers of this trial."""
    return random.Random(trial)


@pytest.fixture(scope="session")
def ranks(pools: Callable[..., WarmPool]) -> Callable[..., WarmPool]:
    """The pools themselves, which these tests are about."""
    return lambda nranks, fingerprints=True: pools(nranks, fingerprints=fingerprints)
