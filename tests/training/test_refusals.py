"""Every stage of data parallelism with every feature: it trains, with the gradient of one process, or it is refused.

`REFUSED` is the whole table of what is refused. An ordinary run asks the configuration alone; `--thorough` takes one
step of every pair that is accepted.
"""

from __future__ import annotations

import shlex
from typing import Any, NamedTuple

import pytest

from minimegatron.errors import ConfigError
from minimegatron.training.arguments import parse_args
from tests.thorough import THOROUGH
from tests.training.test_trainer import TINY, trainer_of

STAGES = {
    "no_shard": "",
    "optim": "--use-distributed-optimizer",
    "optim_grads": "--data-parallel-sharding-strategy optim_grads",
    "optim_grads_params": "--data-parallel-sharding-strategy optim_grads_params",
    "fsdp2": "--use-torch-fsdp2",
}
SHARDED, GATHERED = tuple(STAGES)[1:], ("optim_grads_params", "fsdp2")


class Feature(NamedTuple):
    """Flags beside those of a stage.

    Attributes:
        layout: of the ranks; one process goes without.
        model: what one process has too.
        ranks: two replicas of everything.
        tolerance: of the gradient norm, relative.
    """

    layout: str = ""
    model: str = ""
    ranks: int = 2
    tolerance: float = 1e-4


TP, PP = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
EXPERTS = "--disable-bias-linear --num-experts 4 --moe-ffn-hidden-size 32 --moe-token-dispatcher-type alltoall"
FP8 = "--bf16 --fp8-format hybrid"
FEATURES = {
    "tp": Feature(TP, ranks=4),
    "tp, sp": Feature(f"{TP} --sequence-parallel", ranks=4),
    "pp, 1f1b": Feature(PP, ranks=4),
    "pp, gpipe": Feature(f"{PP} --pipeline-schedule gpipe", ranks=4),
    "pp, interleaved": Feature(f"{PP} --num-virtual-stages-per-pipeline-rank 2", ranks=4),
    "pp, zb_h1": Feature(f"{PP} --pipeline-schedule zb_h1", ranks=4),
    "pp, zb_v": Feature(f"{PP} --pipeline-schedule zb_v", ranks=4),
    "pp, dualpipe_v": Feature(f"{PP} --pipeline-schedule dualpipe_v", ranks=4),
    "cp, ring": Feature("--context-parallel-size 2", ranks=4),
    "cp, all-to-all": Feature("--context-parallel-size 2 --cp-comm-type a2a", ranks=4),
    "cp, all-gather": Feature("--context-parallel-size 2 --cp-comm-type allgather", ranks=4),
    "experts": Feature(model=EXPERTS),
    "ep": Feature("--expert-model-parallel-size 2", EXPERTS),
    "etp above tp": Feature("--expert-tensor-parallel-size 2", EXPERTS, ranks=4),
    "etp below tp": Feature(f"{TP} --sequence-parallel --expert-tensor-parallel-size 1", EXPERTS, ranks=4),
    "recompute full": Feature(model="--recompute-granularity full"),
    "recompute block": Feature(model="--recompute-granularity full --recompute-method block --recompute-num-layers 2"),
    "recompute selective": Feature(model="--recompute-activations"),
    "documents": Feature(model="--reset-attention-mask --reset-position-ids --eod-mask-loss"),
    "packing": Feature(model="--sequence-packing"),
    "mtp": Feature(model="--mtp-num-layers 1"),
    "mtp, pp": Feature(PP, "--mtp-num-layers 1", ranks=4),
    "untied": Feature(model="--untie-embeddings-and-output-weights"),
    "frozen": Feature(model="--freeze *embedding*"),
    "bf16": Feature(model="--bf16", tolerance=0.02),
    "bf16, pp": Feature(PP, "--bf16", ranks=4, tolerance=0.02),
    "bf16, pp, interleaved": Feature(
        f"{PP} --num-virtual-stages-per-pipeline-rank 2", "--bf16 --eval-interval 1 --eval-iters 1", 4, 0.02
    ),
    "bf16, cp": Feature("--context-parallel-size 2", "--bf16", ranks=4, tolerance=0.02),
    "bf16, mtp, pp": Feature(PP, "--bf16 --mtp-num-layers 1", ranks=4, tolerance=0.02),
    "bf16, tp, sp, ep": Feature(
        f"{TP} --sequence-parallel --expert-model-parallel-size 2", f"--bf16 {EXPERTS}", ranks=4, tolerance=0.1
    ),
    "fp16": Feature(model="--fp16 --initial-loss-scale 256", tolerance=0.02),
    "fp16, pp": Feature(PP, "--fp16 --initial-loss-scale 256", ranks=4, tolerance=0.02),
    "fp8, delayed": Feature(model=FP8, tolerance=0.1),
    "fp8, tensorwise": Feature(model=f"{FP8} --fp8-recipe tensorwise", tolerance=0.1),
    "fp8, tp": Feature(f"{TP} --sequence-parallel", FP8, ranks=4, tolerance=0.1),
    "fp8, pp": Feature(PP, FP8, ranks=4, tolerance=0.1),
    "fp8, ep": Feature("--expert-model-parallel-size 2", f"{FP8} {EXPERTS}", tolerance=0.1),
    "fp8, recompute": Feature(model=f"{FP8} --recompute-granularity full", tolerance=0.1),
    "fp32 residuals, pp": Feature(PP, "--bf16 --fp32-residual-connection", ranks=4, tolerance=0.02),
    "graph": Feature("--enable-cuda-graph"),
    "overlap of gradients": Feature("--overlap-grad-reduce"),
    "buckets": Feature("--overlap-grad-reduce --ddp-bucket-size 2000"),
    "overlap of weights": Feature("--overlap-param-gather"),
    "instances": Feature("--num-distributed-optimizer-instances 2", ranks=4),
    "check of the first step": Feature("--check-first-step"),
    "sgd": Feature(model="--optimizer sgd"),
    "muon": Feature(model="--optimizer muon"),
    "dist_muon": Feature(model="--optimizer dist_muon"),
}

