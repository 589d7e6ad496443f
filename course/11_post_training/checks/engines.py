"""Lab 11, two programs that compute the same numbers: weights for their difference, and pages of older weights."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from labkit.exercises import Case, Draw, Exercise

Tensor = torch.Tensor

# ------------------------------------------------------------------------------------------------ importance weights


def _drive(exercise: Any, trainer: Any, engine: Any, mask: Any, level: str, what: str, limit: float) -> Any:
    trainer.requires_grad_()
    weights = exercise.importance(trainer, engine, mask, level, what, limit)
    return {"weights": weights.detach(), "has a gradient": bool(weights.requires_grad)}


def importance(trainer: Tensor, engine: Tensor, mask: Tensor, level: str, what: str, limit: float) -> dict[str, Any]:
    weights = torch.zeros_like(trainer)
    for row in range(len(trainer)):
        drawn = [t for t in range(trainer.shape[1]) if mask[row, t] > 0]
        moved = {t: float(trainer[row, t] - engine[row, t]) for t in drawn}
        if level == "sequence":
            moved = dict.fromkeys(drawn, math.fsum(moved.values()))
        for t in drawn:
            large = moved[t] > math.log(limit)
            weights[row, t] = (limit if what == "truncate" else 0.0) if large else math.exp(moved[t])
    return {"weights": weights, "has a gradient": False}


def _weighed(level: str, what: str) -> dict[str, Any]:
    halves = math.log(0.5)
    return {
        "trainer": torch.tensor([[0.0, 2 * halves, halves], [0.0, halves, halves]]),
        "engine": torch.tensor([[-5.0, halves, 3 * halves], [9.0, 2 * halves, 3 * halves]]),
        "mask": torch.tensor([[0.0, 1.0, 1.0], [0.0, 1.0, 1.0]]), "level": level, "what": what, "limit": 3.0,
    }  # fmt: skip


def _gaps(draw: Draw, level: str = "", what: str = "", far: float = 0.6) -> dict[str, Any]:
    b, s = draw.integer(2, 4), draw.integer(4, 7)
    mask = torch.zeros(b, s)
    for row in range(b):
        first = draw.integer(0, 2)
        mask[row, first : first + draw.integer(1, s - first)] = 1
    trainer = -draw.tensor(b, s).abs() - 0.1
    engine = trainer - far * draw.tensor(b, s)
    return {
        "trainer": trainer, "engine": torch.where(mask > 0, engine, -math.inf), "mask": mask,
        "level": level or draw.choice(["token", "sequence"]), "what": what or draw.choice(["truncate", "mask"]),
        "limit": draw.choice([1.3, 2.0]),
    }  # fmt: skip


_ALL = [(level, what) for level in ("token", "sequence") for what in ("truncate", "mask")]
IMPORTANCE = Exercise(
    "importance",
    reference=importance,
    drive=_drive,
    cases=[
        Case("the example, token by token, truncated", _weighed("token", "truncate")),
        Case("the example, answer by answer, masked", _weighed("sequence", "mask")),
        Case("other answers", _gaps, points=2, hidden=True, draws=4, fixed=[
            *(partial(_gaps, level=level, what=what, far=far) for level, what in _ALL for far in (0.6, 70.0))]),
    ],
    idea="A ratio may be too large for a float, and what nobody drew may have no number at all. What becomes of these?",
    hint="moved = (trainer - engine).detach().masked_fill(mask == 0, 0); for sequence its sum over the row. q = "
    "moved.exp(); truncate: clamp(max=limit); mask: where(q > limit, 0, q). At the end 0 where the mask is.",
)  # fmt: skip

# --------------------------------------------------------------------------------------------- keys of older weights


def old_tokens(rollouts: list[list[list[int]]], size: int) -> list[list[int]]:
    """By comparing each prompt with every earlier one: pages that both begin with, whole ones."""
    found = []
    for now, prompts in enumerate(rollouts):
        earlier = [prompt for before in rollouts[:now] for prompt in before]
        found.append([max((_shared(prompt, other, size) for other in earlier), default=0) for prompt in prompts])
    return found


def _shared(prompt: list[int], other: list[int], size: int) -> int:
    alike = next(
        (i for i, (a, b) in enumerate(zip(prompt, other, strict=False)) if a != b), min(len(prompt), len(other))
    )
    return min(alike, len(prompt) - 1) // size * size


def _prompts(draw: Draw) -> dict[str, Any]:
    """Few different tokens, so that many prompts begin alike."""
    size = draw.integer(2, 3)
    rollouts = [
        [[draw.integer(0, 1) for _ in range(draw.integer(1, 4 * size))] for _ in range(draw.integer(2, 4))]
        for _ in range(draw.integer(3, 4))
    ]
    return {"rollouts": rollouts, "size": size}


_EXAMPLE: dict[str, Any] = {"rollouts": [[[1, 2, 3, 4, 5], [6, 7, 8]], [[1, 2, 3, 9], [7, 7, 7]]], "size": 2}
OLD = Exercise(
    "old_tokens",
    reference=old_tokens,
    cases=[
        Case("two rollouts of two prompts, pages of 2", _EXAMPLE),
        Case("the same prompts three times", {"rollouts": [[[1, 2, 3, 4], [1, 2, 3, 4, 5]]] * 3, "size": 2}),
        Case("other rollouts", _prompts, points=2, hidden=True, draws=6, fixed=[
            {"rollouts": [[[1, 2, 3]], [[4, 5, 6]], [[1, 2, 9]]], "size": 2},  # two rollouts ago
            {"rollouts": [[[1, 2, 3, 4, 5, 6, 7]], [[9, 9, 3, 4, 5]]], "size": 2},  # equal in the middle
            {"rollouts": [[[5, 6, 1]], [[1, 2, 3], [1, 2, 3]]], "size": 2},  # equal in one rollout
            {"rollouts": [[[1, 2, 3, 4]], [[1, 2, 3, 4, 5], [1, 2]]], "size": 2},
            {"rollouts": [[[1, 2, 3, 4], [1, 2, 5, 6]], [[1, 2, 5, 6, 7]]], "size": 2},
            {"rollouts": [[[1, 2, 3]], [[1, 2, 3, 4, 5]], [[1, 2, 3, 4, 5]]], "size": 2},
            {"rollouts": [[[1], [2]], [[1], [2]]], "size": 1},
            {"rollouts": [[], [[1, 2, 3]]], "size": 2}]),
    ],
    idea="Look at the answers that are right: what do the other prompts have that theirs lack? What is kept?",
    hint="Keep a set of all beginnings of whole pages, tuple(prompt[:end]). For each prompt: as long as the next page "
    "ends before its last token and its beginning is kept, count the page. Add a rollout's beginnings behind it.",
)  # fmt: skip
