"""examples/pretrain.sbatch is shell, and what it hands to srun are flags of torchrun and of ours that fit together."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from torch.distributed.run import get_args_parser

from minimegatron.training.arguments import parse_args

SCRIPT = Path(__file__).parents[2] / "examples" / "pretrain.sbatch"


def handed_to_srun(folder: Path) -> list[str]:
    """The words that srun gets in a job on two nodes."""
    commands = {"srun": 'printf "%s\\n" "$@" > "$SAID"', "scontrol": 'printf "node-%s\\n" 1 2'}
    for name, body in commands.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    activate = folder / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.touch()
    slurm = {"JOB_NODELIST": "node-[1-2]", "JOB_NUM_NODES": "2", "JOB_ID": "123456", "JOB_NAME": "minimegatron"}
    env = {f"SLURM_{name}": value for name, value in {**slurm, "CPUS_PER_TASK": "64"}.items()}
    env |= {"PATH": f"{folder}:{os.environ['PATH']}", "SAID": str(folder / "said")}
    subprocess.run(["bash", SCRIPT], check=True, cwd=folder, env=env, timeout=60)
    return (folder / "said").read_text().splitlines()


def test_it_is_shell():
    done = subprocess.run(["bash", "-n", SCRIPT], capture_output=True, text=True, timeout=20)
    assert done.returncode == 0, done.stderr


def test_what_srun_gets_are_flags_that_fit_together(tmp_path):
    said = handed_to_srun(tmp_path)
    assert said[:2] == ["--kill-on-bad-exit=1", "torchrun"]
    args = get_args_parser().parse_args(said[2:])
    assert (args.nnodes, args.nproc_per_node, args.rdzv_endpoint) == ("2", "8", "node-1:23456")
    assert args.module and [args.training_script, args.training_script_args[0]] == ["minimegatron", "train"]
    run = parse_args(args.training_script_args[1:], world_size=16)
    assert run.checkpoint.save == run.checkpoint.load == "runs/minimegatron" and run.checkpoint.async_save
    assert run.parallel.tensor_model_parallel_size == 8 and run.training.global_batch_size == 512


def test_ranks_have_less_time_to_save_than_the_scheduler_gives():
    text = SCRIPT.read_text()
    given, taken = re.search(r"--signal=TERM@(\d+)", text), re.search(r"--shutdown-timeout (\d+)", text)
    assert given and taken and 60 <= int(taken[1]) < int(given[1])
