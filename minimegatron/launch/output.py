"""What a command prints: for the tools of a machine, such as `nvidia-smi`, that may be absent."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence


def output_of(command: Sequence[str], seconds: float = 20.0) -> str:
    """What a command prints on its standard output, or "" when it is absent, fails, or takes longer than `seconds`."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
