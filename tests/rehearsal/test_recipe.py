"""`GPU=1 examples/speedrun.sh` from its first stage to its report, on two simulated GPUs, in small sizes."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rehearsal import guard
from tests.rehearsal.record import ROOT

SMALL = {
    "train": "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --ffn-hidden-size 64 "
    "--max-position-embeddings 64 --seq-length 64 --micro-batch-size 2 --global-batch-size 8 "
    "--eval-interval 5 --eval-iters 1 --log-interval 5",
    "sft": "--seq-length 64 --micro-batch-size 1 --global-batch-size 4 --eval-interval 5 --eval-iters 1",
    "generate": "--max-new-tokens 4",
}
# Every Python of the recipe has the devices; what would take hours there is cut.
START = """
import os, sys
if "torch" not in sys.modules:
    from tests.rehearsal import boot
    boot.install(2, os.environ["REHEARSAL_GUARD"])
"""
PYTHON = """#!/usr/bin/env bash
set -e
{cases}
{python} "$@"
if [ "$1" = examples/speedrun_data.py ]; then
    for name in held-out.txt continuations.jsonl sums.jsonl chats.jsonl; do
        lines=3
        if [ "$name" = chats.jsonl ]; then lines=200; fi
        head -n $lines "$2/$name" > "$2/.cut" && mv "$2/.cut" "$2/$name"
    done
    head -c 4000 "$2/held-out.txt" > "$2/.cut" && mv "$2/.cut" "$2/held-out.txt"
fi
"""


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_the_recipe_for_gpus_reaches_its_report_on_simulated_ones(tmp_path: Path) -> None:
    try:
        library = guard.library()
    except guard.NoGuard as reason:
        pytest.skip(str(reason))
    (tmp_path / "sitecustomize.py").write_text(START)
    asked = '[[ " $* " == *" -m minimegatron {} "* ]]'
    cases = "".join(f'if {asked.format(name)}; then set -- "$@" {flags}; fi\n' for name, flags in SMALL.items())
    python = tmp_path / "python"
    python.write_text(PYTHON.format(cases=cases, python=shlex.quote(sys.executable)))
    python.chmod(0o755)
    mine = {"GPU": "1", "QUICK": "1", "NPROC": "2", "ITERATIONS": "10", "CHAT_ITERATIONS": "12", "PYTHON": str(python)}
    mine |= {"PYTHONPATH": os.pathsep.join([str(tmp_path), ROOT]), "REHEARSAL_GUARD": str(library)}
    kept = {name: value for name, value in os.environ.items() if name not in ("CORPUS", "CUDA_VISIBLE_DEVICES")}
    run = tmp_path / "run"
    done = subprocess.run(
        ["bash", f"{ROOT}/examples/speedrun.sh", str(run)],
        env=kept | mine, capture_output=True, text=True, timeout=840,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "rank 0 on cuda:0 of 2" in done.stdout + done.stderr
    steps = [json.loads(line) for line in (run / "pretrain.jsonl").read_text().splitlines()]
    losses = [step["losses"]["lm loss"] for step in steps if step["event"] == "train"]
    assert len(losses) == 2 and losses[1] < losses[0]
    stages = [json.loads(line)["stage"] for line in (run / "stages.jsonl").read_text().splitlines()]
    assert stages == "text tokenizer tokens pretrain evaluate chat evaluate-chat samples".split()
    page = (run / "report.html").read_text()
    assert "bf16" in page and "H100" in page
