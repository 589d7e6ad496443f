"""This machine as a cluster: what is timed is what the planner counts, and what is fitted gives the times back."""

from __future__ import annotations

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.footprint.prediction import Work, sizes_of
from minimegatron.planner import measure as operations
from minimegatron.planner.cluster import CLUSTERS, Cluster
from minimegatron.planner.measure import CPU, SHIFT, Timed, fits, fitted, measure, trials
from minimegatron.planner.timing import pass_time, step_time
from minimegatron.planner.work import work_of
from tests.planner.test_timing import run_of

COSTS = [3e-5, 2e-11, 7e-10]
KINDS = {"linear", "attention", "norm", "activation", "table", "loss", "optimizer"}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that take no time."""
    monkeypatch.setattr(operations, "SIDES", [(8, 16, 24), (16, 8, 8)])
    monkeypatch.setattr(operations, "SHAPES", [(32, 8, 16, 2), (32, 16, 8, 1)])
    monkeypatch.setattr(operations, "WORDS", [(8, 64)])
    monkeypatch.setattr(operations, "LOGITS", (8, 64))
    monkeypatch.setattr(operations, "UPDATED", (16,))


def test_every_operation_is_run_forward_and_backward(small: None) -> None:
    found = list(trials())
    assert {trial.kind for trial in found} == KINDS
    for trial in found:
        trial.run()
        assert trial.asked[0] > 0 and sum(trial.asked[1:]) > 0, trial.kind


@pytest.mark.parametrize("kind", ["linear", "attention", "norm", "activation", "table"])
def test_what_is_fitted_is_what_the_planner_multiplies(kind: str) -> None:
    """A layer's seconds, from a cluster that knows this operation alone, are those of the trial of that shape."""
    config, mesh = operations.model(64, 4, 512), Mesh.serial()
    z = sizes_of(config, mesh, OptimizerConfig(), Work(32, 2))
    trial = operations.linear(64, 48, 80) if kind == "linear" else getattr(operations, kind)(config, z)
    known = Cluster(device="cpu", operations={kind: COSTS})
    module = operations.ColumnParallelLinear(48, 80, mesh.tp, init=operations.Init(), bias=False)
    if kind != "linear":
        with torch.device("meta"):
            model = operations.one_of_each(config, mesh)
        module = model.embedding if kind == "table" else model.decoder.layers["0"]
    op = next(op for op in work_of(module, z) if kind in (op.kind, "linear"))
    told, products = pass_time([op], (), z, known), 3.5 if kind == "attention" else 3.0
    assert trial.asked[1] == pytest.approx(products * op.product.flops if op.product is not None else 0.0)
    assert told.forward + told.backward == pytest.approx(sum(a * b for a, b in zip(trial.asked, COSTS, strict=True)))


def test_times_are_given_back() -> None:
    asked = [(2.0, 1e9, 1e6), (2.0, 8e9, 4e6), (6.0, 1e9, 9e6), (1.0, 2e8, 8e6), (4.0, 3e9, 0.0)]
    times = [sum(a * b for a, b in zip(row, COSTS, strict=True)) for row in asked]
    assert fitted(asked, times) == pytest.approx(COSTS, rel=1e-6)
    rows = [Timed("one", a, t) for a, t in zip(asked, times, strict=True)]
    rows += [Timed("other", a, 2 * t) for a, t in zip(asked, times, strict=True)]
    assert fits(rows)["other"] == pytest.approx([2 * cost for cost in COSTS], rel=1e-6)


def test_a_single_time_is_one_of_bytes() -> None:
    assert fitted([(2.0, 0.0, 4e6)], [1e-3]) == pytest.approx([0.0, 0.0, 2.5e-10])


def test_no_rate_is_negative_whatever_the_noise() -> None:
    """More bytes in less time: a line through both has a negative slope, or starts below 0."""
    for times in ([2e-3, 1e-3], [1e-3, 9e-3]):
        found = fitted([(1.0, 0.0, 1e6), (1.0, 0.0, 4e6)], times)
        assert min(found) >= 0 < max(found)


def test_an_operation_that_was_measured_takes_that_long_and_no_other_changes() -> None:
    base, run = CLUSTERS["h100"], run_of()
    before = step_time(run, 1, base).parts
    after = step_time(run, 1, base.replace(operations={"optimizer": [1.0, 0.0, 0.0]})).parts
    assert after == {**before, "optimizer": pytest.approx(1.0)}


def test_nothing_hides_where_the_processor_itself_carries() -> None:
    flags = {"tensor_model_parallel_size": 2, "overlap_grad_reduce": True, "ddp_bucket_size": 10**5}
    hides, waits = (
        step_time(run_of(flags), 4, CLUSTERS["h100"].replace(overlaps=is_so)).parts for is_so in (True, False)
    )
    assert waits["tp"] > hides["tp"] and waits["gradients"] > hides["gradients"]


def test_this_machine_is_a_cluster() -> None:
    found = measure(torch.device("cpu"), CPU, repeats=1)
    assert found.operations is not None
    assert set(found.operations) == KINDS | {"all_reduce", "all_gather", "reduce_scatter", SHIFT}
    assert all(min(of) >= 0 < max(of) for of in found.operations.values())
    assert found.matmul > 0 < found.copy and found.inside == found.between > 0
    assert found.usable == found.memory > 1e8 and found.device == "cpu" and not found.overlaps
    assert Cluster.from_dict(found.to_dict()) == found and step_time(run_of(), 1, found).seconds > 0
