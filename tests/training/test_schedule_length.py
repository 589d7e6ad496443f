"""The default decay of the learning rate ends where the run ends, however its length is given."""

from __future__ import annotations

import shlex

import pytest

from minimegatron.training.arguments import parse_args
from tests.mock_data import small_trainer

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
