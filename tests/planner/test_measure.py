"""This machine as a cluster: what is timed is what the planner counts, and what is fitted gives the times back."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.footprint.prediction import Work, sizes_of
from minimegatron.planner import measure as operations
from minimegatron.planner.cluster import CLUSTERS, Cluster
from minimegatron.planner.measure import CPU, SHIFT, Timed, fits, fitted, measure, trials
from minimegatron.planner.pass_time import pieces_run
from minimegatron.planner.timing import step_time
from tests.planner.test_timing import run_of
from tests.thorough import SLOW

COSTS = [3e-5, 2e-11, 7e-10]
KINDS = {"linear", "attention", "norm", "activation", "table", "loss", "optimizer"}


SMALL: dict[str, Any] = {  # shapes that take no time
    "SIDES": [(8, 16, 24), (16, 8, 8)], "SHAPES": [(32, 8, 16, 2), (32, 16, 8, 1)], "WORDS": [(8, 64)],
    "LOGITS": (8, 64), "UPDATED": (16,), "SIZES": {"cpu": (128, 2**20)}, "BETWEEN": {"cpu": 2**12},
}  # fmt: skip


def test_every_operation_is_run_forward_and_backward() -> None:
    with mock.patch.multiple(operations, **SMALL):
        found = list(trials())
    assert {trial.kind for trial in found} == KINDS
    for trial in found:
        trial.run()
        assert trial.asked[0] > 0 and sum(trial.asked[1:]) > 0, trial.kind


@pytest.mark.parametrize("kind", ["linear", "norm", "activation", "table"])
def test_what_is_timed_is_what_a_plan_counts(kind: str) -> None:
    """The calls, FLOPs and bytes of a trial, and those of the modules of this kind in a layer of that shape."""
    config = operations.model(64, 4, 512)
    z = sizes_of(config, Mesh.serial(), OptimizerConfig(), Work(64))
    run = pieces_run(z, again=False)
    names = {"linear": "self_attention.linear_qkv", "norm": "pre_mlp_layernorm", "activation": "mlp",
             "table": "embedding.word_embeddings"}  # fmt: skip
    told = [event.what for event in run.events if run.windows[event.window].name == names[kind]]
    trial = {
        "linear": lambda: operations.linear(64, 64, 128),
        "norm": lambda: operations.norm(config, 64, 1),
        "activation": lambda: operations.activation(config, 64, 1),
        "table": lambda: operations.table(64, 512),
    }[kind]()
    assert trial.asked[1] == sum(what.flops for what in told)
    if kind != "table":
        assert trial.asked[0] == pytest.approx(len(told), abs=2)
        assert trial.asked[2] == pytest.approx(sum(what.nbytes for what in told), rel=0.35)


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


def timed_on(rank: int, world: int, repeats: int) -> Any:
    with mock.patch.multiple(operations, **SMALL):
        return operations.on_rank(CPU, repeats)


@SLOW
@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_this_machine_is_a_cluster(torchrun: bool, ranks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On ranks that are there, and on those that torchrun starts as for the command."""
    if not torchrun:
        warm = lambda world, clock, repeats: ranks(world).run(timed_on, repeats, timeout=100)  # noqa: E731
        monkeypatch.setattr(operations, "_on_ranks", warm)
    found = measure(torch.device("cpu"), CPU, repeats=1)
    assert found.operations is not None
    assert set(found.operations) == KINDS | {"all_reduce", "all_gather", "reduce_scatter", SHIFT}
    assert all(min(of) >= 0 < max(of) for of in found.operations.values())
    assert found.matmul > 0 < found.copy and found.inside == found.between > 0
    assert found.usable == found.memory > 1e8 and found.device == "cpu" and not found.overlaps
    assert Cluster.from_dict(found.to_dict()) == found and step_time(run_of(), 1, found).seconds > 0
