"""Mistakes planted in a hand-in, one at a time, to see whether its own tests notice.

    architecture.py ──> syntax tree ──> one edit at one place (`labkit/edits`) ──> another architecture.py
          does it compute something else?     no: it is no mistake, and does not count
          do the tests still pass?            yes: nobody noticed

An edit is what people write by mistake: a factor, a reduction or a mask left out, a wrong dim, a state that is not
kept. Whether it changes anything is not asked of the tests but of the model itself: its logits and gradients in one
process and over tensor parallelism, its documents, its kept states (`trials.fingerprint`). What does not even build, or
run in one process, is no mistake that needs a test. Tests must pass for a text that says the same with other words.

Kinds of edits: DeMillo, Lipton and Sayward, "Hints on test data selection" (1978).
"""

from __future__ import annotations

import ast
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import NamedTuple

from torch import Tensor

from labkit.edits import edits

SAME = 1e-9  # of the largest number
FILE = "architecture.py"


class Planted(NamedTuple):
    """A mistake.

    Attributes:
        line, what: where, and what was done.
        source: the whole file with it.
    """

    line: int
    what: str
    source: str


def planted(source: str, random: Random) -> Iterator[Planted]:
    """All different mistakes of one edit, from lines all over the file.

    Raises:
        SyntaxError: the source is no Python.
    """
    tree = ast.parse(source)
    known, by_line = {ast.dump(tree)}, dict[int, list[Planted]]()
    for line, what, text in sorted(edits(source, set(range(1, source.count("\n") + 2)))):
        try:
            dumped = ast.dump(ast.parse(text))
        except SyntaxError:
            continue
        if dumped not in known:
            known.add(dumped)
            by_line.setdefault(line, []).append(Planted(line, what, text))
    for of_line in by_line.values():
        random.shuffle(of_line)
    while by_line:
        for line in random.sample(sorted(by_line), len(by_line)):
            yield by_line[line].pop()
            if not by_line[line]:
                del by_line[line]


def in_other_words(source: str) -> str:
    """A file that does the same: without comments, laid out anew, with a name more that nothing uses."""
    return ast.unparse(ast.parse(source)) + "\n\nUNUSED_BY_ANYBODY = None\n"


def changed(before: Mapping[str, Tensor | str], after: Mapping[str, Tensor | str]) -> list[str]:
    """The ways in which another hand-in computes something else."""
    ways = []
    for way, was in before.items():
        now = after[way]
        if isinstance(was, str) or isinstance(now, str):
            different = isinstance(was, str) != isinstance(now, str)
        elif was.shape != now.shape:
            different = True
        else:
            different = not ((was - now).abs().max() <= SAME * was.abs().max()).item()
        ways += [way] * different
    return ways


def with_source(folder: Path, target: Path, source: str) -> Path:
    """A copy of a hand-in with another `architecture.py`; a new folder, so nothing compiled is taken for it."""
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("__pycache__", ".*"))
    (target / FILE).write_text(source)
    return target
