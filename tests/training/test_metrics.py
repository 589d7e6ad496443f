"""What a run says: Megatron's line, and the same numbers in every log."""

from __future__ import annotations

import json
import math
import re

import pytest

from minimegatron.comm.mesh import Axis, Mesh
from minimegatron.config.run import RunConfig
from minimegatron.errors import ConfigError
from minimegatron.training.arguments import parse_args
from minimegatron.training.flops import step_flops
from minimegatron.training.observers.metrics import Metrics, format_validation, perplexity
from minimegatron.training.reports import StepReport

# The pattern by which scripts read Megatron's logs, and our three fields after it.
LINE = re.compile(
    r"^ iteration +(\d+)/ +(\d+) \| consumed samples: +(\d+) \| elapsed time per iteration \(ms\): (\d+\.\d) \| "
    r"throughput per GPU \(TFLOP/s/GPU\): (\S+) \| learning rate: (\d\.\d{6}E[+-]\d\d) \| global batch size: +(\d+) \| "
    r"lm loss: (\d\.\d{6}E[+-]\d\d) \| loss scale: (\d+\.\d) \| grad norm: (\d+\.\d{3}) \| "
    r"number of skipped iterations: +(\d+) \| number of nan iterations: +(\d+) \| tokens/s: (\d+) \| "
    r"peak memory \(GB\): \d+\.\d\d \|$"
)


def run_of(*flags: str) -> RunConfig:
    return parse_args(["--mock-data", "--seq-length", "32", *flags])


def report(loss: float = 2.5, **fields) -> StepReport:
    return StepReport({"lm loss": loss}, num_tokens=100, grad_norm=1.25, learning_rate=1e-3, **fields)


def test_the_line(capsys):
    run = run_of()
    metrics = Metrics(run, 100, Mesh.serial())
    metrics.step(report(), iteration=7, consumed_samples=56, batch_size=8, seconds=0.5)
    found = LINE.match(capsys.readouterr().out.rstrip("\n"))
    assert found, "not Megatron's line"
    assert found.groups()[:4] == ("7", "100", "56", "500.0")
    assert found.groups()[5:] == ("1.000000E-03", "8", "2.500000E+00", "1.0", "1.250", "0", "0", "512")
    tflops = step_flops(run.model, 8, 32) / 0.5 / 1e12
    assert float(found[5]) == pytest.approx(tflops, rel=0.005)


def test_throughput_is_of_one_rank_and_tokens_are_of_all(capsys):
    mesh = Mesh.serial()
    mesh.world = Axis("world", (0, 1, 2, 3), 0)
    run = run_of("--micro-batch-size", "2")
    Metrics(run, 9, mesh).step(report(), 1, 8, 8, 0.5)
    line = capsys.readouterr().out
    assert f"(TFLOP/s/GPU): {step_flops(run.model, 8, 32) / 0.5 / 4 / 1e12:.3g} |" in line and "tokens/s: 512 |" in line


def test_a_line_is_the_mean_of_its_interval(capsys):
    metrics = Metrics(run_of("--log-interval", "3"), 9, Mesh.serial())
    for i, (loss, seconds) in enumerate([(1.0, 0.1), (2.0, 0.2), (6.0, 0.6), (5.0, 0.1)], 1):
        metrics.step(report(loss), i, 8 * i, 8, seconds)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert (
        "(ms): 300.0 |" in lines[0]
        and "lm loss: 3.000000E+00 |" in lines[0]
        and f"tokens/s: {24 * 32 / 0.9:.0f}" in lines[0]
    )


def test_skipped_and_nan_steps_are_counted_and_stay_out_of_the_mean(capsys):
    metrics = Metrics(run_of("--log-interval", "4"), 9, Mesh.serial())
    steps = [report(1.0), report(9.0, skipped=True), report(math.nan, skipped=True), report(3.0)]
    for i, step in enumerate(steps, 1):
        metrics.step(step, i, 8 * i, 8, 0.1)
    line = capsys.readouterr().out
    assert "lm loss: 2.000000E+00 |" in line
    assert "skipped iterations:   2 |" in line and "nan iterations:   1 |" in line


