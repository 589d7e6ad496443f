"""A window of steps under a profiler: the steps that were asked for, on the ranks that were asked for."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minimegatron import trace
from minimegatron.commands import trace as command
from minimegatron.config import TrainingConfig
from minimegatron.errors import ConfigError
from minimegatron.training.observers import Step
from minimegatron.training.observers.profile import Profile
from minimegatron.viz.merged_trace import merge, problems
from tests.training.test_trainer import train

CPU = torch.device("cpu")


def over(iteration: int) -> Step:
    return Step(iteration, 0, 1, iteration, 1.0, None)


@pytest.mark.slow
def test_a_chrome_trace_of_two_steps(tmp_path, capsys):
    where = f"--profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 3 --profile-dir {tmp_path}/new"
    train(f"--train-iters 4 --global-batch-size 2 {where}")
    path, line = sorted(Path(tmp_path, "new").iterdir())
    assert [span["name"] for span in json.loads(line.read_text())["spans"]].count("forward") == 4
    assert path.name == "rank0_steps1-3.json" and str(path) in capsys.readouterr().out
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "X"]
    assert names.count("optimizer_step") == 2 and names.count("forward") == 4, "two microbatches a step"
    assert any(name.startswith("aten::") for name in names)
    assert not trace._ranges


def test_a_window_that_the_run_does_not_reach_the_end_of_is_written(tmp_path):
    where = f"--profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 9 --profile-dir {tmp_path}"
    train(f"--train-iters 2 {where}")
    names = [e.get("name") for e in json.loads((tmp_path / "rank0_steps1-9.json").read_text())["traceEvents"]]
    assert names.count("optimizer_step") == 1


def test_other_ranks_and_other_steps_are_left_alone(tmp_path):
    settings = TrainingConfig(profile=True, use_pytorch_profiler=True, profile_ranks=(1,), profile_dir=str(tmp_path))
    profile = Profile(settings, 0, CPU)
    for done in range(15):
        profile.before_step(done)
        assert not trace._ranges
        profile.after_step(over(done + 1))
    profile = Profile(settings, 1, CPU, say=lambda line: None)
    inside = []
    for done in range(15):
        profile.before_step(done)
        inside += [done] if trace._ranges else []
        profile.after_step(over(done + 1))
    assert inside == [10, 11]


def test_a_window_without_torchs_profiler_is_a_timeline_that_can_be_merged(tmp_path):
    train(f"--profile --profile-step-start 1 --profile-step-end 2 --train-iters 3 --profile-dir {tmp_path}")
    timelines, others = command.read(tmp_path)
    assert not others and problems(merge(timelines)) == []
    names = [span["name"] for span in timelines[0]["spans"]]
    assert names.count("optimizer_step") == 1 and {"data", "forward", "backward"} <= set(names)


def test_nvtx_ranges_and_the_capture_range_of_nsys(monkeypatch, tmp_path):
    """What a GPU is told, in order; there is none here."""
    told = []

    @contextlib.contextmanager
    def ranged(name):
        told.append(name)
        yield
        told.append(f"/{name}")

    tell = lambda what: lambda *args: told.append(what)  # noqa: E731
    cudart = SimpleNamespace(cudaProfilerStart=tell("start"), cudaProfilerStop=tell("stop"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
    monkeypatch.setattr(torch.cuda, "synchronize", tell("wait"))
    monkeypatch.setattr(torch.autograd.profiler, "emit_nvtx", lambda record_shapes: ranged("autograd"))
    monkeypatch.setattr(torch.cuda.nvtx, "range", ranged)
    profile = Profile(TrainingConfig(profile=True, profile_dir=str(tmp_path)), 0, torch.device("cuda"))
    profile.before_step(10)
    with trace.span("forward"):
        told.append("work")
    profile.after_step(over(11))
    assert told[-1] == "/forward"
    profile.after_step(over(12))
    assert told == ["wait", "start", "autograd", "forward", "work", "/forward", "/autograd", "wait", "stop"]


@pytest.mark.parametrize(
    "line, words",
    [
        ("--profile --use-pytorch-profiler --profile-ranks 0 1", "choose among 0 to 0"),
        ("--profile --use-pytorch-profiler --train-iters 10", "--profile-step-start below 10"),
        ("--use-pytorch-profiler", "without profile"),
        ("--profile-step-start 3 --profile-step-end 3", "choose start < end"),
        ("--profile --use-pytorch-profiler --profile-dir /dev/null/x", "a folder to write"),
    ],
)
def test_refusals(line, words):
    with pytest.raises(ConfigError) as caught:
        train(line)
    assert words in str(caught.value)
