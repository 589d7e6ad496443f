"""What the tools of a lab (`course/NN_name/given`) exchange with a check, in the process that runs the learner's code.

A tool is what the learner's code computes with in place of hardware: a GPU that counts accesses, a disk that forgets.

| name       | direction                                                                                          |
|------------|----------------------------------------------------------------------------------------------------|
| `prepared` | what `Exercise.prepare` has made of the cell's text before this process began, or None             |
| `note`     | evidence: `note("launch", {...})` stands in `Evidence.notes["launch"]`, a list, in their order     |
"""

from __future__ import annotations

from typing import Any

prepared: Any = None
_notes: dict[str, list[Any]] = {}


def note(kind: str, value: Any) -> None:
    """Note plain data as evidence of the present trial."""
    _notes.setdefault(kind, []).append(value)


def take_notes() -> dict[str, list[Any]]:
    """What has been noted since the last call."""
    notes = dict(_notes)
    _notes.clear()
    return notes
