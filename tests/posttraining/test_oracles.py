"""Losses and gradients are those of TRL, verl and OpenRLHF (`tests/golden/posttraining_oracles.py`).

Differences on purpose: verl and OpenRLHF leave answers without a token out of a mean over answers, TRL counts them, as
we do. verl whitens advantages inside its GAE. OpenRLHF's IPO is the paper's formula, TRL divides by lengths: both are
here under a name of their own.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minimegatron.comm.axis import ALONE
from minimegatron.comm.mesh import Mesh
from minimegatron.layers.loss import vocab_parallel_cross_entropy
from minimegatron.posttraining.distill import divergence
from minimegatron.posttraining.grpo import Answers
from minimegatron.posttraining.policy import PolicyLoss, gae, importance_weights, value_loss
from minimegatron.posttraining.ppo import whitened
from minimegatron.posttraining.preferences import preference_loss
from minimegatron.posttraining.reward import pair_losses
from minimegatron.training.step import loss_func

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/posttraining.json").read_text())


@functools.cache
def given() -> dict[str, torch.Tensor]:
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in GOLDEN["inputs"].items()}


def same(loss: torch.Tensor, of: torch.Tensor, want: dict[str, Any]) -> None:
    (gradient,) = torch.autograd.grad(loss, of)
    assert loss.item() == pytest.approx(want["loss"], rel=1e-9)
    assert torch.allclose(gradient, torch.tensor(want["gradient"], dtype=torch.float64), rtol=1e-9, atol=1e-12)


def answers() -> Answers:
    mask = given()["mask"]
    return Answers(mask, mask.sum(1, keepdim=True).expand_as(mask), Mesh.serial())


@pytest.mark.parametrize("name", GOLDEN["trl grpo"])
def test_trls_grpo(name: str) -> None:
    kind, level = name.split()
    x, of = given(), answers()
    now = x["log_probs"].clone().requires_grad_()
    gap = ((x["old"] - x["engine"]) * x["mask"]).detach()
    policy = PolicyLoss(0.2, 0.28, 1.5, level, kl_beta=0.04)
    loss, _ = policy(
        now, x["old"], x["advantages"], x["mask"], mean=of.mean,
        weights=importance_weights(gap, "token_truncate", 1.1, of.total), reference=x["reference"],
    )  # fmt: skip
    summed, count = of.aggregate(loss, kind, 10)
    same(summed / count, now, GOLDEN["trl grpo"][name])


@pytest.mark.parametrize("name", [*GOLDEN["trl pairs"], "openrlhf sigmoid", "openrlhf ipo_sum"])
def test_losses_of_pairs(name: str) -> None:
    x, theirs = given(), name.startswith("openrlhf")
    kind = name.split()[-1]
    want = GOLDEN["openrlhf"][f"dpo {kind}"] if theirs else GOLDEN["trl pairs"][kind]
    ratios = x["ratios"].clone().requires_grad_()
    smoothing = 0.1 if name == "openrlhf sigmoid" else 0.0
    same(preference_loss(ratios, x["answer_lengths"], kind, 0.3, smoothing).mean(), ratios, want)


def student_logits() -> tuple[torch.Tensor, torch.Tensor]:
    """The student's logits [n, V], and the matrix of its output layer that they are linear in."""
    matrix = given()["student_output"].clone().requires_grad_()
    return given()["student_hidden"].flatten(0, 1) @ matrix.t(), matrix


def distillation_loss(logits: torch.Tensor, beta: float, temperature: float) -> torch.Tensor:
    x, mask = given(), given()["mask"].flatten()
    teacher = x["teacher_hidden"].flatten(0, 1) @ x["teacher_output"].t()
    rows = lambda first, stop: teacher[first:stop]  # noqa: E731
    loss, *_ = divergence(logits, x["labels"].long().flatten(), rows, ALONE, vocab_size=logits.shape[1],
                          beta=beta, temperature=temperature, chunk=4)  # fmt: skip
    return (loss * mask).sum() / mask.sum()


@pytest.mark.parametrize("name", GOLDEN["trl gkd"])
def test_trls_generalised_divergence(name: str) -> None:
    logits = student_logits()[0].detach().requires_grad_()
    beta, temperature = map(float, name.split())
    want = GOLDEN["trl gkd"][name]
    same(distillation_loss(logits * 1.0, beta, temperature), logits, want | {"gradient": flat(want["gradient"])})


def flat(rows: list[Any]) -> list[Any]:
    """[b, s, V] -> [b s, V]."""
    return [row for answer in rows for row in answer]


@pytest.mark.parametrize("name", GOLDEN["trl from hidden"])
def test_trls_losses_from_hidden_states(name: str) -> None:
    logits, matrix = student_logits()
    if name == "sft":
        x = given()
        losses = vocab_parallel_cross_entropy(logits, x["labels"].long().flatten(), ALONE, vocab_size=logits.shape[1])
        total, count, _ = loss_func(x["mask"].flatten(), losses)
        loss = total / count
    else:
        loss = distillation_loss(logits, float(name.split()[1]), 2.0)
    same(loss, matrix, GOLDEN["trl from hidden"][name])


@pytest.mark.parametrize(("center", "want"), [(0.0, GOLDEN["openrlhf"]["reward"]), (0.2, GOLDEN["trl reward"])])
def test_reward_models(center: float, want: dict[str, Any]) -> None:
    scores = given()["ratios"].clone().requires_grad_()
    same(pair_losses(scores, center).mean(), scores, want)


@pytest.mark.parametrize(("name", "kind", "level"), [("ppo token", "dapo", "token"), ("ppo sample", "grpo", "token"),
                                                     ("gspo sample", "grpo", "sequence")])  # fmt: skip
def test_openrlhfs_policy_loss(name: str, kind: str, level: str) -> None:
    x, of = given(), answers()
    now = x["log_probs"].clone().requires_grad_()
    loss, _ = PolicyLoss(0.2, 0.28, level=level)(now, x["old"], x["advantages"], x["mask"], mean=of.mean)
    summed, count = of.aggregate(loss, kind, 10)
    if kind == "grpo":  # theirs is a mean over the four answers that have a token, and ours over five
        count = count - 1
    (gradient,) = torch.autograd.grad(summed / count, now)
    want = GOLDEN["openrlhf"][name]
    assert (summed / count).item() == pytest.approx(want["loss"], rel=1e-7)  # they add 1e-8 to a length
    assert torch.allclose(gradient, torch.tensor(want["gradient"], dtype=torch.float64), atol=1e-8)


def test_verls_gae() -> None:
    x, want = given(), {name: torch.tensor(v, dtype=torch.float64) for name, v in GOLDEN["verl"]["gae"].items()}
    advantages, returns = gae(x["rewards"], x["values"], want["mask"], 0.97, 0.9)
    mask = want["mask"] > 0
    assert torch.allclose(returns[mask], want["returns"][mask], atol=1e-9)
    assert torch.allclose(whitened(advantages, want["mask"])[mask], want["advantages"][mask], atol=1e-7)


@pytest.mark.parametrize("who", ["verl", "openrlhf"])
def test_the_value_loss_of_both(who: str) -> None:
    x = given()
    values = x["values"].clone().requires_grad_()
    loss = value_loss(values, x["old_values"], x["returns"], 0.2)
    same((loss * x["mask"]).sum() / x["mask"].sum(), values, GOLDEN[who]["value"])
