"""Many training runs in one process, or in the ranks of one job: `python -m ... tests.rehearsal.training CASES.json`.

A case is a name and a command line of `pretrain_gpt` (or options for `generation.outcome`). Each is trained by the
`Trainer` on this job's device; a single rank trains it on the CPU as well, unless it is written {"alone": line}.
Reported is, for each case, what `outcome` returns, or the error with its place.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.data.gpt_dataset import MockGPTLowLevelDataset
from minimegatron.launch.rank import finish, init, report
from minimegatron.training.arguments import parse_args
from minimegatron.training.build import build_trainer
from minimegatron.training.observers import Step
from minimegatron.training.step import get_forward_backward_func
from minimegatron.training.trainer import Trainer
from tests.rehearsal import generation
from tests.rehearsal.record import RECORD, ROOT

EARLY = "warm"  # the phase of all steps but the last
PASSES, STEP = "passes", "step"  # the last step: forward and backward passes, and the rest of it


def _label(trainer: Trainer) -> None:
    """Let the last step's phases be told apart; what happens only at first is over by then."""
    one, iterations = trainer._step, trainer.train_iters
    graph = trainer.graph

    def step(asks: bool) -> Step:
        last = trainer.state.iteration == iterations - 1
        with RECORD.phase(STEP if last else EARLY):
            return one(asks)

    def passes(*args: Any, **kwargs: Any) -> Any:
        last = trainer.state.iteration == iterations - 1
        with RECORD.phase(PASSES if last else EARLY):
            return (graph or get_forward_backward_func(trainer.model))(*args, **kwargs)

    trainer._step, trainer.graph = step, passes


def outcome(line: str, mesh: Mesh | None, world: int) -> dict[str, Any]:
    """Train and return losses, gradient norms and the record of the last step."""
    RECORD.clear()
    run = parse_args(shlex.split(line), world)
    with RECORD.phase("build"), mock.patch.multiple(MockGPTLowLevelDataset, num_documents=3000, max_length=20):
        trainer = build_trainer(run, mesh, quiet=True)  # several documents in a sample
    _label(trainer)
    with RECORD.phase("evaluation"):
        trainer.train()
    trainer.close()
    return {
        "device": str(trainer.mesh.device),
        "losses": [r.losses for r in trainer.history],
        "norms": [r.grad_norm for r in trainer.history],
        "zeros": [r.num_zeros for r in trainer.history],
        "record": RECORD.to_json(),
    }


@contextlib.contextmanager
def error_told(into: dict[str, Any]) -> Iterator[None]:
    """An error becomes a part of the report, with the lines of the project that it came through."""
    try:
        yield
    except Exception as error:
        package = f"{ROOT}/minimegatron/"
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(package)]
        into["error"] = f"{type(error).__name__}: {error}"
        into["at"] = [f"{f.filename.removeprefix(ROOT + '/')}:{f.lineno} {f.name}" for f in frames]


def both(case: str | dict[str, Any], world: int) -> dict[str, Any]:
    """On this job's device, and where there is one rank also on the CPU (under "cpu")."""
    if isinstance(case, dict) and "alone" in case:
        return outcome(case["alone"], None, world)
    if isinstance(case, dict):
        return generation.outcome(case, "cuda") | {"cpu": generation.outcome(case, "cpu")}
    found = outcome(case, None, world)
    if world == 1 and torch.cuda.is_available():
        line = " ".join(word for word in case.split() if word != "--enable-cuda-graph")
        parallel = parse_args(shlex.split(line), 1).parallel
        found["cpu"] = outcome(line, Mesh.serial(parallel, device="cpu"), 1)
    return found


def main(path: str) -> None:
    cases: dict[str, Any] = json.loads(Path(path).read_text())
    _, world = init(60.0)
    results: dict[str, Any] = {}
    for name, case in cases.items():
        results[name] = {}
        with error_told(results[name]):
            results[name] |= both(case, world)
        if world > 1 and "error" in results[name]:
            break  # the others may wait for this rank
    report(results)
    finish()


if __name__ == "__main__":
    main(sys.argv[1])
