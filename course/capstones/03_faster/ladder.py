"""Rungs of a ladder on a noisy machine: up and down again, each beside its neighbour, by CPU-seconds.

    0 1 2 3   3 2 1 0   0 1 2 3 ...      a round has each rung once, and every second round goes down

A slow drift of the machine hits all rungs alike; two rungs of a round are a pair of `labkit/paired`. What is said of a
pair is the median over the rounds, with the quartiles. While a verdict is one at the lower
quartile and another at the upper one, there are more rounds, up to a number of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from labkit.paired import Ratio, ratio_of

from .work import Seen

ROUNDS, MOST = 5, 13


@dataclasses.dataclass
class Ladder:
    """Costs of all rungs in all rounds.

    Args:
        rungs: how many there are.
        measure: takes some steps of a rung.

    Attributes:
        rounds: {rung: seconds of a step} each.
        seen: the losses of each rung, of the first round.
    """

    rungs: int
    measure: Callable[[int], Seen]
    rounds: list[dict[int, float]] = dataclasses.field(default_factory=list)
    seen: dict[int, Seen] = dataclasses.field(default_factory=dict)

    def round(self) -> None:
        """Each rung once."""
        order = range(self.rungs) if len(self.rounds) % 2 == 0 else reversed(range(self.rungs))
        costs = {}
        for rung in order:
            seen = self.measure(rung)
            self.seen.setdefault(rung, seen)
            costs[rung] = seen.seconds
        self.rounds.append(costs)

    def climb(self, undecided: Callable[[], bool], rounds: int = ROUNDS, most: int = MOST) -> None:
        """Rounds until all is decided: at least `rounds`, and at most `most`."""
        while len(self.rounds) < rounds or (len(self.rounds) < most and undecided()):
            self.round()

    def ratio(self, a: int, b: int) -> Ratio:
        """The cost of rung b over that of rung a."""
        return ratio_of([(costs[a], costs[b]) for costs in self.rounds])

    def gain(self, a: int, b: int) -> float:
        """Percent fewer CPU-seconds a step."""
        return 100 * (1 - self.ratio(a, b).median)

    def quartiles(self, a: int, b: int) -> tuple[float, float]:
        """Those of the gain."""
        ratio = self.ratio(a, b)
        return 100 * (1 - ratio.high), 100 * (1 - ratio.low)

    def told(self, a: int, b: int) -> str:
        """The gain with its quartiles."""
        low, high = self.quartiles(a, b)
        return f"{self.gain(a, b):.0f} % ({low:.0f} to {high:.0f}, {len(self.rounds)} pairs)"
