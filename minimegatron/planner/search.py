"""All layouts of a run on so many GPUs, pruned by memory, ranked by time.

The problem in a sentence: tp, cp, pp, its chunks and schedule, ep, etp, the micro-batch, recompute and ZeRO make
thousands of layouts of 4,096 GPUs, and a plan of one takes a second.

So every layout (`layouts`) is estimated (`estimate`), and those that are fastest by the estimate are planned
(`planning`), which decides whether they fit and in which order they stand.
"""

from __future__ import annotations

import dataclasses

from minimegatron.config.run import RunConfig
from minimegatron.errors import ConfigError, require
from minimegatron.planner.cluster import Cluster
from minimegatron.planner.estimate import Estimator
from minimegatron.planner.layouts import Layout, layouts
from minimegatron.planner.planning import Plan, plan

PLANNED = 8  # of the fastest estimates
MARGIN = 1.1  # what is estimated to need so much more than there is may fit


@dataclasses.dataclass(frozen=True)
class Found:
    """A layout that was planned."""

    layout: Layout
    plan: Plan


def search(base: RunConfig, world: int, cluster: Cluster, number: int = 5, seen: list | None = None) -> list[Found]:
    """The fastest layouts that fit, the fastest first; some that were estimated to fit may not, and are left out.
    `seen` gets the bytes and seconds of every layout that is estimated.

    Raises:
        ConfigError: no global batch size, or nothing fits.
    """
    estimator, kept = Estimator(base, world, cluster), list[tuple[float, int, Layout]]()
    for n, layout in enumerate(layouts(base, world, cluster)):
        try:
            nbytes, seconds = estimator.estimate(layout)
        except ConfigError:
            continue
        if seen is not None:
            seen.append((nbytes, seconds))
        if nbytes <= MARGIN * cluster.usable:
            kept.append((seconds, n, layout))
    found: list[Found] = []
    for _, _, layout in sorted(kept)[: 4 * PLANNED]:
        try:
            told = plan(layout.run(base), world, cluster)
        except ConfigError:
            continue
        if told.fits and told.time is not None:
            found.append(Found(layout, told))
        if len(found) >= max(number, PLANNED):
            break
    require(
        bool(found),
        f"no layout of {world} {cluster.gpu} fits: of {len(kept)} that were estimated to, none does",
        "more GPUs, a smaller --global-batch-size or --seq-length, or fewer flags that fix the layout",
    )
    return sorted(found, key=lambda one: one.plan.time.seconds if one.plan.time else 0.0)[:number]
