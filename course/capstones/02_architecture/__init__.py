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
import shutil
import tempfile
from pathlib import Path
from random import Random

from labkit.acceptance import Capstone, Missed, Tell
from labkit.ranks.fork_server import share_once

from . import trials
from .criteria import CRITERIA, Session, drawn_flags
from .planting import FILE


def options(parser: argparse.ArgumentParser) -> None:
    """The command line has no more."""


def run(folder: Path, options: argparse.Namespace, random: Random, tell: Tell) -> None:
    """Grade one architecture.

    Raises:
        Missed: there is no model, or none with a module of the hand-in's own.
    """
    with tempfile.TemporaryDirectory(prefix="minimegatron-capstone-") as scratch:
        share_once()  # tests of a hand-in start ranks, too
        copy = Path(scratch, "handed_in")
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__", ".*"))
        rest = Path(scratch, "scratch")
        rest.mkdir()
        session = Session(copy, rest, random, drawn_flags(random))
        if not session.ask(1, trials.built, session.flags):
            raise Missed(f"no layer of the model has a module whose class, with a `forward`, is written in {FILE}")
        for criterion in options.criteria:
            tell(CRITERIA.result(criterion, session))


CAPSTONE = Capstone("02_architecture", FILE, list(CRITERIA), options, run)
