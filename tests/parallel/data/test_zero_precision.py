"""Every stage of ZeRO in bf16, fp16 and FP8: the bits of plain replicas, or a stated distance from the exact steps.

Two summands give one sum in either order. So on two replicas of one microbatch every stage must have every bit of plain
replicas, and of one process that adds the two gradients up by itself: weights, main parameters and moments. Clipping is
off there: a norm that is added up in other pieces has other last bits.
"""

from __future__ import annotations

import math
import shlex
from typing import Any

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import OptimizerConfig
from minimegatron.errors import ConfigError
from minimegatron.layers.logical import gather_logical
from minimegatron.layers.param import layout_of, logical_parameters
from minimegatron.optim.build import build_optimizer
from minimegatron.optim.optimizer import MixedPrecisionOptimizer
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.parallel.data.finalize import finalize_model_grads
from minimegatron.training.arguments import parse_args
from minimegatron.training.trainer import Trainer
from tests.parallel.data.test_zero import STAGES, STEPS, batch_of
from tests.thorough import SLOW, mostly_thorough
from tests.training.test_trainer import trainer_of
from tests.twin import Case, accumulate, losses, microbatch, parallel_model

ADAM = OptimizerConfig(lr=1e-4, clip_grad=0.0, weight_decay=0.1, adam_eps=1e-6)
Tensors = dict[str, torch.Tensor]


def built(case: Case, mesh: Mesh, lr: float = ADAM.lr) -> tuple[DataParallel, MixedPrecisionOptimizer]:
    ddp, config = parallel_model(case, mesh), ADAM.replace(lr=lr)
    return ddp, build_optimizer(config, ddp, mesh, ddp.shards(), publish=ddp.start_param_gather)


def held(ddp: DataParallel, optimizer: MixedPrecisionOptimizer) -> dict[str, tuple[int, torch.Tensor]]:
    """{name: (its first element, [main parameter, first moment, second])} of what this rank updates."""
    state = optimizer.state_dict()["state"]
    return {
        p.name: (
            p.piece.start if p.piece else 0,
            torch.stack(
                [x.detach().flatten() for x in (p.main, state[p.name]["exp_avg"], state[p.name]["exp_avg_sq"])]
            ),
        )
        for p in optimizer.params
    }


def weights_of(ddp: DataParallel, mesh: Mesh) -> Tensors:
    with ddp.whole_weights():
        return {n: gather_logical(p, layout_of(p), mesh).bfloat16() for n, p in logical_parameters(ddp)}


def steps_of(
    rank: int, world: int, case: Case, lr: float = ADAM.lr
) -> tuple[dict[str, tuple[int, torch.Tensor]], Tensors]:
    """What a rank holds after the steps; the weights of its stage."""
    mesh = Mesh.build(case.parallel)
    ddp, optimizer = built(case, mesh, lr)
    for step in range(STEPS):
        accumulate(ddp, batch_of(case, step), mesh)
        optimizer.step()
    return held(ddp, optimizer), weights_of(ddp, mesh)


def steps_of_one_process(case: Case, dp: int) -> tuple[dict[str, tuple[int, torch.Tensor]], Tensors]:
    """The same without any other rank: the microbatches of all, one after the other."""
    mesh = Mesh.serial()
    ddp, optimizer = built(case, mesh)
    for step in range(STEPS):
        ddp.zero_grad_buffer()
        count = torch.zeros((), dtype=torch.float64)
        for batch in (microbatch(batch_of(case, step), d, i) for d in range(dp) for i in range(case.accumulation)):
            with ddp.backward_pass():
                losses(ddp, batch).sum().backward()
            count += batch["loss_mask"].sum()
        finalize_model_grads(ddp, mesh, count)
        optimizer.step()
    return held(ddp, optimizer), weights_of(ddp, mesh)


