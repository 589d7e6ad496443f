"""Capstone 02: an architecture of one's own, through `--spec`; thirteen criteria, 100 points.

| file              | its one idea                                                                     |
|-------------------|----------------------------------------------------------------------------------|
| `criteria`        | what is asked of it, and what the answers have to be                             |
| `trials`          | what ranks do with a hand-in                                                     |
| `planting`        | mistakes in the hand-in's own code                                               |
| `given/trying`    | `course.capstone02.trying`: what its tests and the judge ask of a model          |
| `start/`          | where a learner begins                                                           |
| `solution/`       | a linear attention with gates, which meets all criteria                          |

The judge imports nothing of a hand-in: ranks do, in jobs that forget it, and return plain data.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from random import Random

from labkit.acceptance import Capstone, Tell
from labkit.ranks.fork_server import SHARED, share

from .criteria import CRITERIA, Session, drawn_flags, try_all
from .planting import FILE


def options(parser: argparse.ArgumentParser) -> None:
    """The command line has no more."""


def run(folder: Path, options: argparse.Namespace, random: Random, tell: Tell) -> None:
    """Grade one architecture."""
    with tempfile.TemporaryDirectory(prefix="minimegatron-capstone-") as scratch:
        if not os.environ.get(SHARED):
            share(tempfile.mkdtemp())  # tests of a hand-in start ranks, too
        copy = Path(scratch, "handed_in")
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        rest = Path(scratch, "scratch")
        rest.mkdir()
        try_all(Session(copy, rest, random, drawn_flags(random)), options.criteria, tell)


CAPSTONE = Capstone("02_architecture", FILE, CRITERIA, options, run)
