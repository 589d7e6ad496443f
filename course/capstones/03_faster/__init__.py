"""Capstone 03: a run that is at least 20 % faster, each gain attributed; six criteria, 100 points.

| file        | its one idea                                                                    |
|-------------|---------------------------------------------------------------------------------|
| `work`      | some steps of a training on two ranks: losses, CPU-seconds                      |
| `functions` | the two functions that are the run's own: what changed, and whether they agree  |
| `ladder`    | rungs side by side on a noisy machine                                           |
| `criteria`  | what is asked of the learner's list                                             |
| `start/`    | the slow run, and what a learner begins with (`minimegatron capstone 03 FOLDER`)|
| `solution/` | a list that meets all criteria                                                  |
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from labkit.acceptance import Capstone, Missed, Tell
from labkit.ranks.pool import WarmPool
from minimegatron.errors import ConfigError

from .criteria import CRITERIA, Session, read_plan
from .ladder import MOST, ROUNDS
from .work import WORLD, Rung, Seen, train

SECONDS = 300.0  # of a rung


def options(parser: argparse.ArgumentParser) -> None:
    """The command line's own."""
    rounds = f"rounds of the ladder (default: {ROUNDS}, and up to {MOST} where they do not decide)"
    parser.add_argument("--rounds", type=int, default=ROUNDS, metavar="N", help=rounds)


def run(folder: Path, options: argparse.Namespace, random: Random, tell: Tell) -> None:
    """Grade one list.

    Raises:
        ConfigError: fewer than two rounds.
        Missed: `faster.toml` is none.
    """
    if options.rounds < 2:
        raise ConfigError(f"--rounds {options.rounds}", fix="2 or more, of which there are quartiles")
    try:
        plan = read_plan(folder / "faster.toml")
    except ConfigError as error:
        raise Missed(str(error)) from None
    with WarmPool(WORLD) as pool:

        def on_ranks(rung: Rung, seed: int) -> Seen:
            of_ranks: list[Seen] = pool.run(train, rung, seed, timeout=SECONDS)
            return Seen(sum(seen.seconds for seen in of_ranks), of_ranks[0].losses, of_ranks[0].norms)

        def call(function: Callable[..., Any], *given: Any) -> Any:
            return pool.run(function, *given, timeout=SECONDS)[0]

        session = Session(folder.resolve(), plan, random, on_ranks, call, options.rounds, max(options.rounds, MOST))
        for criterion in options.criteria:
            tell(CRITERIA.result(criterion, session))


CAPSTONE = Capstone("03_faster", "faster.toml", list(CRITERIA), options, run)
