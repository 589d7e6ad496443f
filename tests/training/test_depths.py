"""Predictions of several tokens in the training loop: in every log, in a pipeline as alone, and in no evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minimegatron.comm import collectives as c
from minimegatron.layers.param import layout_of
from minimegatron.training.arguments import parse_args
from tests.mock_data import small_trainer

LINE = (
    "--mock-data --seq-length 16 --num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 64 --lr 3e-3 "
    "--train-iters 2 --micro-batch-size 2 --global-batch-size 4 --hidden-dropout 0 --attention-dropout 0 "
    "--normalization RMSNorm --disable-bias-linear --mtp-num-layers 2 --mtp-loss-scaling-factor 0.5 "
    "--eval-interval 2 --eval-iters 1 --check-replicas-interval 1"
)
PP2 = "--pipeline-model-parallel-size 2"


def trained(rank: int, world: int, line: str) -> dict[str, Any]:
    trainer = small_trainer(parse_args(line.split(), world), quiet=True)
    trainer.train()
    mesh = trainer.mesh
    copies = [p for p in trainer.model.params.values() if layout_of(p).copies]
    both = [c.all_gather(p.detach()[None], mesh.embd) for p in copies]
    return {
        "losses": [step.losses for step in trainer.history],
        "norms": [step.grad_norm for step in trainer.history],
        "evaluated": list(trainer.evaluate()),
        "copies": len(both),
        "equal": all(torch.equal(pair[0], pair[-1]) for pair in both),
    }


@pytest.mark.slow
def test_a_pipeline_has_the_curve_of_one_process_and_equal_copies(ranks):
    want = trained(0, 1, LINE)
    assert [set(x) for x in want["losses"]] == [{"lm loss", "mtp_1 loss", "mtp_2 loss"}] * 2
    assert want["evaluated"] == ["lm loss"]
    for found in ranks(2).run(trained, f"{LINE} {PP2}", timeout=60):
        assert found["copies"] == 2 and found["equal"], "words and positions, after two steps"
        assert found["evaluated"] == ["lm loss"]
        assert found["norms"] == pytest.approx(want["norms"], rel=1e-4)
        for got, expected in zip(found["losses"], want["losses"], strict=True):
            assert got == pytest.approx(expected, rel=1e-4)
