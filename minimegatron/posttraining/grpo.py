"""GRPO: the model draws groups of answers, a program rewards them, and answers better than their group become likelier.

The formulas are in `policy`, the rollouts in `rollouts`; this file is the task that joins them. A rollout serves
N / global batch size steps, times `--grpo-iterations`; with one step a rollout the ratio is 1 by definition, and
log-probabilities of the old policy need no pass of their own.

Each `--eval-interval` the model answers the problems that are held out, taking the likeliest token, and the mean reward
is what checkpoints are compared by.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from minimegatron.checkpoint.regions import Logical
from minimegatron.comm.mesh import Mesh
from minimegatron.config.run import RunConfig
from minimegatron.data.gpt_dataset import Batch
from minimegatron.errors import ConfigError
from minimegatron.inference.sampling import SamplingParams
from minimegatron.layers.loss import vocab_parallel_entropy
from minimegatron.layers.param import logical_parameters
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.posttraining.conversations import Encoder
from minimegatron.posttraining.data import chosen, template_of, tokenizer_of
from minimegatron.posttraining.environments import Environment, Problem, environment
from minimegatron.posttraining.policy import PolicyLoss, group_advantages, importance_weights
from minimegatron.posttraining.rollouts import Episode, Rollouts, Sampler
from minimegatron.posttraining.scoring import label_log_probs, log_probs
from minimegatron.posttraining.sequences import counted_once, sequence_sums
from minimegatron.training.build import build_replica
from minimegatron.training.datasets import Joint, RunData, load_on_rank_zero_first, vocab_size_of
from minimegatron.training.observers import Observer
from minimegatron.training.rules import batch_sizes
from minimegatron.training.run_state import RunState, model_weights
from minimegatron.training.step import Loss, LossFunc
from minimegatron.training.task import Task

GREEDY_REWARD = "greedy reward"
OLD, ENGINE, ROUNDED, REFERENCE = "old_log_probs", "engine_log_probs", "rounded_log_probs", "reference_log_probs"


class GRPO(Task):
    """Rewards of an environment."""

    def __init__(self, run: RunConfig) -> None:
        super().__init__(run)
        self.config = config = run.task
        self.counts_per_token = 1.0 if config.grpo_loss_type == "dapo" else 1 / run.data.seq_length
        self.environment: Environment = environment(config.environment)
        self.policy_loss = PolicyLoss(
            config.grpo_clamp_eps_lower,
            config.grpo_clamp_eps_upper,
            config.grpo_delta,
            config.importance_sampling_level,
            config.grpo_kl_beta if config.grpo_kl_in == "loss" else 0.0,
            config.grpo_entropy_term_weight,
        )
        self.rollouts: Rollouts
        self.reference: DataParallel | None = None
        self.rounded: DataParallel | None = None

    def numbers(self) -> list[str]:
        """Names of the numbers that the buffer has for each token."""
        task = self.config
        numbers = ["advantages", ENGINE, OLD]
        numbers += [ROUNDED] * (task.rl_inference_dtype not in (None, self.run.model.params_dtype))
        return numbers + [REFERENCE] * (task.grpo_kl_beta > 0)

    @property
    def scores_old(self) -> bool:
        """Whether the old policy's log-probabilities need a pass of their own."""
        task = self.config
        in_reward = bool(task.grpo_kl_beta) and task.grpo_kl_in == "reward"
        return self.rollouts.steps > 1 or ROUNDED in self.rollouts.numbers or in_reward

    def load_data(
        self, run: RunConfig, mesh: Mesh, num_samples: tuple[int, int, int], joint: Joint, quiet: bool
    ) -> RunData:
        """An empty buffer of rollouts, and the tokenizer."""
        numbers = self.numbers()
        batch_size = batch_sizes(run.training, mesh.dp.size).global_batch_size

        def load(progress: bool) -> RunData:
            tokenizer, folder = tokenizer_of(run)
            self.rollouts = Rollouts(run, num_samples[0], batch_size, numbers)
            return RunData(tokenizer, vocab_size_of(tokenizer, chosen(run)), self.rollouts, None, None, (), (), folder)

        return load_on_rank_zero_first(load, mesh, quiet)

    def begin(self, state: RunState, data: RunData, say: Callable[[str], None]) -> Sequence[Observer]:
        self.model_config = state.run.model
        task, encoder = self.config, Encoder(data.tokenizer, template_of(state.run, data.tokenizer))
        sampling = SamplingParams(task.grpo_default_temperature, top_p=task.grpo_default_top_p)
        sampler = Sampler(state.run, state, data.tokenizer, partial(prompt_ids, encoder), self.environment, sampling)
        if self.config.grpo_kl_beta:
            self.reference = build_replica(state.run, state.mesh)
        if ROUNDED in self.rollouts.numbers:
            model = state.run.model.replace(params_dtype=self.config.rl_inference_dtype)
            self.rounded = build_replica(dataclasses.replace(state.run, model=model), state.mesh)
        self.observer = RolloutObserver(self, state, sampler, say)
        self.held_out = self.environment.problems(held_out=True)[: self.evaluated]
        if self.run.training.eval_interval and not self.held_out:
            raise ConfigError(
                f"eval_interval with environment {self.config.environment}: it holds no problem out",
                fix="another --environment, or no --eval-interval",
            )
        return [self.observer]

    @property
    def evaluated(self) -> int:
        """Most held-out problems of an evaluation; a batch of one is the prompts of a rollout."""
        return self.run.training.eval_iters * self.config.grpo_prompts_per_step

    def evaluate(self, split: str) -> dict[str, float] | None:
        """The mean reward of greedy answers to the problems that are held out, the same ones each time."""
        if split != "validation" or not self.evaluated:
            return None
        sampler = self.observer.sampler
        sampler.take_weights()
        episodes = sampler.play(self.held_out, 1, 0, greedy=True)
        count = len(episodes)
        return {
            GREEDY_REWARD: sum(episode.reward for episode in episodes) / count,
            "greedy length": sum(sum(episode.drawn) for episode in episodes) / count,
        }

    def score(self, found: Mapping[str, float]) -> float:
        """Minus the reward."""
        return -found[GREEDY_REWARD]

    def tensors(self) -> dict[str, torch.Tensor | Logical]:
        found: dict[str, torch.Tensor | Logical] = {**self.rollouts.tensors()}
        if self.reference is not None:
            found |= {f"reference.{name}": weight for name, weight in model_weights(self.reference).items()}
        return found

    def forward_step(self, data_iterator: Iterator[Batch], model: Any) -> tuple[torch.Tensor, LossFunc]:
        batch = next(data_iterator)
        output = model(batch["tokens"], batch["position_ids"])
        return output, partial(self.loss, batch, model.mesh)

    def loss(self, batch: Batch, mesh: Mesh, logits: torch.Tensor) -> Loss:
        """The sum of a microbatch's loss, its count, and figures.

        Args:
            batch: of `Rollouts.batch`, this rank's part over cp.
            mesh: the layout.
            logits: [s / cp, b, V'/t].
        """
        task, mask = self.config, batch["loss_mask"]
        if task.grpo_default_temperature != 1.0:
            logits = logits / task.grpo_default_temperature
        log_probs = label_log_probs(logits, batch["labels"], mesh, self.model_config)
        old = log_probs.detach() if self.rollouts.steps == 1 else batch[OLD]  # the ratio is 1
        with torch.set_grad_enabled(task.grpo_entropy_term_weight > 0 and torch.is_grad_enabled()):
            entropy = vocab_parallel_entropy(logits, mesh.tp, vocab_size=self.model_config.vocab_size).t()
        gap = (old - batch[ENGINE]).masked_fill(mask == 0, 0.0)
        answers = Answers(mask, batch["answer_lengths"], mesh)
        loss, figures = self.policy_loss(
            log_probs,
            old,
            batch["advantages"],
            mask,
            mean=answers.mean,
            weights=self._weights(gap, answers),
            reference=batch.get(REFERENCE) if task.grpo_kl_in == "loss" else None,
            entropy=entropy,
        )
        summed, count = answers.aggregate(loss, task.grpo_loss_type, task.max_completion_length)
        figures |= {"staleness": (log_probs.detach() - old).abs(), "layout gap": gap.abs()}
        if ROUNDED in batch:
            figures |= {"dtype gap": (old - batch[ROUNDED]).abs(), "layout gap": (batch[ROUNDED] - batch[ENGINE]).abs()}
        report = {"policy loss": torch.stack([summed.detach().double(), count])}
        report |= {name: answers.mean_of_tokens(values) for name, values in figures.items()}
        report |= {"reward": answers.mean_of_answers(batch["rewards"])}
        report |= {"length": answers.mean_of_answers(batch["answer_lengths"])}
        return summed, count, report

    def _weights(self, gap: torch.Tensor, answers: Answers) -> torch.Tensor | None:
        mode = self.config.rl_importance_sampling_mode
        if mode is None:
            return None
        return importance_weights(gap, mode, self.config.rl_importance_sampling_truncation_coef, answers.total)

    def advantages(self, state: RunState, episodes: Sequence[Episode]) -> None:
        """Fill in the advantage of every drawn token, from the rewards of the rollout."""
        task, rollouts = self.config, self.rollouts
        drawn, rewards = rollouts.numbers["drawn"], rollouts.rewards
        if task.grpo_kl_beta and task.grpo_kl_in == "reward":
            moved = (rollouts.numbers[OLD] - rollouts.numbers[REFERENCE]) * drawn
            rewards = rewards - task.grpo_kl_beta * moved.sum(1)
        groups = rewards.view(task.grpo_prompts_per_step, task.grpo_group_size)
        advantages = group_advantages(groups, task.scale_rewards).reshape(-1, 1)
        rollouts.numbers["advantages"].copy_(advantages * drawn)


