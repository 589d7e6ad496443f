"""An evaluation is a mean over all tokens, and leaves no trace in the training, whenever an observer asks for one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.training.observers import Observer
from minimegatron.training.observers.evaluation import evaluate
from minimegatron.training.step import forward_step
from tests.thorough import mostly_thorough
from tests.training.test_step import batches
from tests.training.test_trainer import numbers, trainer_of
from tests.twin import Case, parallel_model

LINE = (
    "--num-layers 2 --micro-batch-size 1 --global-batch-size 4 --train-iters 2 --eval-iters 1 --eval-interval 1 "
    "--hidden-dropout 0.1"
)
TP, PP = "--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2"
ZERO = "--overlap-grad-reduce --data-parallel-sharding-strategy"
EXPERTS = "--disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 32"
BIAS = f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
BIAS += " --moe-router-load-balancing-type none"
GLOBAL = f"{EXPERTS} --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 1e-2"
FP8 = "--bf16 --fp8-format hybrid --fp8-amax-history-len 4 --fp8-amax-compute-algo max"
CASES = {
    "dropout": (1, ""),
    "experts, fp8": (1, f"{BIAS} {FP8}"),
    "losses of experts": (1, f"{GLOBAL} --moe-z-loss-coeff 1e-3 --moe-input-jitter-eps 0.1"),
    "fp16": (1, "--fp16 --initial-loss-scale 1024"),
    "tp": (2, TP),
    "tp, fp8": (2, f"{TP} {FP8}"),
    "tp, bias": (2, f"{TP} {BIAS}"),
    "ep, bias": (2, f"{BIAS} --expert-model-parallel-size 2"),
    "pp": (2, PP),
    "pp, interleaved": (2, f"{PP} --num-layers 4 --num-virtual-stages-per-pipeline-rank 2"),
    "pp, zb_v": (2, f"{PP} --num-layers 4 --pipeline-schedule zb_v"),
    "pp, fp8": (2, f"{PP} {FP8}"),
    "pp, bias": (2, f"{PP} {BIAS}"),
    "pp, global": (2, f"{PP} {GLOBAL}"),
    "pp, mtp": (2, f"{PP} --mtp-num-layers 1"),
    "cp": (2, "--context-parallel-size 2 --attention-dropout 0"),
    "ddp": (2, "--overlap-grad-reduce --ddp-bucket-size 4000"),
    "zero-1": (2, f"{ZERO} optim --overlap-param-gather --bf16"),
    "zero-2": (2, f"{ZERO} optim_grads --overlap-param-gather"),
    "zero-3": (2, f"{ZERO} optim_grads_params"),
    "zero-3, bf16": (2, f"{ZERO} optim_grads_params --bf16"),
    "zero-3, pp": (4, f"{PP} {ZERO} optim_grads_params"),
    "fsdp2": (2, "--use-torch-fsdp2"),
    "fsdp2, pp": (2, f"{PP} --use-torch-fsdp2"),
}
ORDINARY = ["dropout", "experts, fp8", "pp, bias", "zero-3", "fsdp2, pp"]


def trained(rank: int, world: int, line: str, moments: tuple[str, ...]) -> tuple[Any, dict[str, list[torch.Tensor]]]:
    """Train with an evaluation at each of these moments of a step; the curve, and all that a checkpoint would hold."""
    trainer = trainer_of(f"{LINE} {line}", world)
    trainer.observers = [observer for observer in trainer.observers if observer is not trainer.evaluation]
    done: list[str] = []

    def evaluates(moment: str) -> None:
        done.append(moment)  # before: an evaluation has forward passes of its own
        assert trainer.evaluate()

    def evaluates_first(batches: Any, model: Any) -> Any:
        if model.training and done.count("forward_step") == len(trainer.history):
            evaluates("forward_step")
        return forward_step(batches, model)

    for moment in moments:
        if moment == "forward_step":
            trainer.forward_step = evaluates_first
        else:
            observer = Observer()
            setattr(observer, moment, lambda *_, moment=moment: evaluates(moment))
            trainer.observers.append(observer)
    trainer.train()
    trainer.close()
    assert sorted(done) == sorted(moments * 2)
    tensors = trainer.run_state.tensors()
    return numbers(trainer.history), {n: [part.data.detach().clone() for part in t.parts] for n, t in tensors.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_thorough(CASES, ORDINARY.__contains__, ["dropout", "zero-3"].__contains__))
def test_evaluation_leaves_no_trace(ranks: Any, name: str) -> None:
    """At `before_update` gradients, loads of experts and amax wait to be used; at `forward_step` passes are under way.

    (A pipeline cannot evaluate there: the stages are at different microbatches.)
    """
    world, line = CASES[name]
    moments = ("before_step", "before_update", "after_step") + ("forward_step",) * (PP not in line)
    plain, evaluating = (ranks(world).run(trained, line, at, timeout=120) for at in ((), moments))
    for (curve, tensors), (curve_after, after) in zip(plain, evaluating, strict=True):
        assert curve == curve_after
        for key, parts in tensors.items():
            assert all(map(torch.equal, parts, after[key])), key


def evaluated(rank: int, world: int, case: Case) -> tuple[dict[str, float], bool]:
    mesh = Mesh.build(ParallelConfig.from_dict(case.layout))
    ddp = parallel_model(case, mesh)
    ddp.module.decoder.eval()
    losses = evaluate(forward_step, batches(case, [mesh.dp.rank], 1), ddp, case.accumulation)
    modes_kept = ddp.training and not ddp.module.decoder.training
    return losses, modes_kept and not any(p.grad is not None for p in ddp.parameters())


def test_evaluation_is_the_mean_over_all_tokens(ranks: Any) -> None:
    case = Case(accumulation=3, double=True)
    model = parallel_model(case, Mesh.serial())
    data = list(batches(case, [0, 1], 1))
    with torch.no_grad():
        total = sum((model(b["tokens"], None, b["labels"]) * b["loss_mask"]).sum() for b in data)
    mean = (total / sum(b["loss_mask"].sum() for b in data)).item()
    for losses, untouched in ranks(2).run(evaluated, case):
        assert losses["lm loss"] == pytest.approx(mean, rel=1e-9) and untouched
