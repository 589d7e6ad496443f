"""Lab 05: gradients of experts and of everything else, each summed over the ranks that hold a copy."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from labkit.checks import sends
from labkit.exercises import Answer, Case, Draw, Exercise

from .dispatch import ANY

Inputs = list[dict[str, Any]]


def _drive_finish(exercise: Any, dense: Any, expert: Any, tokens: int, ep: int, dp: Any, edp: Any) -> dict[str, Any]:
    # contiguous, as flat gradients are; it may sum them in place
    dense, expert = exercise.finish(dense.contiguous(), expert.contiguous(), tokens, dp, edp)
    return {"dense": dense, "expert": expert}


def _same_experts(ranks: Inputs) -> list[list[int]]:
    """The groups of edp."""
    ep = ranks[0]["ep"]
    return [list(range(first, len(ranks), ep)) for first in range(ep)]


def _finished(ranks: Inputs) -> list[dict[str, torch.Tensor]]:
    every, dense = sum(r["tokens"] for r in ranks), torch.stack([r["dense"] for r in ranks]).sum(0)
    expert: dict[int, torch.Tensor] = {}
    for edp in _same_experts(ranks):
        expert |= dict.fromkeys(edp, torch.stack([ranks[place]["expert"] for place in edp]).sum(0) / every)
    return [{"dense": dense / every, "expert": expert[r]} for r in range(len(ranks))]


def _gradients(draw: Draw, world: int = 4, ep: int = 2, n: int = 0, m: int = 0) -> Inputs:
    n, m = n or draw.integer(2, 6), m or draw.integer(2, 6)
    return [
        {"dense": draw.tensor(n), "expert": draw.tensor(m), "tokens": 5 + 3 * r + draw.integer(0, 2), "ep": ep}
        for r in range(world)
    ]


def _no_ep(draw: Draw) -> Inputs:
    """Draw inputs without expert parallelism, in which one of the ranks has no token that counts."""
    ranks = _gradients(draw, 2, 1)
    ranks[1]["tokens"] = 0
    for name in ("dense", "expert"):
        ranks[1][name] = torch.zeros_like(ranks[1][name])
    return ranks


_FOUR = [
    {"dense": torch.tensor([10.0 * r, 10.0]), "expert": torch.tensor([1.0 + r, 10.0]), "tokens": 1 + r, "ep": 2}
    for r in range(4)
]  # fmt: skip


def _sums(ranks: Inputs) -> int:
    """The bytes that are allowed: both gradients twice, as an all-reduce may consist of two halves, and 4 KiB for the
    number of tokens."""
    return 2 * int(ranks[0]["dense"].nbytes + ranks[0]["expert"].nbytes) + 4096


def _tokens_once(answer: Answer) -> str | None:
    """Check that the number of tokens is summed once. In this case gradients have thousands of numbers, so a small sum
    is that of the tokens."""
    times = max(sum(call.name == "all_reduce" and call.nbytes <= 64 for call in one.calls) for one in answer.evidence)
    return f"the number of tokens is summed {times} times: one sum is enough" if times > 1 else None


FINISH = Exercise(
    "finish",
    reference=_finished,
    drive=_drive_finish,
    axis={"dp": None, "edp": _same_experts},
    changes=("dense", "expert"),
    cases=[
        Case("4 ranks with 1, 2, 3, 4 tokens, ep 2", _FOUR, points=2),
        Case("3 ranks, ep 3: every expert lives once", partial(_gradients, world=3, ep=3), hidden=True),
        Case("2 ranks, ep 1; one has no token that counts", _no_ep, hidden=True),
        Case("no more travels than the sums need", partial(_gradients, n=4000, m=3000), hidden=True, accept=[
            sends(*ANY, at_most=("two sums, of dense and of expert,", _sums)), _tokens_once]),
    ],
    errors={
        words: "Here some ranks make a call and others do not. A rank without tokens takes part, too: a collective is "
        "a call that all ranks of the group make."
        for words in ("has returned", "no longer meet")
    },
    idea="Count tokens, not ranks: the loss is one sum over all tokens of the batch, divided once.",
    hint="N = tokens summed over dp. dense: sum over dp, divided by N. expert: sum over edp, divided by the same N.",
)  # fmt: skip
