"""Faults strike at random moments: `--trials 50` tries fifty of them."""

from __future__ import annotations

import random

import pytest


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "trial" in metafunc.fixturenames:
        metafunc.parametrize("trial", range(metafunc.config.getoption("--trials")))


@pytest.fixture
def moment(trial: int) -> random.Random:
    """Random numbers of this trial."""
    return random.Random(trial)
