"""A small thing that looks like training: an all-reduce a step, and at some step something happens to some rank.

victim.py STEPS [RANK STEP WHAT]
"""

from __future__ import annotations

import os
import signal
import sys
import time

import torch

from minimegatron.comm.collectives import all_reduce
from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.errors import ConfigError
from minimegatron.launch import rank as launch


def happen(what: str) -> None:
    if what == "raise":
        raise ValueError("shape mismatch")
    if what == "config":
        raise ConfigError("tensor_model_parallel_size is 3", fix="choose 2")
    if what == "leave":
        sys.exit(0)
    if what == "sleep":
        time.sleep(1000)
    if what.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, what))


def main() -> None:
    steps, victim, when, what = (*sys.argv[1:], "-1", "0", "")[:4]
    if what == "early":
        raise ConfigError("a mistake that every rank sees", fix="do not")
    rank, world = launch.init(timeout_seconds=float(os.environ.get("TIMEOUT", "20")))
    mesh = Mesh.build(ParallelConfig(distributed_timeout_seconds=float(os.environ.get("TIMEOUT", "20"))))
    x = torch.ones(1000)
    for step in range(int(steps)):
        if (rank, step) == (int(victim), int(when)):
            happen(what)
        all_reduce(x.fill_(step), mesh.dp)
        time.sleep(0.01)
    launch.report({"rank": rank, "last": x[0].item()})
    print(f"done {x[0].item():g}")
    launch.finish()


if __name__ == "__main__":
    launch.run_rank(main)
