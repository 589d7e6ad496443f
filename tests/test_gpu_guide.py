"""docs/gpu.md: its shell is shell, its commands exist, and their flags are flags."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from minimegatron.cli import COMMANDS
from minimegatron.training.arguments import parse_args

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs/gpu.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
CODE = [*BLOCKS, *re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", TEXT, flags=re.MULTILINE | re.DOTALL))]
TRAINED = [found[1] for code in CODE for found in re.finditer(r"minimegatron train (.*)", code.replace("\\\n", ""))]


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_is_shell(block):
    done = subprocess.run(("bash", "-n"), input=block, capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr


def test_there_is_something_to_check():
    assert len(BLOCKS) >= 4 and len(TRAINED) >= 4


@pytest.mark.parametrize("line", TRAINED)
def test_every_training_has_flags_that_exist(line):
    assert parse_args(shlex.split(line), 16 if "--global-batch-size 64" in line else 2)


NAMED = ["--kernels torch", "--bf16", "--profile --profile-step-start 5 --profile-step-end 7", "--enable-cuda-graph"]


@pytest.mark.parametrize("flag", NAMED)
def test_flags_that_are_named_alone_exist(flag):
    assert f"`{flag}`" in TEXT
    parse_args(shlex.split(f"--preset laptop-10m --corpus stdlib --train-iters 20 --lr 1e-3 {flag}"), 1)


def test_commands_and_targets_exist():
    commands = {found for code in CODE for found in re.findall(r"(?<![\w./-])minimegatron ([a-z-]+)", code)}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    asked = {found for code in CODE for found in re.findall(r"\bmake ([a-z]+)", code)}
    assert commands <= COMMANDS.keys() and commands and asked <= targets and asked
