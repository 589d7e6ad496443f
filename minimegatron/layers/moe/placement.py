"""A report on the load of experts and of their ranks, and a better placement of the experts.

A step takes as long as its busiest rank, and two popular experts on one rank can make it the busiest, however even the
router is on average. A training run with experts prints at its end, and `minimegatron experts` prints of any log
(`commands/expert_loads.py`), for each layer:

| column            | of the last steps                                                                         |
|-------------------|-------------------------------------------------------------------------------------------|
| busiest expert    | tokens that chose the most popular expert, over the mean; E/k is collapse                 |
| idle              | experts with less than a tenth of the mean                                                |
| dropped           | share of the requests that a capacity dropped                                             |
| tokens of a rank  | a step, for the experts of each rank of ep; rank r has experts r E/P to (r+1) E/P - 1      |
| busiest rank      | the largest of these over their mean: the step takes that much longer than it must        |
| placed            | the same with the placement of the last column                                            |

**Placement**: as many experts on each rank, and the largest sum as small as possible, which is NP-hard. Heuristic: give
the most popular expert that is left to the emptiest rank that has room (the sum is then at most a third above the best
possible, Graham 1969, without the bound on numbers); then swap two experts of the busiest rank and another as long as
that helps. Where a token is limited to groups of experts, groups stay whole.

To place experts differently, renumber them: the rows of the router, its bias and the stacks of the experts in the same
order. The function of the model does not change. Loads drift during training, so look before you move experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from minimegatron.config.fields import divides
from minimegatron.layers.moe.balance import LayerLoad, imbalance

WINDOW = 100  # steps that the table at the end of a training looks back on


@dataclasses.dataclass(frozen=True)
class LayerSummary:
    """What the experts of one layer were asked for.

    Attributes:
        layer: its global number.
        steps: how many are added up.
        tokens: how many tokens asked for each expert.
        dropped: how many of these requests were refused.
        ranks: the experts of each rank of ep, as they are.
        placed: a better placement of the experts; `ranks` where there is none.
    """

    layer: int
    steps: int
    tokens: list[int]
    dropped: int
    ranks: list[list[int]]
    placed: list[list[int]]

    def per_rank(self, placed: bool = False) -> list[int]:
        """Tokens asked of each rank's experts."""
        return [sum(self.tokens[e] for e in experts) for experts in (self.placed if placed else self.ranks)]

    @property
    def idle(self) -> int:
        """Experts with less than a tenth of the mean load."""
        return sum(10 * n * len(self.tokens) < sum(self.tokens) for n in self.tokens)


def summarise(steps: Iterable[Sequence[LayerLoad]], ranks: int = 1, groups: int | None = None) -> list[LayerSummary]:
    """Add up the loads of several steps.

    Args:
        steps: of each step the load of every layer with experts (`StepReport.experts`).
        ranks: of ep.
        groups: of experts that stay together, or None.

    Raises:
        ConfigError: experts that cannot be dealt out over so many ranks.
    """
    loads_of: dict[int, list[LayerLoad]] = {}
    for step in steps:
        for load in step:
            loads_of.setdefault(load.layer, []).append(load)
    summaries = []
    for layer, loads in sorted(loads_of.items()):
        tokens = [sum(column) for column in zip(*(load.tokens for load in loads), strict=True)]
        divides(ranks, len(tokens), "expert_model_parallel_size", "num_experts")
        dropped = sum(load.dropped for load in loads)
        now = _deal(range(len(tokens)), ranks)
        summaries.append(LayerSummary(layer, len(loads), tokens, dropped, now, placement(tokens, ranks, groups)))
    return summaries


def _deal(items: Sequence[int], ranks: int) -> list[list[int]]:
    each = len(items) // ranks
    return [list(items[r * each : (r + 1) * each]) for r in range(ranks)]


