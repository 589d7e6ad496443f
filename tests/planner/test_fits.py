"""Whether a run fits, against bytes counted in it: for a GPU with 3 % more than its peak, and one with 3 % less."""

from __future__ import annotations

from typing import Any

import pytest

from minimegatron.kernels import build
from minimegatron.planner.cluster import Cluster
from minimegatron.planner.planning import plan
from tests.training.test_memory_plan import layouts, measured, run_of

CHEAP = ("selective", "zb-h1")  # the others: thorough; predictions themselves are in `test_memory_plan`


def fixtures() -> list[Any]:
    """The layouts whose memory is counted elsewhere, if their peak is predicted."""
    names = [param.values[0] for param in layouts()]
    return [pytest.param(name, marks=[pytest.mark.thorough] * (name not in CHEAP)) for name in names]


@pytest.mark.parametrize("name", fixtures())
def test_a_run_fits_where_there_is_room_and_only_there(ranks: Any, name: str) -> None:
    world, run = run_of(name)
    if run.model.kernels == "emulated" and build.compiler("emulated") is None:
        pytest.skip("no g++ or clang++: kernels cannot be emulated here")
    peak = max(sum(owners.values()) for _, owners, _ in ranks(world).run(measured, name))
    verdicts = {
        share: plan(run, world, Cluster(memory=share * peak, reserve=0.0, device="cpu")).fits for share in (0.97, 1.03)
    }
    assert verdicts == {0.97: False, 1.03: True}
