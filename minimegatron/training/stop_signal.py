"""SIGTERM as a wish: the run ends after the step that is under way, and a second one ends the process at once."""

from __future__ import annotations

import contextlib
import signal
from types import FrameType
from typing import Any


class StopSignal:
    """Inside the block SIGTERM sets `received` instead of ending the process; a second one ends it."""

    def __init__(self) -> None:
        self.received = False

    def __enter__(self) -> StopSignal:
        # Only the main thread may set handlers; elsewhere (a notebook's worker) SIGTERM keeps its usual meaning.
        self.before: Any = None
        with contextlib.suppress(ValueError):
            self.before = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(self, *exc: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGTERM, self.before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
