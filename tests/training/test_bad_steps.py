"""A loss that is not finite, or a spike: all ranks do the same, nothing moves, and the run does what was asked."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from minimegatron.errors import BadStep, RankError
from minimegatron.layers.param import logical_parameters
from minimegatron.training import trainer as loop
from minimegatron.training.run_state import TrainState
from minimegatron.training.step import forward_step
from minimegatron.training.trainer import ROLLBACKS
from tests.thorough import SLOW, THOROUGH
from tests.training.test_trainer import trainer_of

LINE = (
    "--num-layers 1 --micro-batch-size 1 --global-batch-size 4 --train-iters 8 --lr-decay-iters 8 "
    "--hidden-dropout 0.1 --attention-dropout 0.1 --use-distributed-optimizer --rerun-mode disabled"
)


def trainer_with(line: str, world: int, bad: dict[int, float], rank: int = 0, victim: int = 0) -> tuple[Any, list[str]]:
    """A trainer whose loss is multiplied by `bad[k]` at the k-th microbatch that the victim sees; and its samples."""
    seen: list[str] = []

    def step(batches: Any, model: Any) -> Any:
        kept: list[Any] = []

        def note() -> Any:
            for batch in batches:
                kept.append(batch)
                yield batch

        output, summed = forward_step(note(), model)
        seen.append(str(kept[0]["tokens"].flatten()[:6].tolist()))
        factor = bad.get(len(seen), 1.0) if rank == victim else 1.0
        return output * factor, summed

    return trainer_of(f"{LINE} {line}", world, forward_step=step), seen


def weights(trainer: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in logical_parameters(trainer.model)}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[n], b[n]) for n in a)


def skipping(rank: int, world: int, kind: float) -> tuple[list[float], TrainState]:
    """A rank's first or second microbatch of step 3 is bad (two a step)."""
    trainer, _ = trainer_with("--bad-step skip", world, {6: kind}, rank, victim=1)
    before: list[Any] = []
    real = trainer._after_bad_step

    def checked(error: Any, batch_size: int) -> None:
        held = weights(trainer)
        real(error, batch_size)
        before.append(same(held, weights(trainer)))

    trainer._after_bad_step = checked
    trainer.train()
    trainer.close()
    assert before == [True]
    return [r.losses["lm loss"] for r in trainer.history], trainer.state


@pytest.mark.slow
def test_skipped_by_all_ranks_together(ranks):
    (losses, state), (other, other_state) = ranks(2).run(skipping, float("inf"))
    assert losses == other and state == other_state and len(losses) == 7
    assert (state.iteration, state.consumed_train_samples, state.skipped_iterations) == (8, 32, 1)


def test_stopped_before_anything_moved():
    trainer, _ = trainer_with("--bad-step stop", 1, {9: float("nan")})
    with pytest.raises(BadStep) as caught:
        trainer.train()
    trainer.close()
    assert caught.value.exit_code == 6 and "nothing has moved" in str(caught.value)
    plain, _ = trainer_with("--exit-interval 2", 1, {})
    plain.train()
    plain.close()
    assert trainer.state == plain.state and same(weights(trainer), weights(plain))


def rolling_back(rank: int, world: int, root: str, bad: dict[int, float]) -> tuple[list[Any], TrainState, list[str]]:
    trainer, seen = trainer_with(f"--bad-step rollback --save {root} --save-interval 2 --async-save --lr 1e-3", world,
                                 bad, rank, victim=world - 1)  # fmt: skip
    try:
        trainer.train()
    finally:
        trainer.close()
    return [(r.losses["lm loss"], r.grad_norm) for r in trainer.history], trainer.state, seen


def beyond(rank: int, world: int, root: str) -> list[Any]:
    """By hand: the checkpoint of step 4, and the batches from the seventh on."""
    trainer, _ = trainer_with(f"--load {root} --ckpt-step 4 --lr 1e-3", world, {})
    trainer.state.consumed_train_samples = 24
    trainer._fit_to_data()
    trainer.train()
    trainer.close()
    return [(r.losses["lm loss"], r.grad_norm) for r in trainer.history]


