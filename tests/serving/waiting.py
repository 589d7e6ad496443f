"""Wait for something that a server does by itself."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(what: Callable[[], object], seconds: float = 20.0) -> None:
    """Until it holds, or fail."""
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it does not come to be"
        time.sleep(0.005)
