"""What a lab's tools may use in a check: what was prepared for the cell, and a place for evidence."""

from __future__ import annotations

from typing import Any

prepared: Any = None


def note(kind: str, value: Any) -> None:
    """Report evidence: it becomes an entry of `Evidence.notes[kind]`."""