def prompt_ids(encoder: Encoder, problem: Problem) -> list[int]:
    """The ids of what an environment asks."""
    asked = problem.prompt if isinstance(problem.prompt, str) else list(problem.prompt)
    return encoder.prompt({"prompt": asked})


class Answers:
    """The answers of a microbatch, a row each: sums, means, and what a loss is divided by.

    Args:
        mask: [b, s / cp], 1 for tokens that were drawn.
        lengths: [b, s / cp], how many tokens of its row were drawn, on all ranks of cp.
        mesh: its cp axis shares the tokens.
    """

    def __init__(self, mask: torch.Tensor, lengths: torch.Tensor, mesh: Mesh) -> None:
        self.mask, self.lengths, self.mesh = mask, lengths, mesh
        b, s = mask.shape
        self._one = torch.zeros(b, s * mesh.cp.size, dtype=torch.int64, device=mask.device)

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """[b, s / cp] -> [b, 1], the sum over each answer."""
        return sequence_sums(values, self._one, 1, self.mesh)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """[b, s / cp] -> [b, 1], the mean over the drawn tokens of each answer."""
        return self.total(values.masked_fill(self.mask == 0, 0.0)) / self.lengths[:, :1].clamp(min=1)

    def aggregate(self, loss: torch.Tensor, loss_type: str, longest: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum and count of a loss of tokens, [b, s / cp]; see the table of `policy`.

        Each rank of cp has the sum of its own tokens, and the count of its tokens, or on the first rank of answers.
        """
        tokens = self.mask.sum(dtype=torch.float64)
        answers = counted_once(tokens.new_full((), len(self.mask)), self.mesh)
        if loss_type == "dapo":
            return loss.sum(), tokens
        if loss_type == "grpo":
            return (loss / self.lengths.clamp(min=1)).sum(), answers
        if loss_type == "dr_grpo":
            return loss.sum() / longest, answers
        return loss.sum() / self.lengths[:, 0].sum().clamp(min=1), counted_once(torch.ones_like(tokens), self.mesh)

    def mean_of_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """[sum, count] of a number of each drawn token, for a report."""
        summed = values.expand_as(self.mask).masked_fill(self.mask == 0, 0.0).sum(dtype=torch.float64)
        return torch.stack([summed.detach(), self.mask.sum(dtype=torch.float64)])

    def mean_of_answers(self, values: torch.Tensor) -> torch.Tensor:
        """[sum, count] of a number of each answer, [b, s / cp] of equal columns."""
        pair = torch.stack([values[:, 0].sum(dtype=torch.float64), self.mask.new_tensor(len(values)).double()])
        return counted_once(pair, self.mesh)


@torch.no_grad()
def copy_weights(source: DataParallel, target: DataParallel) -> None:
    """The weights of a model into a frozen one of the same layout, rounded to its dtype."""
    with source.whole_weights():
        weights = dict(logical_parameters(source))
        for name, param in logical_parameters(target):
            param.copy_(weights[name])


class RolloutObserver(Observer):
    """Before a step whose samples do not exist: draws them.

    Args:
        task: has the buffer, and the reference if there is one.
        state: the run.
        sampler: plays the episodes.
        say: prints a line on rank 0.
    """

    def __init__(self, task: GRPO, state: RunState, sampler: Sampler, say: Callable[[str], None]) -> None:
        self.task, self.state, self.sampler, self.say = task, state, sampler, say
        self.problems = task.environment.problems(held_out=False)

    def begin(self, done: int) -> None:
        reference = self.task.reference
        if reference is not None and not done:
            copy_weights(self.state.model, reference)

    def before_step(self, done: int) -> None:
        number = self.task.rollouts.rollout_of(self.state.counters.consumed_train_samples)
        if int(self.task.rollouts.number) != number:
            self.draw(number)

    def draw(self, number: int) -> None:
        """Fill the buffer with rollout `number`."""
        began, task, rollouts = time.monotonic(), self.task, self.task.rollouts
        config, seed = task.config, self.state.run.training.seed
        order = np.random.default_rng([seed, number])
        chosen = order.choice(len(self.problems), config.grpo_prompts_per_step, replace=True)
        self.sampler.take_weights()
        problems = [self.problems[i] for i in chosen]
        episodes = self.sampler.play(problems, config.grpo_group_size, int(order.integers(1 << 62)))
        rollouts.fill(number, episodes)
        self._score()
        task.advantages(self.state, episodes)
        rewards, cut = rollouts.rewards, sum(episode.cut for episode in episodes)
        self.say(
            f"rollout {number}: {len(episodes)} answers to {len(problems)} prompts, reward {rewards.mean():.3f} "
            f"+- {rewards.std():.3f}, {cut} cut, {time.monotonic() - began:.1f} s"
        )
        reasons = collections.Counter(episode.reason.partition(":")[0] for episode in episodes if episode.reason)
        if reasons:
            self.say(f"rewards of 0: {', '.join(f'{count} {reason}' for reason, count in reasons.most_common(5))}")

    def _score(self) -> None:
        """Log-probabilities of what was drawn, by the policy, if it is needed, and by the reference."""
        rollouts, run = self.task.rollouts, self.state.run
        models = {OLD: self.state.model} if self.task.scores_old else {}
        models |= {REFERENCE: self.task.reference} if self.task.reference is not None else {}
        if self.task.rounded is not None:
            copy_weights(self.state.model, self.task.rounded)
            models |= {ROUNDED: self.task.rounded}
        for name, model in models.items():
            scores = log_probs(
                model,
                run.model,
                rollouts.batch_of_rows,
                rollouts.size,
                run.training.micro_batch_size,
                temperature=run.task.grpo_default_temperature,
            )
            rollouts.keep(name, scores)
