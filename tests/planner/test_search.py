"""The search against all layouts planned one by one; what flags fix; the command lines that it prints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from minimegatron import cli
from minimegatron.config.run import RunConfig
from minimegatron.errors import ConfigError
from minimegatron.planner.cluster import CLUSTERS
from minimegatron.planner.layouts import Layout, layouts
from minimegatron.planner.planning import plan
from minimegatron.planner.search import Estimator, search
from minimegatron.training.arguments import parse_args
from minimegatron.training.rules import check_run
from tests.thorough import SLOW

SMALL = "--preset laptop-10m --bf16 --seq-length 1024 --global-batch-size 16 --micro-batch-size 2 --num-layers 4"
CLUSTER = CLUSTERS["h100"].replace(gpus_per_node=2)


def base_of(flags: str) -> RunConfig:
    return parse_args(flags.split(), reads=False)


@SLOW
def test_the_best_of_all_layouts_is_found() -> None:
    base = base_of(f"{SMALL} --recompute-granularity full --data-parallel-sharding-strategy optim_grads")
    every = {}
    for layout in layouts(base, 4, CLUSTER):
        try:
            every[layout] = plan(layout.run(base), 4, CLUSTER)
        except ConfigError:
            continue
    assert len(every) > 8
    best = min(every, key=lambda layout: every[layout].time.seconds)  # type: ignore[union-attr]
    found = search(base, 4, CLUSTER)
    assert found[0].plan.time == every[best].time
    seconds = [one.plan.time.seconds for one in found if one.plan.time]
    assert seconds == sorted(seconds) and len(seconds) == 5


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["laptop-10m", pytest.param("qwen1.5-moe-a2.7b", marks=pytest.mark.thorough)])
def test_estimates_are_near_plans(preset: str) -> None:
    base = base_of(f"--preset {preset} --bf16 --seq-length 2048 --global-batch-size 64 --num-layers 8")
    estimator, some = Estimator(base, 8, CLUSTERS["h100"]), list(layouts(base, 8, CLUSTERS["h100"]))
    checked = 0
    for layout in some[:: max(1, len(some) // 5)]:
        try:
            told = plan(layout.run(base), 8, CLUSTERS["h100"])
        except ConfigError:
            continue
        nbytes, seconds = estimator.estimate(layout)
        assert told.time is not None
        assert nbytes == pytest.approx(told.bytes, rel=0.18), layout
        assert seconds == pytest.approx(told.time.seconds, rel=0.25), layout
        checked += 1
    assert checked >= 3


def test_wgrad_inputs_count_between_the_two_halves_of_a_backward_pass_alone() -> None:
    """A microbatch that is recomputed keeps little before its backward pass, and much until its wgrad is computed."""
    base = base_of("--preset laptop-10m --bf16 --seq-length 2048 --global-batch-size 64 --num-layers 8")
    layout = Layout(2, 1, 2, 1, 2, 2, "zb_v", 2, "full", 0)
    told = plan(layout.run(base), 8, CLUSTERS["h100"])
    assert Estimator(base, 8, CLUSTERS["h100"]).estimate(layout)[0] == pytest.approx(told.bytes, rel=0.18)


@pytest.mark.thorough
def test_memory_prunes() -> None:
    base = base_of("--preset llama3-8b --bf16 --seq-length 4096 --global-batch-size 64")
    found = search(base, 8, CLUSTERS["h100"], 3)
    assert all(one.plan.fits for one in found)
    with pytest.raises(ConfigError, match="no layout of 1 H100 fits"):
        search(base, 1, CLUSTERS["h100"])


def test_what_a_flag_sets_stays() -> None:
    fixed = base_of(f"{SMALL} --tensor-model-parallel-size 1 --recompute-granularity full")
    assert {layout.tp for layout in layouts(fixed, 4, CLUSTER)} == {1}
    assert {layout.micro_batch for layout in layouts(fixed, 4, CLUSTER)} == {2}
    assert {layout.run(fixed).model.recompute_granularity for layout in layouts(fixed, 4, CLUSTER)} == {"full"}
    zeros = {layout.zero for layout in layouts(base_of(f"{SMALL} --use-distributed-optimizer"), 4, CLUSTER)}
    assert zeros == {1, 2, 3}


def test_a_prime_number_of_layers_is_cut_with_the_ends_counted() -> None:
    base = base_of("--preset laptop-10m --num-layers 7 --bf16 --seq-length 1024 --global-batch-size 24")
    found = {(layout.pp, layout.ends) for layout in layouts(base, 12, CLUSTER)}
    assert found == {(1, False), (3, True)}
    estimator = Estimator(base, 12, CLUSTER)
    layout = next(one for one in layouts(base, 12, CLUSTER) if one.ends and one.schedule == "1f1b")
    told = plan(layout.run(base), 12, CLUSTER)
    assert [len(one.layers) for one in told.memory.values()] == [2, 3, 2]
    assert estimator.estimate(layout)[0] == pytest.approx(told.bytes, rel=0.18)


def test_a_batch_is_needed() -> None:
    with pytest.raises(ConfigError, match="global-batch-size"):
        search(base_of("--preset laptop-10m"), 4, CLUSTER)


def test_the_flags_of_a_layout_make_the_run_that_was_planned() -> None:
    base = base_of(SMALL)
    for layout in list(layouts(base, 4, CLUSTER))[::17]:
        try:
            run = layout.run(base)
            check_run(run, 4, reads=False)
        except ConfigError:
            continue
        again = parse_args([*SMALL.split(), *layout.flags(base)], 4, reads=False)
        assert (again.model, again.parallel, again.training) == (run.model, run.parallel, run.training), layout


@SLOW
def test_the_command_prints_a_table_and_command_lines_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "pictures"
    words = f"--search --world-size 16 --top 2 --pictures {folder} {SMALL} --recompute-granularity full"
    assert cli.main(["plan", *words.split()]) == 0
    assert {"memory.png", "waterfall.png", "roofline.png", "search.png"} <= {file.name for file in folder.iterdir()}
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in folder.iterdir())
    out = capsys.readouterr().out
    head = next(line for line in out.splitlines() if line.startswith("tp"))
    assert head.split()[-4:] == ["GiB", "s/step", "TFLOP/s", "MFU"]
    torchrun = next(line for line in out.splitlines() if line.startswith("torchrun"))
    assert "--nnodes 2 --nproc-per-node 8" in torchrun and torchrun.count("--preset laptop-10m") == 1
    words = torchrun.split(" -m minimegatron train ")[1].split()
    check_run(parse_args(words, 16, reads=False), 16, reads=False)
    assert any(line.startswith("sbatch --nodes 2 ") for line in out.splitlines())


@pytest.mark.parametrize("wrong", [{"recompute": "mlp"}, {"zero": 4}])
def test_a_layout_with_a_name_that_is_none_is_refused(wrong: dict[str, Any]) -> None:
    point = Layout(1, 1, 1, 1, 1, 1, "1f1b", 1, **({"recompute": "none", "zero": 1} | wrong))
    with pytest.raises(ConfigError, match="in a layout"):
        point.run(base_of(SMALL))
