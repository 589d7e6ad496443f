"""For every test and every notebook under nbval."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

# Kernels and ranks of notebooks under nbval inherit these: one thread a rank, plain text, no progress bars.
os.environ.update(OMP_NUM_THREADS="1", NO_COLOR="1", TQDM_DISABLE="1")

# A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# Files are dealt out to processes whole (--dist=loadfile). One that takes a minute must not be the last to begin.
LONGEST = (
    "tests/notebooks/test_any_cpu.py", "tests/notebooks/test_browser.py", "solutions/05", "solutions/07",
    "solutions/01", "solutions/03", "solutions/02", "solutions/04", "tests/e2e/", "tests/lab/test_build.py",
    "tests/lab/", "labs/", "tests/faults/", "tests/kernels/",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, the others as they come."""
    places = {prefix: place for place, prefix in enumerate(LONGEST)}
    items.sort(key=lambda item: next((place for prefix, place in places.items() if item.nodeid.startswith(prefix)), 99))


def pytest_collectstart(collector: Any) -> None:
    """What a notebook writes to stderr (a warning of a library) is not compared."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("stderr",)
