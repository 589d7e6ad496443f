"""Formulas of policy gradients: advantages, losses of a token, and what is divided by what.

With r_t = pi(y_t) / pi_old(y_t) the ratio of a token's probabilities now and when the answers were drawn, and A its
advantage, the loss of a token is

    l_t = -min(r_t A, clip(r_t, 1 - e_low, 1 + e_high) A) * w_t + beta k3(t) - c H_t

| part | choices                                                                                                       |
|------|---------------------------------------------------------------------------------------------------------------|
| A    | (R - mean) / (std + 1e-4) over the group's rewards; std of the `group`, of the `batch`, or `none`             |
| r_t  | of each `token`, or of the `sequence` (GSPO): the geometric mean over the answer, the same for all its tokens |
| w_t  | q if q <= C, else C (`truncate`) or 0 (`mask`); q = pi_old / pi_engine of the token, or of the whole sequence |
| k3   | exp(d) - d - 1 with d = log pi_ref - log pi: positive, and its mean is the KL divergence                      |
| H    | entropy of the distribution that y_t was drawn from                                                           |

w_t corrects for an engine that computes slightly other probabilities than the trainer; it has no gradient, and k3 is
not multiplied by it. A loss of tokens becomes one number by a sum and a count; the training step divides the sum of
all sums by the sum of all counts (`training/step`):

| `--grpo-loss-type` | sum                              | count        | so                                            |
|--------------------|----------------------------------|--------------|-----------------------------------------------|
| `grpo`             | sum_i (sum_t l_t) / length_i     | answers      | tokens of a short answer weigh more           |
| `dapo`             | sum_t l_t                        | tokens       | all tokens of the step weigh the same         |
| `dr_grpo`          | sum_t l_t / longest allowed      | answers      | the weight depends on nothing that is drawn   |
| `bnpo`             | sum_t l_t / tokens of microbatch | microbatches | the result depends on the microbatch size     |

**At the first update** after answers were drawn every ratio is 1, nothing is clipped, and the gradient of l_t is
-A grad log pi(y_t): a ratio computed from two detached numbers has the value 1 too, and no gradient at all.

Equal rewards in a group give A = 0. The unbiased standard deviation and 1e-4 are TRL's; verl has 1e-6; Megatron-LM
divides by the biased one.

Shao et al. 2024 (GRPO, arXiv 2402.03300); Yu et al. 2025 (DAPO, 2503.14476); Liu et al. 2025 (Dr. GRPO, 2503.20783);
Zheng et al. 2025 (GSPO, 2507.18071); Schulman et al. 2017 (PPO, 1707.06347); Schulman et al. 2016
(GAE, 1506.02438).
Megatron-LM: `calculate_grpo_loss`, `calculate_grpo_advantages` in `megatron/rl/rl_utils.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

EPSILON = 1e-4


def group_advantages(rewards: torch.Tensor, scale: str = "group") -> torch.Tensor:
    """The advantage of each answer over the others to its prompt.

    Args:
        rewards: [prompts, answers], at least two answers to a prompt.
        scale: `group`, `batch` or `none`, see the table of this module.

    Returns:
        As `rewards`; 0 for a group of equal rewards.
    """
    centred = rewards - rewards.mean(1, keepdim=True)
    if scale == "none":
        return centred
    deviation = rewards.std(1, keepdim=True) if scale == "group" else rewards.std()
    return centred / (deviation + EPSILON)


@dataclasses.dataclass(frozen=True)
class PolicyLoss:
    """The loss of each token of answers.

    Attributes:
        eps_lower, eps_upper: the ratio is clipped to [1 - eps_lower, 1 + eps_upper].
        delta: also where A < 0 the ratio counts as at most so much ("two-sided clipping"); None: no limit.
        level: `token` or `sequence`.
        kl_beta: weight of k3.
        entropy_weight: weight c of the entropy.
    """

    eps_lower: float = 0.2
    eps_upper: float = 0.2
    delta: float | None = None
    level: str = "token"
    kl_beta: float = 0.0
    entropy_weight: float = 0.0

    def __call__(
        self,
        log_probs: torch.Tensor,
        old_log_probs: torch.Tensor,
        advantages: torch.Tensor,
        mask: torch.Tensor,
        *,
        mean: Callable[[torch.Tensor], torch.Tensor],
        weights: torch.Tensor | None = None,
        reference: torch.Tensor | None = None,
        entropy: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of each token.

        Args:
            log_probs: [b, s] of the policy, with their gradient; anything where `mask` is 0.
            old_log_probs: [b, s], the same when the answers were drawn.
            advantages: [b, s].
            mask: [b, s], 1 for tokens that were drawn.
            mean: [b, s] -> [b, 1]: the mean over the tokens of each answer, all ranks of cp together.
            weights: [b, s], w_t; None for 1.
            reference: [b, s], log-probabilities of the reference, for k3.
            entropy: [b, s], H_t.

        Returns:
            [b, s], 0 where the mask is; and figures, [b, s] each: `ratio`, `clipped`, `kl`, `entropy`.
        """
        log_ratio = (log_probs - old_log_probs).masked_fill(mask == 0, 0.0)
        if self.level == "sequence":
            log_ratio = mean(log_ratio).expand_as(log_ratio)
        ratio = log_ratio.exp()
        clipped = ratio.clamp(1 - self.eps_lower, 1 + self.eps_upper)
        bounded = ratio if self.delta is None else ratio.clamp(max=self.delta)
        gains = torch.minimum(bounded * advantages, clipped * advantages)
        loss = -gains if weights is None else -gains * weights
        cut = ((ratio < clipped) & (advantages < 0)) | ((ratio > clipped) & (advantages > 0))
        figures = {"ratio": ratio.detach(), "clipped": cut.to(ratio.dtype)}
        if reference is not None:
            k3 = kl_estimate(log_probs, reference, mask)
            loss = loss + self.kl_beta * k3
            figures["kl"] = k3.detach()
        if entropy is not None:
            loss = loss - self.entropy_weight * entropy
            figures["entropy"] = entropy.detach()
        return loss.masked_fill(mask == 0, 0.0), figures


