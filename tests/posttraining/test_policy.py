"""Formulas of policies and preferences, against closed forms and formulas written the plain way."""

from __future__ import annotations

import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F

from minimegatron.comm.mesh import Mesh
from minimegatron.layers.loss import vocab_parallel_entropy
from minimegatron.posttraining.grpo import Answers
from minimegatron.posttraining.policy import (
    PolicyLoss,
    gae,
    group_advantages,
    importance_weights,
    kl_estimate,
    value_loss,
)
from minimegatron.posttraining.preferences import LOSSES, preference_loss

SEEDS = st.integers(0, 1000)


def answers_of(generator: torch.Generator, b: int = 4, s: int = 7) -> tuple[torch.Tensor, Answers]:
    """A mask of ragged answers, one of them empty, and the `Answers` of it."""
    lengths = torch.randint(1, s + 1, (b, 1), generator=generator)
    lengths[0] = 0
    mask = (torch.arange(s) < lengths).double()
    return mask, Answers(mask, mask.sum(1, keepdim=True).expand(b, s), Mesh.serial())


@hypothesis.given(SEEDS)
def test_at_ratio_one_the_gradient_is_that_of_reinforce(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask, answers = answers_of(generator)
    log_probs = (-torch.rand(4, 7, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(4, 7, generator=generator, dtype=torch.float64)
    for level in ("token", "sequence"):
        policy = PolicyLoss(0.1, 0.3, level=level)
        each = advantages if level == "token" else advantages[:, :1].expand(4, 7)
        loss, figures = policy(log_probs, log_probs.detach(), each, mask, mean=answers.mean)
        assert torch.equal(figures["ratio"].masked_fill(mask == 0, 1.0), torch.ones_like(mask))
        (grad,) = torch.autograd.grad(loss.sum(), log_probs)
        assert torch.allclose(grad, -each * mask)  # GSPO: the same over an answer, as the mean of its tokens


@hypothesis.given(SEEDS)
def test_clipped_tokens_have_no_gradient_and_the_others_their_ratio(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask, answers = answers_of(generator)
    old = -torch.rand(4, 7, generator=generator, dtype=torch.float64)
    log_probs = (old + 0.6 * torch.randn(4, 7, generator=generator, dtype=torch.float64)).requires_grad_()
    advantages = torch.randn(4, 7, generator=generator, dtype=torch.float64)
    weights = torch.rand(4, 7, generator=generator, dtype=torch.float64)
    reference = old - 0.3
    policy = PolicyLoss(0.2, 0.28, delta=1.5, kl_beta=0.1)
    loss, figures = policy(log_probs, old, advantages, mask, mean=answers.mean, weights=weights, reference=reference)
    ratio = (log_probs - old).exp()
    for i in range(4):
        for j in range(7):
            r, a = ratio[i, j].item(), advantages[i, j].item()
            gain = min(min(r, 1.5) * a, max(0.8, min(r, 1.28)) * a)
            d = (reference - log_probs)[i, j].item()
            want = mask[i, j].item() * (-gain * weights[i, j].item() + 0.1 * (math.exp(d) - d - 1))
            assert loss[i, j].item() == pytest.approx(want, abs=1e-12)
    (grad,) = torch.autograd.grad((loss - 0.1 * kl_estimate(log_probs, reference, mask)).sum(), log_probs)
    flat = figures["clipped"].bool() | ((ratio > 1.5) & (advantages < 0)) | (mask == 0)
    assert torch.allclose(grad, torch.where(flat, 0.0, -(ratio * advantages * weights)), atol=1e-12)


def test_equal_rewards_teach_nothing_and_scales_differ() -> None:
    rewards = torch.tensor([[1.0, 1.0, 1.0], [0.0, 1.0, 2.0]], dtype=torch.float64)
    advantages = group_advantages(rewards)
    assert advantages[0].tolist() == [0.0, 0.0, 0.0]
    assert torch.allclose(advantages[1], torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64) / 1.0001)  # ddof 1
    assert group_advantages(rewards, "none")[1].tolist() == [-1.0, 0.0, 1.0]
    assert torch.allclose(group_advantages(rewards, "batch")[1, 2], 1.0 / (rewards.std() + 1e-4))


@hypothesis.given(SEEDS)
def test_sums_and_counts_of_each_loss_type(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask, answers = answers_of(generator)
    loss = torch.randn(4, 7, generator=generator, dtype=torch.float64) * mask
    means = {kind: torch.div(*answers.aggregate(loss, kind, 10)).item() for kind in ("grpo", "dapo", "dr_grpo", "bnpo")}
    lengths = mask.sum(1)
    assert means["grpo"] == pytest.approx((loss.sum(1) / lengths.clamp(min=1)).mean().item())
    assert means["dapo"] == means["bnpo"] == pytest.approx((loss.sum() / lengths.sum()).item())
    assert means["dr_grpo"] == pytest.approx(loss.sum().item() / 40)


def test_importance_weights_by_token_and_by_answer() -> None:
    q = torch.tensor([[0.5, 3.0, 1.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    total = lambda x: x.sum(1, keepdim=True)  # noqa: E731
    modes = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
    of = {mode: importance_weights(q.log(), mode, 1.25, total) for mode in modes}
    assert of["token_truncate"].tolist() == [[0.5, 1.25, 1.0], [1.0, 1.0, 1.0]]
    assert of["token_mask"].tolist() == [[0.5, 0.0, 1.0], [1.0, 1.0, 1.0]]
    assert of["sequence_truncate"].tolist() == [[1.25], [1.0]] and of["sequence_mask"].tolist() == [[0.0], [1.0]]


@hypothesis.given(SEEDS, st.floats(0.5, 1.0), st.floats(0.0, 1.0))
def test_gae_is_the_sum_of_discounted_surprises(seed: int, gamma: float, lam: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards, values = torch.randn(2, 2, 6, generator=generator, dtype=torch.float64).unbind(0)
    mask = torch.tensor([[0, 1, 1, 1, 1, 0], [1, 1, 0, 0, 1, 1]], dtype=torch.float64)  # the second has two turns
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    for row in range(2):
        places = mask[row].nonzero()[:, 0].tolist()
        r, v = rewards[row, places].tolist(), [*values[row, places].tolist(), 0.0]
        deltas = [r[t] + gamma * v[t + 1] - v[t] for t in range(len(places))]
        for t, place in enumerate(places):
            want = sum((gamma * lam) ** k * delta for k, delta in enumerate(deltas[t:]))
            assert advantages[row, place].item() == pytest.approx(want, abs=1e-12)
            assert returns[row, place].item() == pytest.approx(want + v[t], abs=1e-12)
    assert not advantages[mask == 0].any() and not returns[mask == 0].any()


def test_the_value_loss_takes_the_worse_of_two() -> None:
    values, returns = torch.tensor([[1.0, 1.0, 0.1]]), torch.tensor([[1.0, 2.0, 0.0]])
    found = value_loss(values, torch.zeros(1, 3), returns, 0.2)  # V is 1, 1, 0.1, and clipped 0.2, 0.2, 0.1
    assert torch.allclose(found, torch.tensor([[0.32, 1.62, 0.005]]))


@hypothesis.given(SEEDS)
def test_entropy_and_its_gradient(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = (3 * torch.randn(5, 11, generator=generator, dtype=torch.float64)).requires_grad_()
    entropy = vocab_parallel_entropy(logits, Mesh.serial().tp, vocab_size=9)
    log_p = F.log_softmax(logits[:, :9], -1)
    want = -(log_p.exp() * log_p).sum(-1)
    assert torch.allclose(entropy, want)
    weights = torch.rand(5, generator=generator, dtype=torch.float64)
    grads = [torch.autograd.grad((x * weights).sum(), logits, retain_graph=True)[0] for x in (entropy, want)]
    assert torch.allclose(*grads)


def test_preferences_begin_at_log_2_with_half_beta() -> None:
    ratios = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    lengths = torch.tensor([[2.0, 4.0]] * 3, dtype=torch.float64)
    loss = preference_loss(ratios, lengths, "sigmoid", 0.3)
    assert torch.allclose(loss, torch.full((3,), math.log(2), dtype=torch.float64))
    (grad,) = torch.autograd.grad(loss.sum(), ratios)
    assert torch.allclose(grad, torch.tensor([[-0.15, 0.15]] * 3, dtype=torch.float64))
    values = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    of = {kind: preference_loss(values, lengths[:1], kind, 0.5, 0.1).item() for kind in LOSSES}
    assert of["hinge"] == 0.0 and of["ipo_sum"] == pytest.approx(1.0) and of["ipo"] == pytest.approx((0.75 - 1) ** 2)
    assert of["sigmoid"] == pytest.approx(0.9 * math.log1p(math.exp(-1)) + 0.1 * math.log1p(math.e))