def placement(tokens: Sequence[int], ranks: int, groups: int | None = None) -> list[list[int]]:
    """Experts for each rank, as many on each, whose busiest rank has as little as possible; see the module docstring.

    Args:
        tokens: load of each expert.
        ranks: how many share them.
        groups: of consecutive experts that must stay together.

    Returns:
        The experts of each rank, ascending; as they are now unless something else is better.
    """
    width = 1 if groups is None else len(tokens) // groups
    now = _deal(range(len(tokens)), ranks)
    if len(tokens) // ranks % width:  # a rank holds a part of a group: there is nothing to move
        return now
    loads = [sum(tokens[i : i + width]) for i in range(0, len(tokens), width)]
    room = len(loads) // ranks
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    for unit in sorted(range(len(loads)), key=lambda i: -loads[i]):
        open_ranks = [units for units in dealt if len(units) < room]
        min(open_ranks, key=lambda units: sum(loads[i] for i in units)).append(unit)
    while _swap(dealt, loads):
        pass
    placed = [sorted(unit * width + i for unit in units for i in range(width)) for units in dealt]
    return placed if _busiest(placed, tokens) < _busiest(now, tokens) else now


def _busiest(ranks: list[list[int]], tokens: Sequence[int]) -> int:
    return max(sum(tokens[e] for e in experts) for experts in ranks)


def _swap(dealt: list[list[int]], loads: Sequence[int]) -> bool:
    """Exchange two units of the busiest rank and another so that the larger of both sums falls; whether there are."""
    sums = [sum(loads[i] for i in units) for units in dealt]
    top = max(range(len(dealt)), key=lambda r: sums[r])
    for other, units in enumerate(dealt):
        for a, x in enumerate(dealt[top]):
            for b, y in enumerate(units):
                moved = loads[x] - loads[y]
                if 0 < moved < sums[top] - sums[other]:
                    dealt[top][a], dealt[other][b] = y, x
                    return True
    return False


# ------------------------------------------------------------------------------------------------ in words


def table(summaries: Sequence[LayerSummary], what: str = "step") -> str:
    """The table of the module docstring, as text; without ep the columns of ranks are left out.

    Args:
        summaries: of each layer with experts.
        what: has been added up.
    """
    if not summaries:
        return ""
    parallel = len(summaries[0].ranks) > 1
    rows = [["layer", "busiest expert", "idle", "dropped"]]
    rows[0] += ["tokens of a rank", "busiest rank", "placed", "experts of each rank, better"] if parallel else []
    for one in summaries:
        total = max(sum(one.tokens), 1)
        row = [str(one.layer), f"{imbalance(one.tokens):.2f} x", str(one.idle), f"{100 * one.dropped / total:.1f} %"]
        if parallel:
            better = " | ".join(" ".join(map(str, experts)) for experts in one.placed)
            row += [" ".join(str(round(n / one.steps)) for n in one.per_rank())]
            row += [f"{imbalance(one.per_rank()):.2f} x", f"{imbalance(one.per_rank(placed=True)):.2f} x"]
            row += ["as they are" if one.placed == one.ranks else better]
        rows.append(row)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    steps = f"{summaries[0].steps} {what}s" if summaries[0].steps > 1 else what
    title = f"experts of the last {steps}: {len(summaries[0].tokens)}"
    title += f" on {len(summaries[0].ranks)} ranks of ep" if parallel else ""
    return "\n".join([title, *(f"  {line}" for line in lines)])


def summary_record(summaries: Sequence[LayerSummary]) -> dict[str, Any]:
    """The same for a log file."""
    return {"event": "experts", "layers": [dataclasses.asdict(one) for one in summaries]}


def summary_tags(summaries: Sequence[LayerSummary]) -> dict[str, float]:
    """The same for TensorBoard, of the layers whose ranks are not one."""
    tags = {}
    for one in summaries:
        if len(one.ranks) > 1:
            tags[f"experts/layer {one.layer}/rank imbalance, all steps"] = imbalance(one.per_rank())
            tags[f"experts/layer {one.layer}/rank imbalance, placed"] = imbalance(one.per_rank(placed=True))
    return tags
