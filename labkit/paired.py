"""Two contenders on a noisy machine: A B B A, CPU-seconds, the median of per-pair ratios.

The problem in a sentence: on two shared cores the same program takes 1.0 s now and 1.6 s in a minute, so two numbers
taken one after the other compare the neighbours and not the programs.

Runs alternate as A B B A: a slow drift of the machine hits both alike. CPU-seconds (`time.process_time`, summed over
ranks) do not count the time in which somebody else had the core. What is reported is the median of the per-pair ratios
and their quartiles: if the quartiles lie on both sides of 1, nothing has been shown. Beside it stands the ratio of the
cheapest runs: a virtual machine whose cores come to share a physical one makes two processes dearer and one not, for
minutes.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True)
class Ratio:
    """Cost of B over cost of A: above 1, A is cheaper.

    Attributes:
        median, low, high: of the per-pair ratios; low and high are the quartiles.
        best: cheapest run of B over cheapest run of A.
        a, b: median cost of each, in the unit that the contenders return.
    """

    median: float
    low: float
    high: float
    best: float
    a: float
    b: float

    def __str__(self) -> str:
        return f"{self.median:.3f} ({self.low:.3f} to {self.high:.3f}; cheapest runs {self.best:.3f})"


def paired(a: Callable[[], float], b: Callable[[], float], pairs: int = 7, warmups: int = 2) -> Ratio:
    """Run both in the order A B B A ... and compare.

    Args:
        a, b: do one run each and return its cost, e.g. CPU-seconds.
        pairs: at least 2; each is one run of A and one of B.
        warmups: uncounted runs of each.

    Raises:
        ValueError: fewer pairs, of which there are no quartiles.
    """
    if pairs < 2:
        raise ValueError(f"pairs is {pairs}; fix: at least 2")
    for _ in range(warmups):
        a(), b()
    costs = []
    for i in range(pairs):
        first, second = (a, b) if i % 2 == 0 else (b, a)
        x, y = first(), second()
        costs.append((x, y) if i % 2 == 0 else (y, x))
    return ratio_of(costs)


def ratio_of(costs: Sequence[tuple[float, float]]) -> Ratio:
    """The costs of A and B in each pair, as ratios.

    Raises:
        ValueError: fewer than two pairs, of which there are no quartiles.
    """
    if len(costs) < 2:
        raise ValueError(f"pairs is {len(costs)}; fix: at least 2")
    ratios = [y / x for x, y in costs]
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    ours, theirs = zip(*costs, strict=True)
    return Ratio(median, low, high, min(theirs) / min(ours), statistics.median(ours), statistics.median(theirs))
