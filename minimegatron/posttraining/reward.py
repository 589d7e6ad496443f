"""A reward model: of two answers the chosen one gets the larger score.

    loss = -log sigmoid(r_w - r_l) + c (r_w + r_l)^2          Bradley and Terry 1952; c: rewards only mean differences

The score of an answer is the value head's number at its last token, the stop token, from which everything has been
read. In a row that is the *input* at which no label stands: a sequence of L ids has L - 1 inputs, so the last input is
the token before the stop token. So the rows of this task have the stop token twice, and the second is only a label.

TRL: `trl/trainer/reward_trainer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from minimegatron.comm.mesh import Mesh
from minimegatron.config.run import RunConfig
from minimegatron.data.gpt_dataset import Batch
from minimegatron.posttraining.conversations import Encoder, Tokens
from minimegatron.posttraining.rows import RowDataset
from minimegatron.posttraining.scoring import values_of
from minimegatron.posttraining.sequences import counted_once, sequence_sums
from minimegatron.posttraining.sft import SFT
from minimegatron.training.datasets import Joint, RunData
from minimegatron.training.step import Loss, LossFunc


def pair_losses(scores: torch.Tensor, center: float = 0.0) -> torch.Tensor:
    """Bradley-Terry: -log sigmoid(r_w - r_l) + center (r_w + r_l)^2.

    Args:
        scores: [..., 2], of the chosen and of the rejected answer.
        center: weight of the second term, which keeps scores near 0.

    Returns:
        [...].
    """
    return -F.logsigmoid(scores[..., 0] - scores[..., 1]) + center * scores.sum(-1) ** 2


class Reward(SFT):
    """Pairs of a chosen and a rejected answer to a prompt, and a model with a value head."""

    prefers = True

    def form(self, encoder: Encoder, line: Mapping[str, Any]) -> list[Tokens]:
        """The pair, each with its last token twice, of which the second alone counts: where the score is read."""
        return [Tokens((*one.ids, one.ids[-1]), (False,) * len(one.ids) + (True,)) for one in encoder.pair(line)]

    def __init__(self, run: RunConfig) -> None:
        super().__init__(run)
        self.counts_per_token = 1 / run.data.seq_length

    def load_data(
        self, run: RunConfig, mesh: Mesh, num_samples: tuple[int, int, int], joint: Joint, quiet: bool
    ) -> RunData:
        data = super().load_data(run, mesh, num_samples, joint, quiet)
        sets = [rows for rows in (data.train, data.valid, data.test) if isinstance(rows, RowDataset)]
        self.most_sequences = max((rows.most_sequences for rows in sets), default=0)
        return data

    def forward_step(self, data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, LossFunc]:
        batch = next(data_iterator)
        return values_of(batch, model), partial(self.loss, batch, model.mesh)

    def loss(self, batch: Batch, mesh: Mesh, values: torch.Tensor) -> Loss:
        """The sum of the losses of a microbatch's pairs, and how many there are.

        Args:
            batch: rows of pairs.
            mesh: its cp axis shares the tokens.
            values: [b, s / cp].
        """
        mask, n = batch["loss_mask"], self.most_sequences
        scores, found = (
            sequence_sums(numbers, batch["document_ids"], n, mesh).unflatten(1, (n // 2, 2))
            for numbers in (values * mask, mask)
        )
        is_pair = found.min(-1).values > 0
        margin = scores[..., 0] - scores[..., 1]
        of_pair = pair_losses(scores, self.run.task.center_rewards_coefficient)
        summed = of_pair.masked_fill(~is_pair, 0.0).sum()
        pairs = counted_once(is_pair.sum().double(), mesh)
        figures = {
            "reward loss": summed.detach(),
            "chosen preferred": (is_pair & (margin > 0)).sum(),
            "margin": margin.detach().masked_fill(~is_pair, 0.0).sum(),
        }
        return summed, pairs, {k: torch.stack([counted_once(v.double(), mesh), pairs]) for k, v in figures.items()}
