"""The spans of units: in which order they come, and that gathers of their weights lie between them."""

from __future__ import annotations

from itertools import groupby, pairwise
from typing import Any

import pytest

from minimegatron import trace
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.models.decoder import build_model
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.parallel.data.units import units_in_trace
from minimegatron.viz.gathers import gathers_of
from tests.twin import Case, accumulate

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def events_of(rank: int, world: int, recompute: bool) -> tuple[list[trace.Event], int]:
    """Of two microbatches in the block; hooks that are left after it."""
    mesh = Mesh.build(ParallelConfig())
    case = Case({}, {"num_layers": 3, **(FULL if recompute else {})}, accumulation=2)
    ddp = DistributedDataParallel(build_model(case.config, mesh, 0), mesh, sharding="optim_grads_params")
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in ddp.modules()]
    with trace.record(rank) as log, units_in_trace(ddp):
        accumulate(ddp, case, mesh)
    left = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in ddp.modules()]
    return log.events, sum(left) - sum(hooks)


@pytest.mark.parametrize("recompute", [False, True])
def test_units_run_forward_and_backward_one_after_the_other(ranks: Any, recompute: bool) -> None:
    for events, left in ranks(2).run(events_of, recompute):
        assert left == 0
        spans = sorted((e for e in events if e.kind == "unit"), key=lambda e: e.start)
        assert all(a.end <= b.start for a, b in pairwise(spans)), "one at a time"
        runs = [key for key, _ in groupby((e.name, e.note) for e in spans)]
        layers = [(name, note) for name, note in runs if note != "outside"]
        once = [("forward", f"unit {i}") for i in range(3)] + [("backward", f"unit {i}") for i in (2, 1, 0)]
        assert layers == 2 * once
        assert runs[0] == ("forward", "outside") and ("backward", "outside") in runs
        for gather in gathers_of(events):
            assert not any(e.start < gather.end < e.end for e in spans), "what is waited for is not computed"
