"""What a run says: Megatron's line, and the same numbers in every log."""

from __future__ import annotations

import json
import math
import os
import re
import sqlite3
import subprocess
import sys
from types import SimpleNamespace

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


def test_trackers_get_the_same_tags(monkeypatch, capsys):
    """W&B and trackio have one interface: `init`, and a run's `log` and `finish`."""
    told: list[tuple] = []

    class Run:
        def log(self, tags: dict, step: int) -> None:
            told.append((step, tags))

        def finish(self) -> None:
            told.append(("finish",))

    def module(name: str) -> SimpleNamespace:
        return SimpleNamespace(__spec__=object(), init=lambda **options: told.append((name, options)) or Run())

    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, module(name))
    run = run_of(*"--wandb-project p --wandb-exp-name e --trackio-project q".split())
    metrics = Metrics(run, 2, Mesh.serial())
    metrics.say("a line for the console and the log file")
    metrics.step(report(2.5), 1, 8, 8, 0.5)
    metrics.close()
    (wandb, first), (trackio, second), (step, tags), again, *ends = told
    assert (wandb, first["project"], first["name"], trackio, second["project"]) == ("wandb", "p", "e", "trackio", "q")
    assert first["config"] == second["config"] == run.to_dict() and ends == [("finish",)] * 2
    assert step == 1 and tags["lm loss"] == 2.5 and tags["samples-per-second"] == 16.0 and again == (1, tags)


@pytest.mark.thorough
def test_trackers_that_are_installed_write_here(tmp_path, monkeypatch):
    pytest.importorskip("trackio")
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    code = (
        "from minimegatron.comm.mesh import Mesh; from minimegatron.training.observers.metrics import Metrics; "
        "from tests.training.test_metrics import report, run_of; "
        "m = Metrics(run_of(*'--wandb-project p --wandb-save-dir . --trackio-project q'.split()), 2, Mesh.serial()); "
        "m.step(report(2.5), 1, 8, 8, 0.5); m.close()"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment, timeout=240)
    with sqlite3.connect(tmp_path / "q.db") as database:
        ((step, metrics),) = database.execute("select step, metrics from metrics").fetchall()
    assert step == 1 and json.loads(metrics)["lm loss"] == 2.5
    (written,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert written.stat().st_size > 0


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
