"""A run that goes on from a checkpoint is the run that wrote it: to the bit, in one layout and from one to another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.thorough import SLOW, mostly_thorough
from tests.training.test_trainer import trainer_of

BASE = (
    "--num-layers 2 --micro-batch-size 1 --global-batch-size 4 --train-iters 4 --lr-decay-iters 4 "
    "--hidden-dropout {dropout} --attention-dropout {dropout}"
)

ZERO3 = "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params"


def run_of(line: str, world: int) -> tuple[list[tuple[float, float | None]], dict[str, list[tuple[Any, torch.Tensor]]]]:
    trainer = trainer_of(line, world)
    trainer.train()
    trainer.close()
    held = trainer.run_state.tensors()
    final = {name: [(part.box, part.data.clone()) for part in tensor.parts] for name, tensor in held.items()}
    return [(r.losses["lm loss"], r.grad_norm) for r in trainer.history], final


def on_rank(rank: int, world: int, line: str) -> Any:
    return run_of(line, world)


SAME = [
    (1, ""),
    (2, "--optimizer sgd"),
    (4, "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer --bf16"),
    (4, f"--pipeline-model-parallel-size 2 {ZERO3}"),
    (4, "--num-experts 4 --expert-model-parallel-size 2 --disable-bias-linear --use-distributed-optimizer --fp16 "
        "--moe-router-enable-expert-bias --moe-router-score-function sigmoid --initial-loss-scale 1024"),
    (2, "--tensor-model-parallel-size 2 --sequence-parallel --bf16 --fp8-format hybrid --fp8-recipe delayed "
        "--fp8-amax-history-len 4 --fp8-amax-compute-algo max"),
    (2, "--use-torch-fsdp2 --bf16"),
    (2, "--bf16 --use-distributed-optimizer --use-precision-aware-optimizer --exp-avg-dtype fp8 "
        "--exp-avg-sq-dtype bf16"),
    (2, "--bf16 --optimizer-cpu-offload --optimizer-offload-fraction 0.5 --overlap-cpu-optimizer-d2h-h2d"),
    (2, "--optimizer dist_muon"),
    (4, "--num-layers 4 --pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 "
        "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads --overlap-param-gather "
        "--overlap-grad-reduce"),
]  # fmt: skip


# In the background: main parameters and FSDP2, whose memory the next passes change.
CASES = [(*case, background) for background in ("", "--async-save") for case in SAME]
ORDINARY = [0, 4, *(len(SAME) + i for i in (2, 6))]


@pytest.mark.parametrize(("world", "layout", "background"), mostly_thorough(CASES, ORDINARY, [0]))
def test_resumed_is_uninterrupted_bit_for_bit(ranks, tmp_path, world, layout, background):
    """What saves goes on as what loads: a save that leaves a trace in its own run is noticed as well."""
    line = f"{BASE.format(dropout=0.1)} {layout}"
    whole = ranks(world).run(on_rank, f"{line} --save {tmp_path} --save-interval 2 {background}")
    resumed = ranks(world).run(on_rank, f"{line} --load {tmp_path} --ckpt-step 2")
    for (curve, final), (curve_after, final_after) in zip(whole, resumed, strict=True):
        assert len(curve_after) == 2 and curve[2:] == curve_after
        assert final.keys() == final_after.keys()
        for name, parts in final.items():
            for (box, tensor), (box_after, after) in zip(parts, final_after[name], strict=True):
                assert box == box_after and torch.equal(tensor, after), name


# Two replicas with a microbatch each add two numbers, whoever keeps the sum; stages of a pipeline add none. Clipping
# would, a norm over ranks, and so would more microbatches: ZeRO-2, -3 and FSDP2 add over ranks after each of them.
SAME_SUMS = (
    f"{BASE.format(dropout=0)} --num-layers 4 --swiglu --vocab-size 70 --untie-embeddings-and-output-weights "
    "--clip-grad 0 --bf16 --global-batch-size 2"
)
ZERO1, PIPELINE = "--use-distributed-optimizer", "--pipeline-model-parallel-size 2"
SAME_PAIRS = [
    ((2, ""), (2, ZERO3)),
    ((1, ""), (2, PIPELINE)),
    ((2, ZERO3), (2, "--use-torch-fsdp2")),
    ((2, "--use-torch-fsdp2"), (2, ZERO1)),
    ((2, PIPELINE), (2, f"{PIPELINE} --num-virtual-stages-per-pipeline-rank 2")),
    ((2, f"{PIPELINE} --num-virtual-stages-per-pipeline-rank 2"), (1, "")),
]


@SLOW
@pytest.mark.parametrize(("source", "target"), mostly_thorough(SAME_PAIRS, [0]))
def test_weights_are_the_same_to_the_bit_where_sums_have_the_same_order(ranks, tmp_path, source, target):
    (wa, a), (wb, b) = source, target
    whole = ranks(wb).run(on_rank, f"{SAME_SUMS} {b}")
    ranks(wa).run(on_rank, f"{SAME_SUMS} {a} --exit-interval 2 --save {tmp_path}")
    resumed = ranks(wb).run(on_rank, f"{SAME_SUMS} {b} --load {tmp_path}")
    for (curve, final), (after, final_after) in zip(whole, resumed, strict=True):
        assert [loss for loss, _ in curve[2:]] == [loss for loss, _ in after]
        for name in (n for n in final if not n.startswith("rng.")):
            for (_, tensor), (_, other) in zip(final[name], final_after[name], strict=True):
                assert torch.equal(tensor, other), name
