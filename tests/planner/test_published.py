"""Predicted beside published: no number of a run that is judged was used to make the prediction.

| GPU  | its shares of the peaks come from                             | judged here                                 |
|------|---------------------------------------------------------------|---------------------------------------------|
| A100 | the 22B and 1T models of arXiv 2205.05198, fitted             | its 175B and 530B; all of 2104.04473        |
|      | `call`: 40 steps on a node, of arXiv 2312.12391, fitted       | others of its steps, on a node and on 8 to 64 |
| H100 | the 1.7B and 16B rows of Megatron-LM's README, fitted;        | the README's other seven rows; Llama 3 405B |
|      | attention: kernels measured in arXiv 2407.08608               |                                             |

Runs before 2023 kept all weights of attention, and one kernel made them (`closed_forms.fused_softmax`). TFLOP/s are
compared in the table's own convention. The README says neither micro-batches nor chunks; taken are those
that the planner finds fastest.
"""

from __future__ import annotations

import itertools
import statistics

import pytest

from minimegatron.planner import closed_forms
from minimegatron.planner.cluster import CLUSTERS
from minimegatron.planner.pass_time import LAUNCHES
from minimegatron.planner.timing import step_time
from minimegatron.training.flops import step_flops
from tests.planner import published
from tests.thorough import SLOW, mostly_thorough

FITTED = "1.7B", "16B"  # of the README


@pytest.fixture(scope="module", params=mostly_thorough([["22B", "175B"], list(published.SELECTIVE_RUNS)], [0]), ids=len)
def selective(request: pytest.FixtureRequest) -> dict[tuple[str, bool], float]:
    """Relative errors of step times, by model and whether all is recomputed."""
    found = {}
    for name, full in itertools.product(request.param, (True, False)):
        gpus, run, seconds = published.selective_run(name, full)
        found[name, full] = step_time(run, gpus, CLUSTERS["a100"]).seconds / seconds - 1
    return found


@pytest.mark.slow
def test_step_times_of_2022(selective: dict[tuple[str, bool], float]) -> None:
    """Two numbers are fitted to four step times, so those are not met exactly.

    Nor would two step times be: either share moves both rows of a model alike, and the predictions of 22B with full and
    with selective recompute stay 6 to 8 % apart for `matmul_share` in 0.9 ... 1 and `copy_share` in 0.5 ... 0.64. For
    the same reason its gain below is 7 % off, that of the others at most 3 %.
    """
    fitted = [abs(error) for (name, _), error in selective.items() if name in ("22B", "1T")]
    judged = [abs(error) for (name, _), error in selective.items() if name not in ("22B", "1T")]
    assert statistics.mean(judged) < 0.03 and max(judged) < 0.05, selective
    assert statistics.mean(fitted) < 0.045 and max(fitted) < 0.06, selective


@pytest.mark.slow
def test_what_selective_recompute_gains(selective: dict[tuple[str, bool], float]) -> None:
    """Published: 29.0, 31.8, 29.7 and 32.1 percent; `test_step_times_of_2022` says why 22B is off by more."""
    for name in {name for name, _ in selective}:
        row = published.SELECTIVE_RUNS[name]
        gain = row[-2] * (1 + selective[name, True]) / (row[-1] * (1 + selective[name, False]))
        assert gain == pytest.approx(row[-2] / row[-1], rel=0.07), name


def in_order(told: dict[str, float], measured: dict[str, float]) -> bool:
    """Whether runs whose published rates are more than a tenth apart are predicted in their order."""
    pairs = [(a, b) for a, b in itertools.permutations(measured, 2) if measured[b] > 1.1 * measured[a]]
    assert len(pairs) >= 5
    return all(told[a] < told[b] for a, b in pairs)


def judge(told: dict[str, float], measured: dict[str, float]) -> None:
    errors = {name: told[name] / measured[name] - 1 for name in measured}
    assert statistics.mean(map(abs, errors.values())) < 0.08, errors


@pytest.mark.thorough
def test_weak_scaling_of_2021() -> None:
    """By its own convention: FLOPs with full recompute and the whole square of attention."""
    told, measured = {}, {}
    for name, (h, layers, *_, batch, _, tflops) in published.WEAK_A100.items():
        gpus, run, measured[name] = published.weak_a100(name)
        flops = closed_forms.hardware_flops(batch, 2048, layers, h, 51_200, "full")
        told[name] = flops / step_time(run, gpus, CLUSTERS["a100"]).seconds / gpus / 1e12
        assert measured[name] == tflops
    assert in_order(told, measured), told
    judge(told, measured)


SOME = ["1.7B", "7.1B", "16B", "32B", "70B", "314B"]


@SLOW
@pytest.mark.parametrize("names", mostly_thorough([SOME, list(published.WEAK_H100)], [0]), ids=len)
def test_weak_scaling_of_the_readme(names: list[str]) -> None:
    told, measured = {}, {}
    for name in names:
        gpus, run, measured[name] = published.weak_h100(name, *published.FASTEST[name])
        flops = step_flops(run.model, run.training.global_batch_size or 0, 4096, causal=False)  # the table's convention
        told[name] = flops / step_time(run, gpus, CLUSTERS["h100"]).seconds / gpus / 1e12
    assert in_order(told, measured), told
    for name in FITTED:  # within 2 % with a copy_share of 0.278, but then the runs are out of order
        assert told.pop(name) == pytest.approx(measured.pop(name), rel=0.04)
    judge(told, measured)


@pytest.mark.parametrize("name", mostly_thorough(list(published.LLAMA_405B), lambda name: name == "8k, 16,384 GPUs"))
def test_llama_3_405b_that_nothing_was_fitted_to(name: str) -> None:
    """With half of the square, and v 4: neither is published."""
    gpus, run, tflops = published.llama_405b(name)
    assert step_time(run, gpus, CLUSTERS["h100"]).tflops == pytest.approx(tflops, rel=0.12)


@SLOW
@pytest.mark.parametrize(
    "rows", mostly_thorough([published.NODE_A100[:6], published.NODE_A100, published.NODES_A100], [0]), ids=len
)
def test_steps_that_vtrain_measured(rows: list[tuple[float, ...]]) -> None:
    cluster, errors = CLUSTERS["a100"].replace(between=12.5e9), []
    for row in rows:
        gpus, run, seconds = published.measured_a100(row)
        told = step_time(run, gpus, cluster)
        errors.append(told.seconds / seconds - 1)
        waits = told.parts.get(LAUNCHES, 0.0) / told.seconds
        assert gpus <= 8 or waits < 0.01, f"large work waits for the host {waits:.1%} of a step"
    assert statistics.mean(map(abs, errors)) < 0.15, errors


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["1.7B", "16B", "70B", "119B", "177B"])
def test_micro_batches_and_chunks_are_those_that_are_fastest(name: str) -> None:
    layers, pp = published.WEAK_H100[name][1], published.WEAK_H100[name][4]
    chunks = [v for v in range(1, layers // pp + 1) if layers % (pp * v) == 0] if pp > 1 else [1]
    told = {}
    for micro, v in itertools.product((1, 2, 4), chunks):
        gpus, run, _ = published.weak_h100(name, micro, v)
        told[micro, v] = step_time(run, gpus, CLUSTERS["h100"]).tflops
    assert told[published.FASTEST[name]] >= 0.99 * max(told.values()), told
