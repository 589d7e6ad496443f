"""A number guessed before it is measured, and shown again beside the measurement: `guess` and `guessed` of a notebook.

    guess("gpus", None, "How many 80-GB GPUs do the activations of one sequence fill?")
    ○ no guess yet: put a number in place of None
    guess("gpus", 12, "How many 80-GB GPUs do the activations of one sequence fill?")
    ✔ your guess: 12
    guessed("gpus", 7.3, "GPUs")
    it is 7.3 GPUs; you guessed 12

Guesses are kept in `.work/<lab>/guesses.json`, so that they outlive a kernel. The cell has the last word: None forgets
an earlier guess, so that an untouched lab always shows the same text; a value that is no number leaves it as it was. A
file that cannot be read or written costs the guess and nothing else: no mark depends on it.
"""

from __future__ import annotations

import ast
import contextlib
import json
import math
import numbers
import os
import re
from pathlib import Path
from typing import Any

from labkit.said import say
from minimegatron.commands.prose import Which

NAME = "guesses.json"


class Guesses:
    """The guesses of one lab.

    Args:
        folder: `.work/<lab>`.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._kept: dict[str, float] = {}
        with contextlib.suppress(OSError, ValueError, AttributeError):
            found = json.loads(self._path.read_text())
            self._kept = {name: value for name, value in found.items() if _is_number(value)}

    def guess(self, name: str, value: Any) -> str:
        """Keep a guess, forget it if `value` is None, keep the old one if it is no number; returns the line to show."""
        if value is None:
            self._keep(name, None)
            return f"○ {say('no-guess')}"
        if not _is_number(value):
            return f"✘ {say('bad-guess', value=f'{value!r:.40}')}"
        self._keep(name, int(value) if isinstance(value, numbers.Integral) else float(value))
        return f"✔ {say('guess', value=shown(value))}"

    def guessed(self, name: str, measured: Any, what: str) -> str:
        """The measured or computed number beside the guess, as the line to show."""
        number = f"{shown(measured) if _is_number(measured) else measured} {what}".rstrip()
        if name not in self._kept:
            return say("unguessed", measured=number)
        return say("guessed", measured=number, value=shown(self._kept[name]))

    def _keep(self, name: str, value: float | None) -> None:
        if value == self._kept.get(name):
            return
        self._kept.pop(name, None)
        self._kept |= {} if value is None else {name: value}
        with contextlib.suppress(OSError):
            fresh = self._path.with_name(f"{NAME}.new")
            fresh.write_text(json.dumps(self._kept, indent=1))
            os.replace(fresh, self._path)


def texts(cell: str) -> dict[Which, str]:
    """What is to be translated of a cell: questions of `guess` by its name, the unit of `guessed` by its words."""
    lines = ["pass" if re.match(r"[%!]", line) else line for line in cell.splitlines()]
    found: dict[Which, str] = {}
    for call in ast.walk(ast.parse("\n".join(lines))):
        match call:
            case ast.Call(ast.Name("guess"), [ast.Constant(str(name)), _, ast.Constant(str(text))]):
                found[question_of(name)] = text
            case ast.Call(ast.Name("guessed"), [_, _, ast.Constant(str(text))]):
                found[unit_of(text)] = text
    return found


def question_of(name: str) -> Which:
    """The question of a guess."""
    return Which("guess", name.replace(" ", "-"))


def unit_of(text: str) -> Which:
    """The words behind a measured number."""
    return Which("guessed", re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "none")


def shown(value: Any) -> str:
    """A number as a reader writes it: 12, 7.3, 65,536, 1,234.5."""
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{float(value):,.1f}" if 1000 <= abs(value) < 1e15 else f"{float(value):.4g}"


def _is_number(value: Any) -> bool:
    """A finite real number; True is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    with contextlib.suppress(OverflowError):
        return math.isfinite(value)
    return False
