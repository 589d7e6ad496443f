"""Two models in one process, in two layouts of the same ranks: one learns, the other is its reference.

Both begin with one checkpoint. In every step the reference computes its losses of the batch between the passes of the
model that learns, as preference learning and distillation do; the model that learns must not notice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minimegatron.checkpoint import commit
from minimegatron.checkpoint.commit import complete
from minimegatron.checkpoint.load import CheckpointFiles
from minimegatron.comm.mesh import Mesh
from minimegatron.config import CheckpointConfig, ParallelConfig
from minimegatron.config.run import RunConfig
from minimegatron.training.build import build_replica
from minimegatron.training.checkpointing import Checkpoints
from minimegatron.training.observers.evaluation import evaluate
from minimegatron.training.run_state import RunState
from minimegatron.training.step import forward_step
from tests.thorough import SLOW, THOROUGH
from tests.training.test_trainer import numbers, trainer_of

LINE = "--num-layers 2 --micro-batch-size 2 --global-batch-size 4 --train-iters 4 --lr-decay-iters 4"
TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
EXPERTS = (
    "--hidden-dropout 0 --attention-dropout 0 --disable-bias-linear --num-experts 4 --moe-router-topk 2 "
    "--moe-aux-loss-coeff 0.01 --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
)


def token_losses(state: RunState, batch: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """[b, s], where the last stage of the model is here."""
    kept: list[torch.Tensor] = []

    def step(batches: Any, model: Any) -> Any:
        output, summed = forward_step(batches, model)
        kept.append(output)
        return output, summed

    evaluate(step, iter([batch]), state.model, 1)
    return kept[0] if kept and state.mesh.pp.is_last else None


def reference_of(run: RunConfig, layout: dict[str, int], root: str) -> RunState:
    """The model of a run, frozen, in another layout, with the weights of a checkpoint."""
    run = dataclasses.replace(run, parallel=ParallelConfig(**layout))
    mesh = Mesh.build(run.parallel)
    state = RunState(run, mesh, build_replica(run, mesh))
    assert Checkpoints(CheckpointConfig(load=root, finetune=True), state, lambda text: None).load()
    return state


def learns(rank: int, world: int, line: str, root: str, save: str, layout: dict[str, int] | None) -> Any:
    """Go on from `root`, with a reference or without; the curve, and where the reference's losses differed."""
    off: list[float] = []
    reference: RunState | None = None

    def step(batches: Iterator[Any], model: Any) -> Any:
        batch = next(batches)
        if reference is not None:
            token_losses(reference, batch)
        return forward_step(iter([batch]), model)

    trainer = trainer_of(f"{line} {TP2} --load {root} --save {save} --save-interval 2", world, forward_step=step)
    if layout is not None:
        reference = reference_of(trainer.run, layout, root)
        batch = next(trainer._batches(trainer.train_set, 0))
        ours, theirs = token_losses(trainer.run_state, batch), token_losses(reference, batch)
        if ours is not None and theirs is not None:
            off.append((ours - theirs).abs().max().item())
    trainer.train()
    trainer.close()
    return numbers(trainer.history), off


LAYOUTS = [
    pytest.param("", {"pipeline_model_parallel_size": 2}, id="tp2 and pp2"),
    pytest.param("--bf16 --fp8-format hybrid --fp8-recipe delayed", {}, id="fp8, tp2 and dp2", marks=THOROUGH),
    pytest.param(EXPERTS, {"expert_model_parallel_size": 2}, id="experts, tp2 and ep2"),
]


@SLOW
@pytest.mark.parametrize(("model", "layout"), LAYOUTS)
def test_a_reference_agrees_and_leaves_no_trace(ranks: Any, tmp_path: Path, model: str, layout: dict[str, int]) -> None:
    line = f"{LINE} {model}"
    trainer = trainer_of(f"{line} --save {tmp_path}/begun --exit-interval 1")
    trainer.train()
    trainer.close()
    folders = [tmp_path / name for name in ("begun", "alone", "beside")]
    alone = ranks(2).run(learns, line, str(folders[0]), str(folders[1]), None)
    beside = ranks(2).run(learns, line, str(folders[0]), str(folders[2]), layout)
    assert [curve for curve, _ in beside] == [curve for curve, _ in alone]
    off = [one for _, found in beside for one in found]
    assert off and max(off) < (0.1 if "fp8" in model else 1e-5)
    a, b = (
        {n: CheckpointFiles(commit.folder_of(root, n), m) for n, m in complete(root).items()} for root in folders[1:]
    )
    assert sorted(a) == sorted(b) == [2, 4]
    for step, saved in a.items():
        assert a[step].manifest.state["counters"] == b[step].manifest.state["counters"]
        for name in saved.manifest.tensors:
            assert torch.equal(saved.read(name), b[step].read(name)), f"{name} of iteration {step}"
