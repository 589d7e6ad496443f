"""`examples/speedrun.sh` without what it runs: its command lines are right, what is done is not done again."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from minimegatron import cli
from minimegatron.training.arguments import parse_args

SCRIPT = Path(__file__).parents[2] / "examples" / "speedrun.sh"


def speedrun(folder: Path, **settings: str) -> tuple[subprocess.CompletedProcess[str], list[list[str]]]:
    """Run it with a Python that writes down what it is given: (how it ended, words of each command)."""
    stub, calls = folder / "python", folder / "calls"
    stub.write_text(f'#!/usr/bin/env bash\nprintf "%q " "$@" >> {calls}\necho >> {calls}\n')
    stub.chmod(0o755)
    calls.write_text("")
    environment = {name: value for name, value in os.environ.items() if name not in ("QUICK", "GPU", "CORPUS", "NPROC")}
    run = subprocess.run(
        ["bash", str(SCRIPT), str(folder / "run")],
        env={**environment, "PYTHON": str(stub), **settings},
        capture_output=True,
        text=True,
        timeout=60,
    )
    return run, [shlex.split(line) for line in calls.read_text().splitlines()]


def steps(words: list[str], task: str | None = None) -> tuple[int | None, float]:
    """Of a training on ranks: what its command line is read as."""
    flags = words[words.index("train" if task is None else task) + 1 :]
    flags = [flag for flag in flags if flag != "--use-checkpoint-args"]  # there is no checkpoint
    run = parse_args(flags, int(words[words.index("--nproc-per-node") + 1]), reads=False, task=task)
    return run.training.train_iters, run.optimizer.lr


@pytest.mark.parametrize(
    "settings, pretrain, chat",
    [
        ({}, (600, 3e-3), (200, 1e-3)),
        ({"QUICK": "1"}, (60, 3e-3), (60, 3e-3)),
        ({"GPU": "1", "NPROC": "8"}, (5000, 1e-3), (400, 1e-3)),
        ({"GPU": "1", "NPROC": "8", "QUICK": "1"}, (60, 3e-3), (60, 3e-3)),
    ],
    ids=["whole", "quick", "GPUs", "GPUs, quick"],
)
def test_every_stage_is_a_command_that_is_understood(tmp_path, settings, pretrain, chat):
    run, calls = speedrun(tmp_path, **settings)
    assert run.returncode == 0, run.stderr
    named = [next((word for word in words if word in cli.COMMANDS and word != "torchrun"), words[0]) for words in calls]
    expected = "train-tokenizer preprocess train evaluate sft evaluate generate generate report".split()
    assert named == ["examples/speedrun_data.py", *expected]
    assert steps(calls[named.index("train")]) == pretrain
    assert steps(calls[named.index("sft")], "sft") == chat
    assert run.stdout.splitlines()[-1].startswith(f"Talk to it:   {tmp_path / 'python'} -m minimegatron serve ")
    again, calls = speedrun(tmp_path, **settings)
    assert again.stdout.count("done before") == 8 and [words[2] for words in calls] == ["report"]


def test_another_run_does_not_go_on_in_the_same_folder(tmp_path):
    assert speedrun(tmp_path)[0].returncode == 0
    run, calls = speedrun(tmp_path, QUICK="1")
    assert run.returncode == 2 and "was begun with" in run.stderr and not calls
