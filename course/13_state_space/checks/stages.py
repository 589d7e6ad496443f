"""Lab 13, a hybrid cut into the stages of a pipeline: the slowest one as fast as it can be."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from labkit.exercises import Answer, Case, Draw, Exercise


def loads(cut: list[str], costs: dict[str, int]) -> list[int]:
    """What each stage costs."""
    found = [sum(costs[letter] for letter in stage) for stage in cut]
    found[0] += costs["first"]
    found[-1] += costs["last"]
    return found


def least(pattern: str, costs: dict[str, int], p: int) -> int:
    """The least cost of the slowest stage: the smallest limit under which the layers fit into p stages."""

    def fits(limit: int) -> bool:
        """The last stage from behind as long as the limit allows, then the others; none may stay empty."""
        left, stages = list(pattern), p
        while stages:
            room = limit - costs["last"] * (stages == p) - costs["first"] * (stages == 1)
            taken = 0
            while len(left) > stages - 1 and costs[left[-1]] <= room:
                room, taken = room - costs[left.pop()], taken + 1
            if not taken:
                return False
            stages -= 1
        return not left

    most = sum(costs[letter] for letter in pattern) + costs["first"] + costs["last"]
    return bisect_left(range(most + 1), True, key=fits)


def _slowest_is_least(answer: Answer) -> str | None:
    cut, (pattern, costs, p) = answer.value, answer.inputs.values()
    if not isinstance(cut, list | tuple) or not all(isinstance(stage, str) for stage in cut):
        return "a list of texts, one for each stage, is asked for"
    if len(cut) != p:
        return f"{len(cut)} stages; {p} are asked for"
    if not all(cut):
        return f"{sum(not stage for stage in cut)} of {p} stages are empty; each needs a layer"
    if "".join(cut) != pattern:
        return "joined, the stages are not the pattern: the order of layers stays"
    slowest, best = max(loads(list(cut), costs)), least(pattern, costs, p)
    return f"the slowest stage costs {slowest}; {best} is possible" if slowest > best else None


def _costs(*numbers: int) -> dict[str, int]:
    return dict(zip(("M", "*", "-", "E", "first", "last"), numbers, strict=True))


def _some(draw: Draw) -> dict[str, Any]:
    pattern = "".join(draw.choice("MMM*--E") for _ in range(draw.integer(12, 40)))
    costs = _costs(*(draw.integer(2, 30) for _ in range(4)), draw.integer(0, 40), draw.integer(0, 60))
    return {"pattern": pattern, "costs": costs, "p": draw.integer(2, 8)}


_EIGHT = "M-M*M*M-"
_SHORT, _LONG = _costs(3, 2, 4, 9, 1, 3), _costs(3, 12, 4, 9, 1, 3)
_NEMOTRON = "M-M-M-M*-" + "M-M-M-M-M*-" * 3 + "M-M-M-M-M-"

STAGES = Exercise(
    "stages",
    accept=[_slowest_is_least],
    cases=[
        Case("the example: M-M*M*M- in 3 stages", {"pattern": _EIGHT, "costs": _SHORT, "p": 3}),
        Case("the same where attention costs 12", {"pattern": _EIGHT, "costs": _LONG, "p": 3}),
        Case("other patterns", _some, points=3, hidden=True, fixed=[
            {"pattern": "M*", "costs": _SHORT, "p": 1}, {"pattern": "M*-", "costs": _LONG, "p": 3},
            {"pattern": "----MM", "costs": _costs(10, 1, 1, 1, 0, 0), "p": 3},
            {"pattern": "MMMMMM", "costs": _costs(4, 1, 1, 1, 40, 0), "p": 3},
            {"pattern": "MMMMMM", "costs": _costs(4, 1, 1, 1, 0, 40), "p": 3},
            {"pattern": "M*-M*", "costs": _costs(11, 2, 3, 1, 0, 2), "p": 3},
            {"pattern": "MMMM*M", "costs": _costs(1, 50, 1, 1, 0, 7), "p": 4}]),
        Case("118 layers in 16 stages, in seconds", lambda draw: {
            "pattern": (_NEMOTRON * 3)[:118], "costs": _costs(23, draw.integer(9, 90), 35, 1, 3, 54), "p": 16},
            hidden=True, draws=1),
    ],
    idea="The last stage ends where the pattern ends. If you knew the best cut of every shorter beginning into p - 1 "
    "stages, where would the last stage begin?",
    hint="best[k][i]: the least slowest stage of the first i layers in k stages; it is the minimum over j < i of "
    "max(best[k - 1][j], cost of layers j to i - 1). Add `first` to stage 1, `last` to stage p; remember the cuts.",
    seconds=6.0,
)  # fmt: skip