def together(results: list[tuple[dict[str, tuple[int, torch.Tensor]], Tensors]]) -> Tensors:
    """[main parameter, moments] of every parameter, flat, from the pieces of all ranks."""
    pieces: dict[str, dict[int, torch.Tensor]] = {}
    for shares, _ in results:
        for name, (start, piece) in shares.items():
            before = pieces.setdefault(name, {}).setdefault(start, piece)
            assert torch.equal(before, piece), f"{name} differs between replicas"
    return {name: torch.cat([found[start] for start in sorted(found)], 1) for name, found in pieces.items()}


def assert_bits(got: Tensors, want: Tensors) -> None:
    assert got.keys() == want.keys()
    assert [name for name in want if not torch.equal(got[name], want[name])] == []


@SLOW
@pytest.mark.parametrize("dtype", mostly_thorough(["bf16", "fp32"], [0]))
def test_two_replicas_have_the_same_bits_in_every_stage(ranks: Any, dtype: str) -> None:
    """Weights, main parameters and moments after the steps. Of ZeRO-1 with several microbatches as well: its sums over
    ranks are the last ones, as those of plain replicas are.

    One process has these bits too, in bf16: there gradients are added in fp32 when they have been rounded. In fp32 it
    adds the second microbatch's in the product itself, where a CPU may round otherwise.
    """
    model = {"params_dtype": dtype}
    results = {s: ranks(2).run(steps_of, Case({}, model, sharding=s)) for s in STAGES}
    plain = together(results["no_shard"])
    for stage, found in results.items():
        assert_bits(together(found), plain)
        assert all(w.keys() == found[0][1].keys() for _, w in found), stage
        for _, weights in found:
            assert_bits(weights, results["no_shard"][0][1])
    several = [ranks(2).run(steps_of, Case({}, model, 3, sharding=s)) for s in STAGES[:2]]
    assert_bits(together(several[1]), together(several[0]))
    if dtype == "bf16":
        one = steps_of_one_process(Case({}, model), 2)
        assert_bits(together([one]), plain)
        assert_bits(one[1], results["no_shard"][0][1])


# ------------------------------------------------------------------------------------ fp16: one rank overflows

