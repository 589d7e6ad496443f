"""Whether a run fits, whose fault it is, what would make it fit, and the command that prints it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from minimegatron import cli
from minimegatron.config.run import RunConfig
from minimegatron.models import chunks
from minimegatron.parallel.pipeline.schedules import Schedule, build_schedule
from minimegatron.planner.cluster import CLUSTERS, read_cluster
from minimegatron.planner.planning import changed, cheapest_changes, plan
from minimegatron.planner.report import lasting
from minimegatron.training.arguments import parse_args
from tests.thorough import SLOW

H100 = CLUSTERS["h100"]
EIGHT = "--preset llama3-8b --bf16 --seq-length 4096 --micro-batch-size 1 --global-batch-size 64"


def run_of(flags: str, world: int) -> RunConfig:
    return parse_args(flags.split(), world, reads=False)


# 8.03e9 parameters: 18 bytes each are 134.6 GiB, and 16-bit weights with fp32 gradients alone 44.9.
@pytest.mark.parametrize(
    "flags, world, fits, blame",
    [
        (EIGHT, 1, False, "moments"),
        (f"{EIGHT} --use-distributed-optimizer --recompute-granularity full", 8, True, None),
        (f"{EIGHT} --tensor-model-parallel-size 2", 2, False, None),
        (f"{EIGHT} --tensor-model-parallel-size 4 --sequence-parallel", 4, True, None),
        (f"{EIGHT} --data-parallel-sharding-strategy optim_grads_params", 64, True, None),
        (f"{EIGHT} --data-parallel-sharding-strategy optim_grads_params --seq-length 131072", 64, False, "activations"),
    ],
)
def test_whether_it_fits_is_as_arithmetic_by_hand_says(flags: str, world: int, fits: bool, blame: str | None) -> None:
    told = plan(run_of(flags, world), world, H100)
    assert told.fits == fits and blame in (None, told.blame)


def test_a_run_fits_where_there_is_room_and_only_there() -> None:
    """That the bytes are those of a run is in `tests/training/test_memory_plan`."""
    run = run_of("--preset laptop-10m --bf16 --seq-length 1024", 1)
    nbytes = plan(run, 1, H100).bytes
    for memory, fits in ((nbytes - 1, False), (nbytes, True)):
        assert plan(run, 1, H100.replace(memory=float(memory), reserve=0.0)).fits == fits


def test_no_schedule_is_built_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the lists of all ranks: built for each rank it took most of the time of a deep pipeline's plan."""
    built = list[tuple[object, ...]]()

    def build(*sizes: object, **options: object) -> Schedule:
        built.append(sizes)
        return build_schedule(*sizes, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(chunks, "build_schedule", build)
    flags = "--preset laptop-10m --bf16 --pipeline-model-parallel-size 3 --global-batch-size 35 --micro-batch-size 1"
    plan(run_of(flags, 3), 3, H100)
    assert built and len(set(built)) == len(built)


@SLOW
def test_three_changes_that_make_it_fit_the_fastest_first() -> None:
    told = plan(run_of(EIGHT, 8), 8, H100)
    assert not told.fits
    found = cheapest_changes(told)
    assert len(found) == 3 and all(change.plan.fits for change in found)
    seconds = [change.plan.time.seconds for change in found if change.plan.time]
    assert seconds == sorted(seconds) and len(seconds) == 3
    for change in found:  # the flags say what was planned
        again = plan(run_of(f"{EIGHT} {change.flags}", 8), 8, H100)
        assert again.time == change.plan.time and again.bytes == change.plan.bytes


def test_a_change_of_the_layout_takes_along_what_follows_from_it() -> None:
    run = run_of("--preset mixtral-8x7b --bf16 --seq-length 4096", 1)
    assert changed(run, tensor_model_parallel_size=4, sequence_parallel=True).parallel.expert_tensor_parallel_size == 4
    assert changed(run, micro_batch_size=2).training.micro_batch_size == 2


def test_what_is_in_the_memory_of_the_host_needs_no_room_on_the_gpu() -> None:
    here, there = (plan(run_of(f"{EIGHT}{flag}", 8), 8, H100) for flag in ("", " --optimizer-cpu-offload"))
    moments = here.memory[0].lasting["moments"]
    assert there.memory[0].lasting["moments (host)"] == moments
    assert there.bytes <= here.bytes - moments and there.memory[0].total > there.bytes


def test_days_and_cost() -> None:
    told = plan(run_of(f"{EIGHT} --use-distributed-optimizer", 8), 8, H100.replace(price=2.0))
    assert told.time is not None
    steps = 1e9 / (64 * 4096)
    assert told.days(1e9) == pytest.approx(steps * told.time.seconds / 86_400)
    assert told.cost(1e9) == pytest.approx(told.days(1e9) * 24 * 8 * 2.0)


@pytest.mark.parametrize(
    "days, words",
    [(62.04, "62.0 days"), (2, "2.0 days"), (1.5, "36.0 hours"), (1 / 48, "30.0 minutes"), (4e-4, "0.6 m")],
)
def test_a_short_training_takes_hours_or_minutes_and_not_no_days(days: float, words: str) -> None:
    assert lasting(days).startswith(words)


def command(words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = cli.main(["plan", *words.split()])
    return status, capsys.readouterr().out


@SLOW
def test_the_command_says_why_it_does_not_fit_and_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = command(f"--world-size 8 {EIGHT}", capsys)
    assert status == 1
    assert "does not fit" in out and "% are moments" in out and "what makes it fit" in out


def test_the_command_explains_every_number(capsys: pytest.CaptureFixture[str]) -> None:
    words = (
        f"--world-size 8 --explain --tokens 1e12 --price 2 {EIGHT} --tensor-model-parallel-size 8 --sequence-parallel"
    )
    status, out = command(words, capsys)
    assert status == 0
    for text in (
        "fits: ",
        "MFU",
        "half of attention's square",
        "2 m n k",
        "bytes, backward",
        "reduce_scatter/tp",
        "days",
    ):
        assert text in out, text
    rows = [line for line in out.splitlines() if line.startswith("products at the peak")]
    assert len(rows) == 1 and "over the peak" in rows[0]


def test_a_published_models_file_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {
        "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 512,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    status, out = command(f"--world-size 2 --bf16 --load {tmp_path} --seq-length 512", capsys)
    assert status == 0 and "layers 0-1" in out and "fits: " in out


def test_what_has_no_formula_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    status, out = command("--world-size 1 --cluster a100 --bf16 --preset laptop-10m --fp8-format hybrid", capsys)
    assert status == 0 and "no time is predicted" in out and "FP8 products of A100" in out


def test_the_command_measures_and_writes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = H100.replace(device="cpu", overlaps=False, operations={"norm": [1e-6, 0.0, 1e-9]})
    asked = list[int]()
    monkeypatch.setattr("minimegatron.planner.measure.measure", lambda device, ranks: asked.append(ranks) or found)
    file = tmp_path / "here.json"
    status, out = command(f"--measure {file} --world-size 4", capsys)
    assert status == 0 and asked == [4] and str(file) in out and read_cluster(str(file)) == found
    status, out = command(f"--cluster {file} --world-size 1 --preset laptop-10m", capsys)
    assert status == 0 and "fits: " in out
