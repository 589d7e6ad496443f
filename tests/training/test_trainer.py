"""The loop: the same curve in every layout and every time, and every way in which it ends."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from minimegatron.errors import ConfigError, DataError
from minimegatron.training.arguments import parse_args
from minimegatron.training.build import build_trainer
from minimegatron.training.reports import StepReport
from minimegatron.training.step import forward_step
from minimegatron.training.trainer import Trainer
from tests.mock_data import small_trainer
from tests.thorough import THOROUGH

TINY = "--seq-length 16 --hidden-size 32 --num-attention-heads 2 --lr 1e-2 --vocab-size 64 "
TINY += "--make-vocab-size-divisible-by 8"


def trainer_of(line: str, world_size: int = 1, **options: Any) -> Trainer:
    source = "" if "--corpus" in line else "--mock-data"
    return small_trainer(parse_args(shlex.split(f"{TINY} {source} {line}"), world_size), quiet=True, **options)


def train(line: str, **options: Any) -> Trainer:
    trainer = trainer_of(line, **options)
    trainer.train()
    trainer.close()
    return trainer


def numbers(history: list[StepReport]) -> list[tuple[float, float | None]]:
    return [(report.losses["lm loss"], report.grad_norm) for report in history]


# ------------------------------------------------------------------------------------------------ the curve


def history_on_rank(rank: int, world: int, line: str) -> list[StepReport]:
    trainer = trainer_of(line, world)
    trainer.train()
    return trainer.history


@pytest.fixture(scope="module")
def corpus(docs_corpus) -> str:
    return f"--corpus stdlib-docs --corpus-path {docs_corpus}"


LAYOUTS = [
    "--tensor-model-parallel-size 2 --sequence-parallel",
    "--tensor-model-parallel-size 2 --overlap-grad-reduce --ddp-bucket-size 5000",
    "--tensor-model-parallel-size 4",
    "--context-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
    "--context-parallel-size 2 --cp-comm-type a2a",
    "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2",
]


@THOROUGH
@pytest.mark.parametrize("layout", LAYOUTS)
def test_real_text_gives_one_curve_in_every_layout(ranks, corpus, layout):
    line = (
        f"{corpus} --vocab-size 512 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --swiglu "
        "--normalization RMSNorm --position-embedding-type rope --disable-bias-linear --hidden-dropout 0 "
        "--attention-dropout 0 --micro-batch-size 2 --global-batch-size 8 --train-iters 5 --lr 3e-3 "
        "--untie-embeddings-and-output-weights --eod-mask-loss --reset-attention-mask --reset-position-ids"
    )
    serial = train(line).history
    assert serial[-1].losses["lm loss"] < serial[0].losses["lm loss"] - 0.1
    for history in ranks(4).run(history_on_rank, f"{line} {layout}"):
        for ours, theirs in zip(history, serial, strict=True):
            assert ours.losses["lm loss"] == pytest.approx(theirs.losses["lm loss"], rel=1e-4)
            assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-3)
            assert (ours.num_tokens, ours.learning_rate) == (theirs.num_tokens, theirs.learning_rate)


def validation_on_rank(rank: int, world: int, line: str) -> dict[str, float]:
    return trainer_of(line, world).evaluate()


@pytest.mark.slow
def test_evaluation_is_the_same_with_context_parallelism(ranks, corpus):
    line = f"{corpus} --vocab-size 512 --attention-dropout 0 --eval-interval 1 --eval-iters 3 --micro-batch-size 2"
    serial = validation_on_rank(0, 1, line)
    for cut in ranks(2).run(validation_on_rank, f"{line} --context-parallel-size 2"):
        assert cut == pytest.approx(serial, rel=1e-5)


@pytest.mark.slow
def test_packed_samples_train_alike_with_context_parallelism(ranks, corpus):
    line = f"{corpus} --vocab-size 512 --hidden-dropout 0 --attention-dropout 0 --sequence-packing --train-iters 4"
    # The text is that of the Python which runs this: a batch large enough for a lower loss, whatever the text.
    line = f"{line} --micro-batch-size 2 --global-batch-size 8"
    serial = train(line).history
    assert serial[-1].losses["lm loss"] < serial[0].losses["lm loss"]
    for history in ranks(2).run(history_on_rank, f"{line} --context-parallel-size 2"):
        for (loss, norm), (other, other_norm) in zip(numbers(history), numbers(serial), strict=True):
            assert loss == pytest.approx(other, rel=1e-4) and norm == pytest.approx(other_norm, rel=1e-3)


def test_the_same_seed_is_the_same_run_and_another_is_not():
    line = "--train-iters 4 --micro-batch-size 2 --global-batch-size 4"
    first, again, other = train(line), train(line), train(line + " --seed 7")
    assert numbers(first.history) == numbers(again.history) != numbers(other.history)
    assert all(torch.equal(a, b) for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True))


@pytest.mark.parametrize(
    "line",
    [
        "--vocab-size 2 --make-vocab-size-divisible-by 1", "--num-layers 1",
        "--kv-channels 5", "--max-position-embeddings 16", "--bf16", "--optimizer sgd", "--log-num-zeros-in-grad",
        "--recompute-activations", "--tokenizer-type NullTokenizer", "--window-size 3,0",
        "--attention-backend local --attention-dropout 0",
    ],
)  # fmt: skip
def test_edges_run(line):
    history = train(f"--train-iters 2 {line}").history
    assert len(history) == 2 and not history[-1].skipped


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 2])
def test_the_shortest_sequences_run(corpus, length):
    assert len(train(f"{corpus} --vocab-size 512 --train-iters 2 --seq-length {length}").history) == 2


def test_megatrons_null_tokenizer_has_one_id_more():
    assert trainer_of("--tokenizer-type NullTokenizer").run.model.vocab_size == 65
    assert trainer_of("").run.model.vocab_size == 64


def test_a_spec_from_the_command_line():
    trainer = trainer_of("--spec minimegatron.models.gpt_layer_specs decoder_layer_spec --train-iters 1")
    assert len(trainer.train().__dict__) and trainer.history
    with pytest.raises(ConfigError, match="cannot import"):
        trainer_of("--spec no.such.module f")


# ------------------------------------------------------------------------------------------------ schedules and batches


def test_the_batch_grows_and_the_schedule_counts_samples():
    line = "--micro-batch-size 1 --global-batch-size 4 --rampup-batch-size 1 1 6 --train-iters 6 --lr-warmup-samples 16"
    trainer = train(f"{line} --lr-decay-samples 32")
    sizes = [round(r.num_tokens / 16) for r in trainer.history]
    assert sizes == sorted(sizes) and sizes[0] == 1 and sizes[-1] == 4
    assert trainer.state.consumed_train_samples == sum(sizes)
    assert [r.learning_rate for r in trainer.history] == pytest.approx(
        [1e-2 * min(1.0, sum(sizes[: i + 1]) / 16, (32 - sum(sizes[: i + 1])) / 16) for i in range(6)]
    )


# ------------------------------------------------------------------------------------------------ ends


def test_exit_interval(capsys):
    assert train("--train-iters 9 --exit-interval 4").state.iteration == 4


def test_exit_duration():
    assert train("--train-iters 9 --exit-duration-in-mins 0.0").state.iteration == 1


def with_sigterm(data: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
    """SIGTERM in the middle of the third microbatch."""
    with_sigterm.calls += 1  # type: ignore[attr-defined]
    if with_sigterm.calls == 3:  # type: ignore[attr-defined]
        os.kill(os.getpid(), signal.SIGTERM)
    return forward_step(data, model)


def test_sigterm_ends_the_run_after_the_next_step_and_gives_the_handler_back():
    with_sigterm.calls = 0  # type: ignore[attr-defined]
    before = signal.getsignal(signal.SIGTERM)
    trainer = train("--train-iters 9", forward_step=with_sigterm)
    assert trainer.state.iteration == 4 and len(trainer.history) == 4
    assert signal.getsignal(signal.SIGTERM) is before


def stopped_at(rank: int, world: int) -> tuple[int, int]:
    """Rank 1 alone receives SIGTERM."""
    with_sigterm.calls = 0 if rank == 1 else -100  # type: ignore[attr-defined]
    trainer = trainer_of("--train-iters 9", world, forward_step=with_sigterm)
    state = trainer.train()
    return state.iteration, state.consumed_train_samples


def test_one_ranks_sigterm_stops_all_after_the_same_step(ranks):
    assert ranks(2).run(stopped_at) == [(4, 8), (4, 8)]


def test_no_training_set_and_no_documents():
    with pytest.raises(ConfigError, match="tokenizer-type"):
        build_trainer(parse_args(shlex.split("--data-path nowhere")), quiet=True)
    with pytest.raises(DataError, match="nowhere"):
        build_trainer(
            parse_args(shlex.split("--data-path nowhere --tokenizer-type NullTokenizer --vocab-size 9")), quiet=True
        )


# ------------------------------------------------------------------------------------------------- lengths of schedules


LINE = "--seq-length 8 --hidden-size 16 --num-attention-heads 2 --num-layers 1 --vocab-size 32 --mock-data --lr 1e-2 "
GROWING = "--micro-batch-size 1 --global-batch-size 4 --rampup-batch-size 1 1 6"


@pytest.mark.parametrize(
    "length, samples",
    [
        ("--micro-batch-size 2 --global-batch-size 4 --train-iters 5", 20),
        ("--micro-batch-size 2 --global-batch-size 4 --train-samples 23", 23),  # of which 3 fill no batch
        (f"{GROWING} --train-iters 6", 1 + 1 + 2 + 3 + 4 + 4),
        (f"{GROWING} --train-iters 3", 1 + 1 + 2),
        (f"{GROWING} --train-samples 16", 16),
    ],
)
def test_the_rate_and_the_decay_of_weights_take_as_many_samples_as_the_run(length, samples):
    trainer = small_trainer(parse_args(shlex.split(LINE + length), 1), quiet=True)
    schedule = trainer.scheduler.schedule
    assert (schedule.lr_decay_steps, schedule.wd_incr_steps) == (samples, samples)
    trainer.train()
    left = (samples - trainer.state.consumed_train_samples) / samples
    assert trainer.history[-1].learning_rate == pytest.approx(1e-2 * left, abs=1e-15)


@pytest.mark.parametrize(
    "batch", [GROWING, "--micro-batch-size 2 --global-batch-size 5 --decrease-batch-size-if-needed"]
)
def test_lengths_in_iterations_are_iterations_also_where_the_batch_is_smaller(batch):
    line = f"{LINE} {batch} --train-iters 7 --lr-warmup-iters 3 --lr-decay-iters 6"
    trainer = small_trainer(parse_args(shlex.split(line), 1), quiet=True)
    trainer.train()
    rates = [report.learning_rate for report in trainer.history]
    assert rates[2] == max(rates) == pytest.approx(1e-2) and rates[1] < rates[2] > rates[3]
    assert rates[4] > 0 and rates[5:] == [0.0, 0.0]
