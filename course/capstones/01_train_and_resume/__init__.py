"""Capstone 01: a small GPT that is trained, killed and resumed; eight criteria, 100 points.

| file        | its one idea                                                                    |
|-------------|---------------------------------------------------------------------------------|
| `training`  | a learner's command, its ranks, and the log that it writes                      |
| `oracle`    | held-out text, and what transformers computes                                   |
| `criteria`  | what is asked of it, and how it is seen                                         |
| `start/`    | what a learner begins with (`minimegatron capstone 01 FOLDER`)                  |
| `solution/` | a training that meets all criteria                                              |
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from random import Random

from labkit.acceptance import Capstone, Missed, Tell
from minimegatron.errors import ConfigError

from .criteria import CRITERIA, SIZES, Session
from .training import read_plan


def options(parser: argparse.ArgumentParser) -> None:
    """The command line's own."""
    size = "what may be trained: up to two million parameters on CPUs, or about 125 million on two GPUs, which has not "
    size += "been tried yet and takes some 13 GB of disk (default: laptop)"
    parser.add_argument("--size", choices=SIZES, default="laptop", help=size)
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs, outputs, checkpoints and models there")


def run(folder: Path, options: argparse.Namespace, random: Random, tell: Tell) -> None:
    """Grade one training.

    Raises:
        ConfigError: `--keep` has files of this learner already, from which a run would go on.
        Missed: `run.toml` is none.
    """
    try:
        plan = read_plan(folder / "run.toml")
    except ConfigError as error:
        raise Missed(str(error)) from None
    with tempfile.TemporaryDirectory(prefix="minimegatron-capstone-") as scratch:
        home = options.keep / folder.resolve().name if options.keep else Path(scratch)
        home.mkdir(parents=True, exist_ok=True)
        if any(home.iterdir()):
            raise ConfigError(f"{home} is not empty", fix="--keep with a folder that is not there yet")
        session = Session(folder, plan, random, home.resolve(), SIZES[options.size])
        for criterion in options.criteria:
            tell(CRITERIA.result(criterion, session))


CAPSTONE = Capstone("01_train_and_resume", "run.toml", list(CRITERIA), options, run)