def test_validation_lines():
    line = format_validation({"lm loss": 2.0}, "iteration 100 on test set")
    assert (
        line
        == " validation loss at iteration 100 on test set | lm loss value: 2.000000E+00 | lm loss PPL: 7.389056E+00 |"
    )
    assert perplexity(1000.0) == math.exp(20)


def test_every_log_gets_the_same_numbers(tmp_path, capsys):
    log, board = tmp_path / "logs" / "run.jsonl", tmp_path / "board"
    run = run_of("--log-file", str(log), "--tensorboard-dir", str(board))
    metrics = Metrics(run, 2, Mesh.serial())
    metrics.step(report(2.5, num_zeros=3), 1, 8, 8, 0.5)
    metrics.validation({"lm loss": 2.0}, 1)
    metrics.close()
    config, step, validation = map(json.loads, log.read_text().splitlines())
    assert config["event"] == "config" and config["model"] == json.loads(json.dumps(run.model.to_dict()))
    assert (step["iteration"], step["losses"], step["grad_norm"], step["num_zeros"]) == (1, {"lm loss": 2.5}, 1.25, 3)
    assert validation == {"event": "validation", "iteration": 1, "losses": {"lm loss": 2.0}}
    assert "num zeros: 3 |" in capsys.readouterr().out

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(board)).Reload()
    values = {tag: events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]}
    wanted = {
        "lm loss": 2.5,
        "grad-norm": 1.25,
        "batch-size": 8,
        "loss-scale": 1.0,
        "num-zeros": 3,
        "lm loss validation": 2.0,
    }
    assert {tag: values[tag] for tag in wanted} == wanted
    assert values["learning-rate"] == pytest.approx(1e-3) and "mfu" not in values


def test_only_rank_zero_speaks_and_writes(tmp_path, capsys):
    mesh = Mesh.serial()
    mesh.rank = 1
    metrics = Metrics(run_of("--log-file", str(tmp_path / "run.jsonl")), 2, mesh)
    metrics.step(report(), 1, 8, 8, 0.1)
    metrics.validation({"lm loss": 2.0}, 1)
    metrics.close()
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())


def test_mfu_is_against_the_dense_peak_of_sixteen_bits(capsys, monkeypatch):
    run = run_of("--bf16")
    metrics = Metrics(run, 2, Mesh.serial())
    assert metrics.peak is None, "a CPU has no peak here"
    metrics.peak = 989.5
    seconds = step_flops(run.model, 8, 32) / (0.5 * 989.5e12)
    metrics.step(report(), 1, 8, 8, seconds)
    assert "MFU: 50.0 % |" in capsys.readouterr().out


def test_a_log_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write the log"):
        Metrics(run_of("--log-file", str(tmp_path / "file" / "run.jsonl")), 2, Mesh.serial())


def test_a_log_file_has_one_run_and_the_earlier_ones_are_kept(tmp_path, capsys):
    log = tmp_path / "run.jsonl"
    for _ in range(3):
        Metrics(run_of("--log-file", str(log)), 2, Mesh.serial()).close()
    lines = {path.name: len(path.read_text().splitlines()) for path in tmp_path.iterdir()}
    assert lines == {"run.jsonl": 1, "run.jsonl.1": 1, "run.jsonl.2": 1}
    assert capsys.readouterr().out.splitlines()[-1] == f"the log of an earlier run, {log}, is now {log}.2"
    Metrics(run_of("--log-file", str(log), "--load", str(tmp_path)), 2, Mesh.serial()).close()
    assert len(log.read_text().splitlines()) == 2 and len(list(tmp_path.iterdir())) == 3, "a run that goes on"
