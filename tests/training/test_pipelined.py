"""Training through a pipeline: the curve of one process, evaluations, dropout, ramp-up, a loss that is NaN."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.config import ParallelConfig
from minimegatron.errors import ConfigError, RankError
from minimegatron.layers.logical import load_logical
from minimegatron.layers.param import logical_parameters
from minimegatron.models.chunks import ModelChunks
from minimegatron.models.decoder import GPTModel
from minimegatron.parallel.data.ddp import DistributedDataParallel
from minimegatron.training.arguments import parse_args
from minimegatron.training.pipelined import Microbatches
from minimegatron.training.reports import StepReport
from minimegatron.training.step import forward_step, get_forward_backward_func
from tests.mock_data import small_trainer
from tests.thorough import SLOW, mostly_slow, mostly_thorough
from tests.twin import Case, distance, microbatch, weights

PP2 = "--pipeline-model-parallel-size 2"
TINY = "--seq-length 16 --hidden-size 32 --num-attention-heads 2 --lr 1e-2 --vocab-size 64 --num-layers 4 "
TINY += "--make-vocab-size-divisible-by 8 --micro-batch-size 2 --global-batch-size 8 "
PLAIN = "--hidden-dropout 0 --attention-dropout 0 "


def trained(rank: int, world: int, line: str) -> tuple[list[StepReport], dict[str, float]]:
    source = "" if "--corpus" in line else "--mock-data"
    trainer = small_trainer(parse_args(shlex.split(f"{TINY} {source} {line}"), world), quiet=True)
    trainer.train()
    return trainer.history, trainer.evaluate()


def same(ranks: Any, world: int, line: str, layouts: list[str], rel: float = 1e-4) -> None:
    history, losses = trained(0, 1, line)
    for layout in layouts:
        for theirs, their_losses in ranks(world).run(trained, f"{line} {layout}", timeout=120):
            assert their_losses == pytest.approx(losses, rel=rel)
            assert len(theirs) == len(history)
            for ours, other in zip(history, theirs, strict=True):
                assert other.losses["lm loss"] == pytest.approx(ours.losses["lm loss"], rel=rel), layout
                assert other.grad_norm == pytest.approx(ours.grad_norm, rel=10 * rel), layout
                assert (other.num_tokens, other.learning_rate) == (ours.num_tokens, ours.learning_rate)


@pytest.fixture(scope="module")
def corpus(docs_corpus) -> str:
    return f"--corpus stdlib-docs --corpus-path {docs_corpus} --vocab-size 512 --eod-mask-loss --reset-attention-mask "


@pytest.mark.thorough
def test_real_text_gives_one_curve(ranks, corpus):
    line = f"{corpus} {PLAIN} --train-iters 5 --eval-interval 5 --eval-iters 2 --reset-position-ids"
    same(ranks, 2, line, [PP2, f"{PP2} --num-layers-per-virtual-pipeline-stage 1"])
    zero_bubble = f"{PP2} --pipeline-schedule zb_v --overlap-grad-reduce --ddp-bucket-size 5000"
    same(ranks, 4, line, [f"{PP2} --tensor-model-parallel-size 2 --sequence-parallel", zero_bubble])


@pytest.mark.thorough
def test_a_batch_that_grows(ranks):
    line = f"{PLAIN} --train-iters 5 --global-batch-size 12 --rampup-batch-size 4 4 16 --eval-interval 9 --eval-iters 1"
    same(ranks, 2, line, [PP2, f"{PP2} --pipeline-schedule zb_h1"])


@SLOW
@pytest.mark.parametrize("schedule", mostly_thorough(["1f1b", "zb_v"], [1]))
def test_dropout_is_the_same_with_and_without_recompute(ranks, schedule):
    line = f"--hidden-dropout 0.2 --attention-dropout 0.2 --train-iters 3 {PP2} --pipeline-schedule {schedule}"
    kept, again = (ranks(2).run(trained, f"{line} {more}")[0][0] for more in ("", "--recompute-granularity full"))
    assert [(r.losses["lm loss"], r.grad_norm) for r in kept] == [(r.losses["lm loss"], r.grad_norm) for r in again]


def poisoned(rank: int, world: int) -> None:
    line = f"{TINY} --mock-data {PLAIN} --train-iters 3 {PP2}"
    trainer = small_trainer(parse_args(shlex.split(line), world), quiet=True)
    if rank == 0:  # a weight of the first stage; the last one sees the loss
        with torch.no_grad():
            next(iter(trainer.model.parameters()))[:] = torch.nan
    trainer.train()


def test_a_loss_that_is_not_finite_stops_all_ranks_and_names_the_last_stage(ranks):
    with pytest.raises(RankError, match=r"(?s)ranks 0-1 raised BadStep: lm loss is nan.*rank 1"):
        ranks(2).run(poisoned)


@pytest.mark.parametrize(
    "line, words",
    [
        ("--num-layers-per-virtual-pipeline-stage 1 --global-batch-size 6", "leave a last group of 1"),
        ("--num-layers-per-virtual-pipeline-stage 1 --rampup-batch-size 2 2 16", "at least 2"),
        ("--num-layers 5", "does not divide num_layers"),
        ("--pipeline-schedule zbv", "zb_v"),
        ("--decoder-first-pipeline-num-layers 5", "leave -1"),
    ],
)
def test_refused_before_launch(line, words):
    with pytest.raises(ConfigError, match=words) as caught:
        parse_args(shlex.split(f"{TINY} --mock-data {PP2} {line}"), 2)
    assert caught.value.fix


# ------------------------------------------------------------------------------------ lengths that vary


def lengths(case: Case, index: int) -> dict[str, torch.Tensor]:
    return {name: x[:, : 4 + 3 * index] for name, x in microbatch(case, 0, index).items()}


def of_different_lengths(rank: int, world: int, case: Case) -> dict[str, float]:
    mesh = Mesh.build(ParallelConfig.from_dict(case.layout))
    twin = GPTModel(case.config, Mesh.serial())
    load_logical(twin, weights(case.config, case.seed))
    serial = DistributedDataParallel(twin, Mesh.serial())
    model = ModelChunks(case.config, mesh)
    load_logical(model, weights(case.config, case.seed), stage=True)
    ddp = DistributedDataParallel(model, mesh)
    for wrapped in (serial, ddp):
        batches = (lengths(case, i) for i in range(case.accumulation))
        get_forward_backward_func(wrapped)(forward_step, batches, wrapped, case.accumulation, lambda loss: loss)
    return {n: distance(p.main_grad, serial.params[n].main_grad) for n, p in logical_parameters(ddp)}


@pytest.mark.parametrize("schedule", mostly_slow(["1f1b", "zb_v"], [1]))
def test_microbatches_of_different_lengths(ranks, schedule):
    layout = {"pipeline_model_parallel_size": 2, "pipeline_schedule": schedule}
    varying = Case({**layout, "variable_seq_lengths": True}, {"num_layers": 4}, accumulation=4)
    for report in ranks(2).run(of_different_lengths, varying):
        assert max(report.values()) < 1e-5
    with pytest.raises(RankError, match="variable_seq_lengths=True"):
        ranks(2).run(of_different_lengths, Case(layout, {"num_layers": 4}, accumulation=4), timeout=20)


def test_a_microbatch_is_kept_from_its_first_use_to_its_last():
    read: list[int] = []
    batches = Microbatches((read.append(i) or {"tokens": torch.tensor([[i]])} for i in range(4)), uses=2)
    assert batches.peek(1)["tokens"].item() == 1 and read == [0, 1]
    assert [batches.take(i)["tokens"].item() for i in (0, 1, 0)] == [0, 1, 0]
    with pytest.raises(KeyError):
        batches.take(0)
    assert batches.take(1)["tokens"].item() == 1 and read == [0, 1]