def kl_estimate(log_probs: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """k3 of each token (Schulman 2020, "Approximating KL divergence"): [b, s], 0 where the mask is."""
    d = (reference - log_probs).masked_fill(mask == 0, 0.0)
    return d.exp() - d - 1


def importance_weights(
    log_ratio: torch.Tensor, mode: str, limit: float, total: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """w_t: how much likelier the trainer finds what the engine drew, limited.

    Args:
        log_ratio: [b, s], log pi_old - log pi_engine; 0 where the mask is.
        mode: `token_truncate`, `token_mask`, `sequence_truncate` or `sequence_mask` (TRL's names).
        limit: C.
        total: [b, s] -> [b, 1]: the sum over the tokens of each answer.

    Returns:
        [b, s] or [b, 1].
    """
    level, what = mode.split("_")
    q = (log_ratio if level == "token" else total(log_ratio)).exp()
    return q.clamp(max=limit) if what == "truncate" else q.masked_fill(q > limit, 0.0)


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, gamma: float = 1.0, lam: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation over the tokens of each answer, from the last to the first.

        delta_t = R_t + gamma V_{t+1} - V_t          A_t = delta_t + gamma lam A_{t+1}          return_t = A_t + V_t

    Args:
        rewards: [b, s], of each token.
        values: [b, s], V of the state in which the token was drawn.
        mask: [b, s], 1 for drawn tokens; between turns of one answer V and A pass over the tokens in between.
        gamma, lam: discounts.

    Returns:
        Advantages and returns, [b, s]; 0 where the mask is.
    """
    advantages = torch.zeros_like(values)
    later, next_value = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in range(values.shape[1] - 1, -1, -1):
        here = mask[:, t] > 0
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        advantages[:, t] = torch.where(here, delta + gamma * lam * later, 0.0)
        later = torch.where(here, advantages[:, t], later)
        next_value = torch.where(here, values[:, t], next_value)
    return advantages, (advantages + values).masked_fill(mask == 0, 0.0)


def value_loss(values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, clip: float) -> torch.Tensor:
    """The clipped loss of a value head, [b, s]: max((V - R)^2, (V_clipped - R)^2) / 2, V_clipped within `clip` of the
    old value."""
    near = torch.maximum(torch.minimum(values, old_values + clip), old_values - clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (near - returns) ** 2)
