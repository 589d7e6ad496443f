"""What is loaded is what was saved, to the bit, from any layout into any other and back.

Every element of every tensor of a run is overwritten by a number that says which tensor it is of and where it lies in
the logical one (`tests/checkpoint/canary`); then layout A saves, B loads and saves, A loads.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from minimegatron.layers.param import logical_parameters
from minimegatron.training.run_state import TrainState
from minimegatron.training.trainer import Trainer
from tests.checkpoint.canary import canary
from tests.thorough import SLOW, mostly_thorough
from tests.training.test_trainer import trainer_of

DENSE = (
    "--num-layers 4 --num-attention-heads 4 --vocab-size 70 --micro-batch-size 1 --global-batch-size 8 "
    "--attention-dropout 0"
)
GATED = f"{DENSE} --swiglu --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2"
EXPERTS = (
    f"{DENSE} --num-experts 4 --moe-router-topk 2 --swiglu --disable-bias-linear --moe-router-enable-expert-bias "
    "--moe-router-score-function sigmoid --moe-layer-freq [0,1,1,1]"
)
FP8 = f"{DENSE} --bf16 --fp8-format hybrid --fp8-recipe delayed --vocab-size 64"
ZERO = "--use-distributed-optimizer --data-parallel-sharding-strategy"
VIRTUAL = "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2"

COMMON = [
    (1, ""),
    (2, "--use-distributed-optimizer"),
    (4, f"{ZERO} optim_grads"),
    (4, f"--tensor-model-parallel-size 2 {ZERO} optim_grads_params"),
    (4, "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2"),
    (4, f"{VIRTUAL} --use-distributed-optimizer"),
    (4, f"--pipeline-model-parallel-size 2 --context-parallel-size 2 {ZERO} optim"),
    (4, "--use-distributed-optimizer --num-distributed-optimizer-instances 2"),
]
FAMILIES = {
    "dense": (DENSE, [*COMMON, (4, "--tensor-model-parallel-size 4"), (2, "--use-torch-fsdp2")]),
    "gated bf16": (f"{GATED} --bf16", [*COMMON, (4, "--use-torch-fsdp2")]),
    "gated fp16": (f"{GATED} --fp16 --initial-loss-scale 1024", [*COMMON]),
    "experts": (
        f"{EXPERTS} --fp16",
        [
            (1, ""),
            (2, "--expert-model-parallel-size 2"),
            (4, f"--expert-model-parallel-size 2 {ZERO} optim_grads_params"),
            (4, "--expert-model-parallel-size 4 --use-distributed-optimizer"),
            (4, "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1 "
                "--expert-model-parallel-size 4"),
            (4, "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 2 "
                f"--expert-model-parallel-size 2 {ZERO} optim"),
            (4, "--pipeline-model-parallel-size 2 --expert-model-parallel-size 2"),
        ],
    ),
    "fp8": (FP8, [(1, ""), (2, "--tensor-model-parallel-size 2"), (2, f"{ZERO} optim"), (4, VIRTUAL)]),
}  # fmt: skip
HYBRID = (
    f"{DENSE} --bf16 --hybrid-override-pattern M*-M --mamba-num-heads 8 --mamba-head-dim 8 --mamba-num-groups 4 "
    "--mamba-state-dim 6"
)
DELTA = (
    f"{DENSE} --bf16 --linear-attention-freq 2 --linear-num-key-heads 4 --linear-num-value-heads 8 "
    "--linear-key-head-dim 6 --linear-value-head-dim 4 --attention-output-gate --num-layers 4"
)
SEES = (
    f"{DENSE} --bf16 --preset laptop-vlm --num-query-groups 2 --ffn-hidden-size 48 --mrope-section 1 1 2 "
    "--vision-num-layers 3 --vision-hidden-size 32 --vision-ffn-hidden-size 24"
)
CLIP = (
    f"{DENSE} --bf16 --preset laptop-llava --num-query-groups 2 --ffn-hidden-size 48 --vision-hidden-size 24 "
    "--vision-ffn-hidden-size 40"
)


def expected(name: str, box: Any, shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """A 16-bit weight is its main parameter, rounded: the optimizer writes it back after loading."""
    if name.startswith("model.") and dtype in (torch.bfloat16, torch.float16):
        name = name.replace("model.", "optimizer.fp32_param.", 1)
        return canary(name, tuple(shape), box, torch.float32).to(dtype)
    return canary(name, tuple(shape), box, dtype)


def trainer_for(world: int, line: str) -> Trainer:
    return trainer_of(f"{line} --train-iters 6 --lr-decay-iters 6", world)


STATE = TrainState(iteration=3, consumed_train_samples=24, consumed_valid_samples=8, skipped_iterations=1)


def put(rank: int, world: int, line: str) -> None:
    trainer = trainer_for(world, line)
    for name, tensor in trainer.run_state.tensors(rng=False).items():
        for part in tensor.parts:
            part.data.detach().copy_(expected(name, part.box, tensor.shape, tensor.dtype))
    vars(trainer.state).update(vars(STATE))
    trainer.scheduler.step(24)
    if trainer.optimizer.scaler:
        trainer.optimizer.scaler.load_state_dict({**trainer.optimizer.scaler.state_dict(), "scale": 64.0})
    trainer.checkpoints.save()
    trainer.checkpoints.settle(wait=True)
    trainer.close()


def take(rank: int, world: int, line: str, scale: float) -> int:
    trainer = trainer_for(world, line)
    elements = 0
    for name, tensor in trainer.run_state.tensors(rng=False).items():
        for part in tensor.parts:
            wanted = expected(name, part.box, tensor.shape, tensor.dtype)
            assert torch.equal(part.data.detach().cpu(), wanted), f"{name} at {part.box}"
            elements += wanted.numel()
    assert trainer.state == STATE and trainer.scheduler.num_steps == 24
    assert trainer.optimizer.loss_scale == scale
    if trainer.run.checkpoint.save:
        trainer.checkpoints.save()
        trainer.checkpoints.settle(wait=True)
    trainer.close()
    return elements


def pairs() -> list[tuple[str, int, int]]:
    """60 at random of all ordered pairs; the first of two families is an ordinary case (experts are in FP16)."""
    everything = [
        (family, a, b)
        for family, (_, layouts) in FAMILIES.items()
        for a in range(len(layouts))
        for b in range(len(layouts))
        if a != b
    ]
    return random.Random(17).sample(everything, 60)


PAIRS = pairs()
ORDINARY = [next(p for p in PAIRS if p[0] == family and 0 not in p[1:]) for family in ("dense", "experts")]
FAMILIES["hybrid"] = HYBRID, COMMON
FAMILIES["delta"] = DELTA, COMMON
PAIRS += [("delta", a, b) for a, b in ((0, 3), (3, 4), (4, 6), (6, 0))]
PAIRS += [("hybrid", a, b) for a, b in ((0, 3), (3, 4), (4, 6), (6, 0))]
FAMILIES |= {"sees": (SEES, COMMON), "clip": (CLIP, COMMON)}
PAIRS += [(family, a, b) for family in ("sees", "clip") for a, b in ((0, 3), (3, 4), (4, 6), (6, 0), (2, 5), (5, 7))]


@SLOW
@pytest.mark.parametrize(("family", "a", "b"), mostly_thorough(PAIRS, ORDINARY.__contains__))
def test_there_and_back_is_the_same_to_the_bit(ranks, tmp_path, family, a, b):
    line, layouts = FAMILIES[family]
    (world_a, layout_a), (world_b, layout_b) = layouts[a], layouts[b]
    first, second = f"--save {tmp_path}/first", f"--load {tmp_path}/first --save {tmp_path}/second"
    scale = 64.0 if "fp16" in line else 1.0
    ranks(world_a).run(put, f"{line} {layout_a} {first}")
    assert sum(ranks(world_b).run(take, f"{line} {layout_b} {second}", scale))
    assert sum(ranks(world_a).run(take, f"{line} {layout_a} --load {tmp_path}/second", scale))


def weights(rank: int, world: int, line: str) -> dict[str, torch.Tensor]:
    trainer = trainer_for(world, line)
    with trainer.model.whole_weights():
        found = {n: p.detach().bfloat16().clone() for n, p in logical_parameters(trainer.model)}
    trainer.close()
    return found


FSDP2 = "--use-torch-fsdp2"
WAYS = [
    (FSDP2, "", "--no-load-optim"),
    ("", FSDP2, "--finetune"),
    (FSDP2, "", "--finetune"),
    ("", FSDP2, "--no-load-optim"),
]


@SLOW
@pytest.mark.parametrize(("a", "b", "part"), mostly_thorough(WAYS, [0]))
def test_the_weights_alone_pass_between_fsdp2_and_the_others(ranks, tmp_path, a, b, part):
    line = f"{GATED} --bf16"
    ranks(2).run(put, f"{line} {a} --save {tmp_path}")
    for found in ranks(2).run(weights, f"{line} {b} --load {tmp_path} {part}"):
        for name, tensor in found.items():
            shape = tuple(tensor.shape) if "word_embeddings" not in name and "output_layer" not in name else (70, 32)
            box = tuple((0, n) for n in shape)
            assert torch.equal(tensor[: shape[0]], expected(f"model.{name}", box, shape, torch.bfloat16)), name
