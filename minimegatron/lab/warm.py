"""What `%%ranks` runs on each warm rank: the cell, as a script that knows `rank`, `world` and `report`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def run_cell(rank: int, world: int, script: str) -> Any:
    """Execute a saved cell; what it gave to `report` last, or None."""
    path = Path(script)
    reported: list[Any] = []
    namespace = {"__name__": "__main__", "__file__": script, "rank": rank, "world": world, "report": reported.append}
    sys.path.insert(0, str(path.parent))
    exec(compile(path.read_text(), script, "exec"), namespace)
    return reported[-1] if reported else None
