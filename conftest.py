"""For every test and every notebook under nbval."""

from __future__ import annotations

import os
import signal
from typing import Any

# Kernels and ranks of notebooks under nbval inherit these: one thread a rank, plain text, no progress bars.
os.environ.update(OMP_NUM_THREADS="1", NO_COLOR="1", TQDM_DISABLE="1")

# A shell's background job ignores Ctrl-C, and so would every process that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collectstart(collector: Any) -> None:
    """What a notebook writes to stderr (a warning of a library) is not compared."""
    if hasattr(collector, "skip_compare"):
        collector.skip_compare += ("stderr",)
