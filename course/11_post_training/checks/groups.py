"""Lab 11, advantages: each answer beside the others to its prompt, however many of them have come back."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise

WAYS = ("group", "centred", "others")


def advantages(rewards: torch.Tensor, prompts: torch.Tensor, way: str) -> torch.Tensor:
    """One answer after the other."""
    found = []
    for reward, prompt in zip(rewards.tolist(), prompts.tolist(), strict=True):
        group = [r for r, p in zip(rewards.tolist(), prompts.tolist(), strict=True) if p == prompt]
        if len(group) == 1:
            found.append(0.0)
        elif way == "others":
            found.append(reward - (sum(group) - reward) / (len(group) - 1))
        else:
            deviation = statistics.stdev(group) + 1e-4 if way == "group" else 1.0
            found.append((reward - statistics.fmean(group)) / deviation)
    return torch.tensor(found, dtype=rewards.dtype)


def _case(rewards: list[float], prompts: list[int], way: str) -> dict[str, Any]:
    return {"rewards": torch.tensor(rewards), "prompts": torch.tensor(prompts), "way": way}


def _some(draw: Draw) -> dict[str, Any]:
    """In any order; rewards are quarters, so that a group of equal ones has a mean that is exact."""
    sizes = [1, *draw.sizes(draw.integer(2, 3), 2, 5)]
    prompts = [
        prompt for prompt, n in zip(draw.random.sample(range(50), len(sizes)), sizes, strict=True) for _ in range(n)
    ]
    draw.random.shuffle(prompts)
    rewards = [draw.choice([0.0, 0.0, 0.25, 0.5, 1.0, 2.0]) for _ in prompts]
    return _case(rewards, prompts, draw.choice(WAYS))


_REWARDS, _PROMPTS = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0], [7, 7, 7, 7, 3, 3, 5]
_MIXED = [0.5, 1.0, 0.0, 2.0, 1.0, 1.0, 0.0, 0.25, 1.0], [9, 4, 9, 9, 4, 6, 2, 2, 9]
ADVANTAGES = Exercise(
    "advantages",
    reference=advantages,
    cases=[
        Case("the example, divided by the group's deviation", _case([1.0, 0.0, 0.0, 0.0], [5, 5, 5, 5], "group")),
        Case("the example, the mean of the others", _case([1.0, 0.0, 0.0, 0.0], [5, 5, 5, 5], "others")),
        Case("three prompts, one of which has one answer left", _case(_REWARDS, _PROMPTS, "centred"), fixed=[
            _case(_REWARDS, _PROMPTS, "group")]),
        Case("other groups, in any order", _some, points=2, hidden=True, draws=6, fixed=[
            *(_case(*_MIXED, way) for way in WAYS),
            *(_case([1.0, 1.0, 1.0, 0.0, 1.0, 0.0], [2, 2, 2, 8, 8, 8], way) for way in WAYS),
            *(_case([0.5, 0.25], [1, 0], way) for way in WAYS)]),
    ],
    idea="What is an answer compared with, and what remains of that if nobody else has answered?",
    hint="For each prompt: its rewards; n < 2: 0. centred = rewards - mean. others: centred * n / (n - 1). group: "
    "centred / (std + 1e-4), the std with n - 1.",
)  # fmt: skip
