"""A model in FP8 is the same model in every layout, and learns what bf16 learns.

Layouts add in another order, and now and then a sum falls on the other side of a rounding: one number of a tensor moves
by up to 1/8 of itself. Scales that ranks do not share move all of them, gradients by several percent.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from minimegatron.training.reports import StepReport
from tests.axes import PP, SP, TP
from tests.thorough import SLOW, mostly_thorough
from tests.training.test_trainer import train, trainer_of
from tests.twin import Case

MODEL: dict[str, Any] = {"ffn_hidden_size": 64, "fp8_format": "hybrid", "fp8_recipe": "tensorwise"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, dp, more",
    [
        ({TP: 2, SP: True}, 1, {"recompute_granularity": "full"}),
        ({PP: 2, "pipeline_schedule": "zb_h1"}, 1, {"fp8_wgrad": False}),
        ({}, 2, {"family": "gpt2", "num_query_groups": 4}),
    ],
    ids=["tp2 sp", "pp2", "dp2"],
)
def test_gradients_of_every_layout(assert_same_as_serial, layout, dp, more):
    """Scales that follow the tensor: what the loss is divided by makes no difference to them.

    Under cp a rank's tensor holds other tokens and has a scale of its own, as in Megatron: rounding differs there.

    Which seed meets a sum on the border of two roundings depends on the CPU: gradients are then up to 9 % off, and 1e-5
    otherwise. Scales that ranks do not share are 45 % off at every seed, or more. So one of four seeds is met exactly.
    """
    for seed in range(4):
        case = Case(layout, {**MODEL, **more}, accumulation=2, overlap=dp > 1, seq_length=16, seed=seed)
        try:
            return assert_same_as_serial(case, dp=dp, tolerance=1e-3)
        except AssertionError:
            assert_same_as_serial(case, dp=dp, tolerance=0.2)
    pytest.fail("no seed is free of another rounding")


LINE = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --swiglu --disable-bias-linear "
    "--vocab-size 64 --normalization RMSNorm --position-embedding-type rope --hidden-dropout 0 --attention-dropout 0 "
    "--lr 3e-3 --micro-batch-size 2 --global-batch-size 8 --train-iters 12 --seed 7"
)  # at a rate of 1e-2 another order of sums is another gradient within three steps
WAYS = {
    "delayed": "--fp8-format hybrid --fp8-amax-history-len 4 --fp8-amax-compute-algo max",
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
}


def on_rank(rank: int, world: int, line: str) -> tuple[list[StepReport], dict[str, torch.Tensor]]:
    trainer = trainer_of(line, world)
    trainer.train()
    state = {n: b.clone() for n, b in trainer.model.named_buffers() if "fp8" in n}
    return trainer.history, state


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall "
    "--moe-shared-expert-intermediate-size 32 --fp8-format hybrid"
)
REMEMBERS, EP = "--fp8-amax-history-len 4 --fp8-amax-compute-algo max", "--expert-model-parallel-size 2"
CUT = "--tensor-model-parallel-size 2 --sequence-parallel"


@SLOW
@pytest.mark.parametrize(
    "layout, recipe",
    mostly_thorough(itertools.product([EP, CUT], [REMEMBERS, "--fp8-recipe tensorwise"]), [0]),
    ids=["ep2 delayed", "ep2 tensorwise", "etp2 delayed", "etp2 tensorwise"],
)
def test_experts_have_scales_of_their_own_in_every_layout(ranks, layout, recipe):
    line = f"{LINE} {EXPERTS} {recipe} --train-iters 3"
    serial, want = on_rank(0, 1, line)
    results = ranks(2).run(on_rank, f"{line} {layout}")
    for history, state in results:
        assert history[-1].losses["lm loss"] == pytest.approx(serial[-1].losses["lm loss"], rel=3e-3)
        for name, scale in state.items():
            if name.endswith("scale"):
                assert scale.item() == pytest.approx(want[name].item(), rel=0.1), name
    assert results[0][1].keys() | results[1][1].keys() == want.keys(), "an expert's state has its number in the model"
    experts = [want[n].item() for n in want if "experts.fp8" in n and n.endswith("1.input.scale")]
    assert len(set(experts)) == len(experts), "they differ from each other"


LAYOUTS = {
    "tp2 sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "tp2 recompute": "--tensor-model-parallel-size 2 --recompute-granularity full",
    "pp2": "--pipeline-model-parallel-size 2 --pipeline-schedule zb_h1",
    "cp2": "--context-parallel-size 2",
    "dp2": "--overlap-grad-reduce",
}


@pytest.fixture(scope="module")
def remembered() -> list[StepReport]:
    return train(f"{LINE} {WAYS['delayed']} --train-iters 4").history


@pytest.mark.slow
@pytest.mark.parametrize("layout", mostly_thorough(LAYOUTS, ["tp2 sp", "cp2"].__contains__, ["cp2"].__contains__))
def test_scales_that_remember_are_the_same_in_every_layout(ranks, remembered, layout):
    results = ranks(2).run(on_rank, f"{LINE} {WAYS['delayed']} --train-iters 4 {LAYOUTS[layout]}")
    for history, state in results:
        for ours, serial in zip(history, remembered, strict=True):
            assert ours.losses["lm loss"] == pytest.approx(serial.losses["lm loss"], rel=5e-4)
            assert ours.grad_norm == pytest.approx(serial.grad_norm, rel=3e-3)
        assert state, "there is a state"
        if layout != "pp2":
            assert all(torch.equal(state[name], results[0][1][name]) for name in state)
