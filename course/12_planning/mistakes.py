"""Lab 12: the solution with small mistakes, and with small changes that leave it right (`labkit/answers`)."""

from __future__ import annotations

from labkit.answers import Edit, Same

WRONG: dict[str, list[Edit]] = {}
RIGHT: dict[str, list[Edit]] = {}
EQUIVALENT: dict[str, list[Same]] = {}
