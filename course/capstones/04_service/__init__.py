"""Capstone 04: a service that answers 64 at once and survives a killed replica; twelve criteria, 100 points.

| file         | its one idea                                                               |
|--------------|----------------------------------------------------------------------------|
| `deployment` | a learner's command, its processes, and requests to it                     |
| `criteria`   | what is asked of it, and what the answers have to be                       |
| `start/`     | what a learner begins with (`minimegatron capstone 04 FOLDER`)             |
| `solution/`  | a deployment that meets all criteria                                       |

The judge's own words are those of `minimegatron generate` on the same checkpoint: greedy, in fp32, in another process.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from random import Random

from labkit.acceptance import Capstone, Missed, Tell
from minimegatron.errors import ConfigError

from .criteria import CRITERIA, SOAK_SECONDS, Session, drawn_prompts, own_words, try_all
from .deployment import read_plan


def options(parser: argparse.ArgumentParser) -> None:
    """The command line's own."""
    checkpoint = "model that is served, in Hugging Face's form (docs/capstones.md has the command)"
    parser.add_argument("--checkpoint", type=Path, required=True, metavar="FOLDER", help=checkpoint)
    soak = f"length of the soak (default: {SOAK_SECONDS:g}; 600 before you trust it)"
    parser.add_argument("--soak", type=float, default=SOAK_SECONDS, metavar="S", help=soak)
    parser.add_argument("--logs", type=Path, metavar="DIR", help="keep what the deployment prints")


def run(folder: Path, options: argparse.Namespace, random: Random, tell: Tell) -> None:
    """Grade one deployment.

    Raises:
        ConfigError: the checkpoint is none.
        Missed: `deploy.toml` is none.
        DataError: the judge's own words cannot be made.
    """
    if not (options.checkpoint / "config.json").is_file():
        raise ConfigError(
            f"--checkpoint {options.checkpoint} has no config.json", fix="docs/capstones.md has the command"
        )
    try:
        plan = read_plan(folder / "deploy.toml")
    except ConfigError as error:
        raise Missed(str(error)) from None
    checkpoint = options.checkpoint.resolve()
    prompts = drawn_prompts(random)
    with tempfile.TemporaryDirectory(prefix="minimegatron-capstone-") as scratch:
        logs = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        words = own_words(checkpoint, prompts, Path(scratch))
        session = Session(folder, checkpoint, plan, random, words, options.soak, logs)
        asyncio.run(try_all(session, options.criteria, tell))


CAPSTONE = Capstone("04_service", "deploy.toml", list(CRITERIA), options, run)