# feature -> stages -> words of the refusal
LATER, MATRICES = "reduces gradients when autograd has finished", "Muon needs whole matrices"
REFUSED: dict[str, dict[str, str]] = {
    **{f"pp, {schedule}": {"fsdp2": LATER} for schedule in ("zb_h1", "zb_v", "dualpipe_v")},
    **dict.fromkeys(("fp16", "fp16, pp"), {"fsdp2": "no loss scale would be made"}),
    "graph": {"optim_grads": "no messages", "optim_grads_params": "no messages", "fsdp2": "no messages"},
    "buckets": dict.fromkeys(GATHERED, "a bucket is a layer"),
    "overlap of weights": {"no_shard": "no parameters are gathered"} | dict.fromkeys(GATHERED, "on use already"),
    "instances": {"no_shard": "nothing is shared out"},
    "muon": dict.fromkeys(SHARDED, MATRICES),
    "dist_muon": dict.fromkeys(SHARDED, MATRICES),
}
LINE = "--num-layers 4 --micro-batch-size 1 --global-batch-size 8 --train-iters 1 --lr 1e-3 "
LINE += "--hidden-dropout 0 --attention-dropout 0"


def line_of(feature: Feature, stage: str) -> str:
    return f"{LINE} {feature.model} {feature.layout} {STAGES[stage]}"


@pytest.mark.parametrize("name", FEATURES)
def test_what_is_refused_is_the_table_and_says_what_to_do(name: str) -> None:
    """Whatever else is asked for has a fix too: the table is all there is."""
    feature, refused = FEATURES[name], {}
    for stage in STAGES:
        try:
            parse_args(shlex.split(f"{TINY} --mock-data {line_of(feature, stage)}"), feature.ranks)
        except ConfigError as error:
            assert error.fix
            refused[stage] = str(error)
    want = REFUSED.get(name, {})
    assert refused.keys() == want.keys()
    assert {stage: words for stage, words in want.items() if words not in refused[stage]} == {}


def norms_of_a_step(rank: int, world: int, lines: list[str]) -> list[float]:
    found = []
    for line in lines:
        trainer = trainer_of(line, world)
        trainer.train()
        trainer.close()
        found.append(trainer.history[0].grad_norm or 0.0)
    return found


@pytest.mark.parametrize("name", [pytest.param(name, marks=THOROUGH) for name in FEATURES if name != "graph"])
def test_what_is_accepted_has_the_gradient_of_one_process(ranks: Any, name: str) -> None:
    feature = FEATURES[name]
    accepted = [stage for stage in STAGES if stage not in REFUSED.get(name, {})]
    (want,) = norms_of_a_step(0, 1, [line_of(feature._replace(layout=""), "no_shard")])
    for norms in ranks(feature.ranks).run(
        norms_of_a_step, [line_of(feature, stage) for stage in accepted], timeout=300
    ):
        assert dict(zip(accepted, norms, strict=True)) == {
            stage: pytest.approx(want, rel=feature.tolerance) for stage in accepted
        }
    assert want > 0
