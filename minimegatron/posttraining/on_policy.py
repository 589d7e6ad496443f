"""Rows whose answers the student draws itself, for a teacher to score.

    before a step   weights -> engine, in another layout of the same ranks (`rollouts.Sampler`)
                    for each of its samples k that is the student's: the prompt of row k, and a new answer
    the step        reads row k with that answer; prompts do not count, drawn tokens do

Sample k is the student's if floor((k + 1) lmbda) > floor(k lmbda), so of n samples in a row lmbda n are, to one, and
which they are depends on nothing else. The last answer of a conversation is drawn; earlier turns stay as they are.

Answers are drawn anew before each step, by the weights that will learn from them. So a checkpoint has nothing of them:
they follow from the weights, the seed, and the number of the sample. (GRPO learns from a rollout for several steps, and
has to keep it.)

`engine gap` in the log is the mean distance between the trainer's and the engine's log-probability of a drawn token, as
in `rollouts`, but in one number: older weights in the engine show there.

Agarwal et al. 2024 (GKD, arXiv 2306.13649), algorithm 1, which decides for a whole batch by a draw; TRL:
`trl/experimental/gkd/gkd_trainer.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from minimegatron.data.gpt_dataset import Batch, Dataset
from minimegatron.errors import DataError
from minimegatron.posttraining.conversations import Tokens
from minimegatron.posttraining.environments import Problem, Turn
from minimegatron.posttraining.rollouts import Episode, Sampler
from minimegatron.posttraining.rows import Items, RowDataset
from minimegatron.training.observers import Observer
from minimegatron.training.rules import batch_sizes
from minimegatron.training.run_state import RunState

DRAWN, ENGINE = "drawn", "engine_log_probs"


class Unjudged:
    """An environment that asks nothing itself and takes every answer: the teacher judges them."""

    def problems(self, held_out: bool) -> Sequence[Problem]:
        return ()

    def turn(self, problem: Problem, answers: Sequence[str]) -> Turn:
        return Turn(0.0)


def prompt_ids(problem: Problem) -> list[int]:
    """The ids of a problem that consists of ids."""
    return [int(token) for token in problem.prompt]


class OwnAnswers(Dataset):
    """A training set, of which a share of the rows has answers of the student's.

    Args:
        rows: the training set, an item a row.
        share: of the rows; above 0.
    """

    known = False

    def __init__(self, rows: RowDataset, share: float) -> None:
        self.rows, self.share = rows, share
        self.place: dict[int, int] = {}  # sample -> row of `answers`
        self.answers: RowDataset

    def is_own(self, k: int) -> bool:
        """Whether the student answers sample k."""
        return int((k + 1) * self.share) > int(k * self.share)

    def prompt(self, k: int) -> tuple[int, ...]:
        """The ids of sample k before its last answer; of an answer without a prompt its first id."""
        ((first, stop),) = self.rows.spans(self.rows.row(k))
        counts = self.rows.items.counts[first:stop]
        begins = np.flatnonzero(counts[1:] & ~counts[:-1]) + 1
        last = int(begins[-1]) if len(begins) else 1
        return tuple(self.rows.items.ids[first : first + last].tolist())

    def fill(self, samples: Sequence[int], episodes: Sequence[Episode]) -> None:
        """Take the answers to some samples, in place of those that were here."""
        items = Items.of(
            [[Tokens(tuple(episode.ids), tuple(episode.drawn))] for episode in episodes], self.rows.sequence_length
        )
        self.answers = RowDataset(items, self.rows.sequence_length)
        self.answers.extra[ENGINE] = np.concatenate([np.asarray(e.log_probs, dtype=np.float32) for e in episodes])
        self.place = {k: i for i, k in enumerate(samples)}

    def __len__(self) -> int:
        return len(self.rows)

    def read_epochs(self, samples: int) -> dict[str, float]:
        """As of the rows."""
        return self.rows.read_epochs(samples)

    def begun(self, first: int, end: int) -> dict[str, int]:
        """As of the rows."""
        return self.rows.begun(first, end)

    def batch(self, samples: Sequence[int]) -> Batch:
        """As `RowDataset.batch`, and of each label: whether the student drew it, and the engine's log-probability.

        Raises:
            DataError: the student has not answered one of the samples.
        """
        rows = [self._own(k) if self.is_own(k) else self._given(k) for k in samples]
        return {name: torch.cat([row[name] for row in rows]) for name in rows[0]}

    def _own(self, k: int) -> Batch:
        if k not in self.place:
            raise DataError(f"sample {k} is the student's, and it has not answered it")
        row = self.answers.batch_of_rows([self.place[k]])
        return row | {DRAWN: row["loss_mask"]}

    def _given(self, k: int) -> Batch:
        row = self.rows.batch([k])
        zeros = torch.zeros_like(row["loss_mask"])
        return row | {ENGINE: zeros, DRAWN: zeros}


class DrawsAnswers(Observer):
    """Before each step: the student answers the samples that are its own; all ranks call it together.

    Args:
        answers: takes them.
        state: the run.
        sampler: draws them.
    """

    def __init__(self, answers: OwnAnswers, state: RunState, sampler: Sampler) -> None:
        self.answers, self.state, self.sampler = answers, state, sampler
        self.sizes = batch_sizes(state.run.training, state.mesh.dp.size)

    def before_step(self, done: int) -> None:
        first = self.state.counters.consumed_train_samples
        samples = range(first, first + self.sizes.global_batch_size_at(first))
        own = [k for k in samples if self.answers.is_own(k)]
        if not own:
            return
        self.sampler.take_weights()
        seed = np.random.default_rng([self.state.run.training.seed, first]).integers(1 << 62)
        self.answers.fill(own, self.sampler.play([Problem(self.answers.prompt(k)) for k in own], 1, int(seed)))
