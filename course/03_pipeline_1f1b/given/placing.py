"""Lists whose author does not say where the chunks lie: the schedule with the placement that runs, or is faster."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from minimegatron.errors import ConfigError
from minimegatron.parallel.pipeline.actions import Action, Schedule, round_robin, v_shaped
from minimegatron.parallel.pipeline.schedule_check import check
from minimegatron.parallel.pipeline.schedule_sim import Costs, simulate


def half_w(schedule: Schedule) -> Costs:
    """Costs of its chunks where F and B of a whole rank take 1, and W takes half of that."""
    return Costs(backward_weight=Fraction(1, 2)).divided(schedule.v)


def placed(name: str, lists: Sequence[Sequence[str]]) -> Schedule:
    """The schedule of these lists, with chunks round robin, or on a V where two chunks run only there, or are faster.

    Raises:
        ConfigError: they cannot run.
    """
    rows = tuple(tuple(map(Action.parse, row)) for row in lists)
    v, p = 1 + max((a.chunk for row in rows for a in row), default=0), len(rows)
    tried = [Schedule(name, rows, placement) for placement in [round_robin(p, v), *[v_shaped(p)] * (v == 2)]]
    problems = [check(one) for one in tried]
    running = [one for one, found in zip(tried, problems, strict=True) if not found]
    if not running:
        both = ("with chunks round robin: ", "; on a V it cannot run either") if v == 2 else ("", "")
        raise ConfigError(both[0] + problems[0][0] + both[1])
    return min(running, key=lambda one: simulate(one, half_w(one)).makespan)
