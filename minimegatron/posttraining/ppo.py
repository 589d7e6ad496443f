"""PPO: GRPO's loop with a value head in place of the group.

A value head on the policy's own trunk predicts, at each token, the reward that is still to come. What came is compared
with it, token by token (`policy.gae`), so one answer to a prompt is enough, and a token is judged by what follows it.
The reward of the environment stands at the last drawn token; with `--grpo-kl-in reward` each token also pays
beta (log pi_old - log pi_ref).

    loss = policy loss + c_v / 2 max((V - R)^2, (V_clipped - R)^2)

The value of a drawn token is that of the state in which it was drawn: the head's number at the token before it, which
is where the row has it as an input.

TRL had `PPOTrainer`; verl: `compute_gae_advantage_return`, `compute_value_loss` in `verl/trainer/ppo/core_algos.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from minimegatron.comm.mesh import Mesh
from minimegatron.data.gpt_dataset import Batch
from minimegatron.posttraining.grpo import GRPO, OLD, REFERENCE, Answers
from minimegatron.posttraining.policy import gae, value_loss
from minimegatron.posttraining.rollouts import Episode
from minimegatron.posttraining.scoring import token_numbers, values_of
from minimegatron.training.run_state import RunState
from minimegatron.training.step import Loss, LossFunc

VALUES, RETURNS = "old_values", "returns"


def whitened(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Values with mean 0 and variance 1 where the mask is, and 0 elsewhere."""
    count = mask.sum()
    centred = (values - (values * mask).sum() / count.clamp(min=1)) * mask
    return centred / (centred.square().sum() / (count - 1).clamp(min=1) + 1e-8).sqrt()


class PPO(GRPO):
    """Rewards of an environment, and values."""

    def numbers(self) -> list[str]:
        return [*super().numbers(), VALUES, RETURNS]

    @property
    def scores_old(self) -> bool:
        """Rewards of tokens need the old policy's log-probabilities."""
        return super().scores_old or bool(self.config.grpo_kl_beta and self.config.grpo_kl_in == "reward")

    def forward_step(self, data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, LossFunc]:
        batch = next(data_iterator)
        return model(batch["tokens"], batch["position_ids"], outputs="both"), partial(self.loss, batch, model.mesh)

    def loss(self, batch: Batch, mesh: Mesh, output: Any) -> Loss:
        """The policy's loss, and the value head's, by the same sums and counts."""
        logits, values = output
        summed, count, report = super().loss(batch, mesh, logits)
        task, mask = self.config, batch["loss_mask"]
        of_tokens = value_loss(values, batch[VALUES], batch[RETURNS], task.ppo_cliprange_value).masked_fill(
            mask == 0, 0.0
        )
        answers = Answers(mask, batch["answer_lengths"], mesh)
        of_values, _ = answers.aggregate(of_tokens, task.grpo_loss_type, task.max_completion_length)
        report |= {"value loss": torch.stack([of_values.detach().double(), count])}
        report |= {"value": answers.mean_of_tokens(values.detach()), "return": answers.mean_of_tokens(batch[RETURNS])}
        return summed + task.ppo_value_loss_coef * of_values, count, report

    def advantages(self, state: RunState, episodes: Sequence[Episode]) -> None:
        """Values by the policy's head, then advantages and returns of every token."""
        task, rollouts, numbers = self.config, self.rollouts, self.rollouts.numbers
        micro = state.run.training.micro_batch_size

        def as_they_are(batch: Batch, values: torch.Tensor) -> torch.Tensor:
            return values

        found = token_numbers(state.model, rollouts.batch_of_rows, rollouts.size, micro, values_of, as_they_are)
        rollouts.keep(VALUES, found)
        drawn = numbers["drawn"]
        rewards = torch.zeros_like(drawn)
        last = (drawn * torch.arange(1, drawn.shape[1] + 1)).argmax(1)
        rewards[torch.arange(len(drawn)), last] = rollouts.rewards
        if task.grpo_kl_beta and task.grpo_kl_in == "reward":
            rewards -= task.grpo_kl_beta * (numbers[OLD] - numbers[REFERENCE]) * drawn
        advantages, returns = gae(rewards, numbers[VALUES], drawn, task.ppo_gamma, task.ppo_lambda)
        if task.ppo_whiten_advantages:
            advantages = whitened(advantages, drawn)
        numbers["advantages"].copy_(advantages)
        numbers[RETURNS].copy_(returns)