@SLOW
def test_rolled_back_to_the_newest_checkpoint_and_past_the_batch(ranks, tmp_path):
    """Two microbatches a step on each of two ranks: the 12th is of step 6, and the checkpoint of step 4."""
    found = ranks(2).run(rolling_back, str(tmp_path), {12: float("nan")})
    (history, state, seen), (other, other_state, other_seen) = found
    assert history == other and state == other_state and len(history) == 5 + 4
    assert state.iteration == 8 and state.consumed_train_samples == 24 + 16 and state.skipped_iterations == 0
    assert len(seen) == len(other_seen) == 2 * 10, "ten batches, the bad one among them"
    for expected in ranks(2).run(beyond, str(tmp_path)):
        assert history[5:] == expected


def test_no_checkpoint_to_go_back_to(tmp_path):
    with pytest.raises(BadStep, match="lm loss") as caught:
        rolling_back(0, 1, str(tmp_path), {5: float("nan")})
    assert "no checkpoint to go back to" in str(caught.value)


def test_rollbacks_that_do_not_help_end(tmp_path):
    """Four microbatches a step: from step 3 on every step is bad."""
    with pytest.raises(BadStep, match="lm loss") as caught:
        rolling_back(0, 1, str(tmp_path), dict.fromkeys(range(9, 99), float("nan")))
    assert f"{ROLLBACKS} rollbacks to iteration 2 did not help" in str(caught.value)


def spiking(rank: int, world: int, factor: float, options: str) -> tuple[list[float], TrainState]:
    """The sixth step has the spike, behind four good ones that are looked at."""
    trainer, _ = trainer_with(f"--lr 1e-4 {options}", world, {12: factor}, rank, victim=1)
    with mock.patch.object(loop, "WINDOW", 4):
        trainer.train()
    trainer.close()
    return [r.losses["lm loss"] for r in trainer.history], trainer.state


@SLOW
def test_a_spike_on_one_rank_is_one_on_all(ranks):
    options = "--spiky-loss-factor 2 --bad-step skip"
    for losses, state in ranks(2).run(spiking, 20.0, options):
        assert state.skipped_iterations == 1 and len(losses) == 7 and max(losses) < 2 * min(losses)
    for losses, state in ranks(2).run(spiking, 2.0, options):  # on a quarter of the tokens: 1.25 times the mean
        assert state.skipped_iterations == 0 and len(losses) == 8
    with pytest.raises(RankError, match="times the mean of the last 4 good steps"):
        ranks(2).run(spiking, 20.0, "--spiky-loss-factor 2")


# ------------------------------------------------------------------------------------------- nothing to learn from


def with_masks(line: str, world: int, masked: set[int], evaluation: bool = False) -> Any:
    """A trainer that finds all labels masked in some of its microbatches, by number, or in evaluations."""
    seen: list[int] = []

    def step(batches: Any, model: Any) -> Any:
        seen.append(1)

        def without_labels() -> Any:
            for batch in batches:
                none = evaluation and not model.training if evaluation else len(seen) in masked
                yield batch | ({"loss_mask": torch.zeros_like(batch["loss_mask"])} if none else {})

        return forward_step(without_labels(), model)

    return trainer_of(f"{LINE} {line}", world, forward_step=step)


def masked_on(rank: int, world: int, victims: list[int], line: str) -> tuple[list[int], TrainState]:
    """Two microbatches a step: all of step 3 are masked on the victims."""
    trainer = with_masks(line, world, {5, 6} if rank in victims else set())
    trainer.train()
    trainer.close()
    return [r.num_tokens for r in trainer.history], trainer.state


@SLOW
def test_a_rank_without_labels_is_no_bad_step(ranks):
    for tokens, state in ranks(2).run(masked_on, [1], ""):
        assert tokens == [64, 64, 32, *[64] * 5] and state.skipped_iterations == 0


def test_a_step_without_labels_is_one(ranks):
    for tokens, state in ranks(2).run(masked_on, [0, 1], "--bad-step skip"):
        assert tokens == [64] * 7 and state.skipped_iterations == 1 and state.consumed_train_samples == 32


@THOROUGH
def test_in_a_pipeline_as_well(ranks):
    line = "--num-layers 2 --pipeline-model-parallel-size 2 --global-batch-size 2 --bad-step skip"
    for tokens, state in ranks(2).run(masked_on, [1], line):
        assert tokens == [32] * 7 and state.skipped_iterations == 1


def test_an_evaluation_without_labels_has_no_loss():
    trainer = with_masks("--eval-interval 4 --eval-iters 1", 1, set(), evaluation=True)
    said: list[str] = []
    trainer.metrics.say = said.append
    trainer.train()
    trainer.close()
    assert trainer.state.validation_loss is None and trainer.evaluate() == {}
    assert "no validation loss at iteration 4: none of the labels counts" in said