LINE = "--num-layers 2 --micro-batch-size 2 --global-batch-size 8 --hidden-dropout 0 --attention-dropout 0 "
FLAGS = {
    "no_shard": "",
    "optim": "--use-distributed-optimizer",
    "optim_grads": "--data-parallel-sharding-strategy optim_grads",
    "optim_grads_params": "--data-parallel-sharding-strategy optim_grads_params",
    "fsdp2": "--use-torch-fsdp2",
}
LAYOUTS = {
    "dp2": (2, ""),
    "tp2 sp dp2": (4, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "pp2 dp2": (4, "--pipeline-model-parallel-size 2"),
    "dp4, two instances": (4, "--num-distributed-optimizer-instances 2"),
}


def snapshot(trainer: Trainer) -> list[torch.Tensor]:
    """Weights, main parameters, moments and counts of steps."""
    state = trainer.optimizer.state_dict()["state"]
    lasting = [*trainer.model.held()["parameters"], *(x for name in sorted(state) for x in state[name].values())]
    return [x.clone() for x in lasting]


def overflow_on_one(rank: int, world: int, line: str) -> tuple[list[tuple[bool, float]], bool, bool]:
    """(skipped, loss scale) of three steps, of which rank 1 overflows in the second; what the last two have changed."""
    trainer = trainer_of(line, world)
    trainer.batches = trainer._batches(trainer.train_set, 0)
    seen = []
    for step in range(3):
        seen.append(snapshot(trainer))
        planted = []
        if step == rank == 1:
            norm = [p for n, p in logical_parameters(trainer.model) if "layernorm.weight" in n][-1]
            planted.append(norm.register_hook(lambda grad: torch.full_like(grad, math.inf)))
        trainer._step(False)
        for hook in planted:
            hook.remove()
    seen.append(snapshot(trainer))
    trainer.close()
    same = [all(torch.equal(a, b) for a, b in zip(*pair, strict=True)) for pair in zip(seen, seen[1:], strict=False)]
    assert not same[0]
    return [(report.skipped, report.loss_scale) for report in trainer.history], same[1], same[2]


CASES = [(s, layout) for s in STAGES[:4] for layout in LAYOUTS if (s, layout) != ("no_shard", "dp4, two instances")]


ORDINARY = [("no_shard", "dp2"), ("optim_grads_params", "dp4, two instances")]


@pytest.mark.parametrize("sharding, layout", mostly_thorough(CASES, ORDINARY.__contains__, ORDINARY[:1].__contains__))
def test_an_overflow_on_one_rank_skips_the_step_on_all(ranks: Any, sharding: str, layout: str) -> None:
    world, flags = LAYOUTS[layout]
    line = f"{LINE} --fp16 --initial-loss-scale 256 --hysteresis 1 {FLAGS[sharding]} {flags}"
    for history, unchanged, unchanged_after in ranks(world).run(overflow_on_one, line):
        assert history == [(False, 256.0), (True, 256.0), (False, 128.0)]
        assert unchanged and not unchanged_after


# ---------------------------------------------------------------------------------------------------------- FP8

RECIPES = {
    "delayed": "--fp8-format hybrid --fp8-amax-history-len 4 --fp8-amax-compute-algo max",
    "tensorwise": "--fp8-format hybrid --fp8-recipe tensorwise",
    "blockwise": "--fp8-format e4m3 --fp8-recipe blockwise",
    "mxfp8": "--fp8-format e4m3 --fp8-recipe mxfp8",
}
LARGER = "--num-attention-heads 2 --seq-length 64 --bf16 --clip-grad 0 --train-iters 3 "


def fp8_on_rank(rank: int, world: int, lines: list[str]) -> list[tuple[list[float], Tensors, Tensors]]:
    """Of every line the losses, the weights and the state of the scales after the steps."""
    found = []
    for line in lines:
        trainer = trainer_of(line, world)
        trainer.train()
        trainer.close()
        scales = {n: b.clone() for n, b in trainer.model.named_buffers() if "fp8" in n}
        history = [report.losses["lm loss"] for report in trainer.history]
        found.append((history, weights_of(trainer.model, trainer.mesh), scales))
    return found


@SLOW
@pytest.mark.parametrize(
    "recipe, layout",
    mostly_thorough([(r, layout) for layout in ("dp2", "tp2 sp dp2") for r in RECIPES], [0]),
)
def test_fp8_has_the_same_bits_in_every_stage(ranks: Any, recipe: str, layout: str) -> None:
    """Weights are quantised from what has been gathered; histories and scales are those of all ranks."""
    world, flags = LAYOUTS[layout]
    tiles = f"--hidden-size {256 if world > 2 else 128}"  # of 128 x 128 numbers, on a rank
    line = f"{LINE} {LARGER} {tiles} --global-batch-size 4 {RECIPES[recipe]} {flags}"
    results = ranks(world).run(fp8_on_rank, [f"{line} {flag}" for flag in FLAGS.values()])
    first = results[0][0]
    assert bool(first[2]) == (recipe == "delayed")
    for rank in results:
        for stage, (history, weights, scales) in zip(FLAGS, rank, strict=True):
            assert history == first[0], stage
            assert_bits(weights, first[1])
            assert_bits(scales, first[2])


@pytest.mark.parametrize(
    "line, words",
    [
        ("--fp16 --use-torch-fsdp2", "no loss scale would be made"),
        ("--fp16 --fp8-recipe delayed --fp8-margin 1", "without fp8_format"),
    ],
)
def test_what_does_not_compose_is_refused(line: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        parse_args(shlex.split(f"--mock-data {line}"), 2)
    assert caught.value.fix
