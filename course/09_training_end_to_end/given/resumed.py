"""Two logs of a small run: one that was never stopped, and one that was resumed and may have forgotten something.

The run is a real one: a model with dropout, AdamW, a rate that rises, stays and falls, samples by their numbers, fp16's
loss scale as a number that moves. A log has one entry a step from the resume on::

    first       number of the first sample of the step
    rate        the learning rate
    scale       the loss scale
    loss        of the step, with dropout
    norm        of the gradient, before clipping

and `check`, the loss of fixed samples before the first of these steps, without dropout.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

PARTS = ("weights", "moments", "schedule", "position", "streams", "scale")
BATCH = 4


class Run:
    """The run; two with different seeds have nothing in common."""

    def __init__(self, seed: int, dropout: float) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.step, self.position, self.scale, self.good = 0, 0, 2.0**10, 0

    def loss(self, first: int) -> torch.Tensor:
        x = torch.randn(BATCH, 3, generator=torch.Generator().manual_seed(first))
        return (self.model(x) - x.sin().sum(1, keepdim=True)).square().mean()

    def check(self) -> float:
        self.model.eval()
        with torch.no_grad():
            value = self.loss(10**6).item()
        self.model.train()
        return value

    def train(self, steps: int) -> dict[str, list[float]]:
        log: dict[str, list[float]] = {name: [] for name in ("first", "rate", "scale", "loss", "norm")}
        for _ in range(steps):
            rate = 0.05 * min(1.0, (self.step + 1) / 6) * (1.0 if self.step < 12 else 0.9 ** (self.step - 11))
            self.optimizer.param_groups[0]["lr"] = rate
            loss = self.loss(self.position)
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None]).norm()
            self.optimizer.step()
            entry = {
                "first": self.position,
                "rate": rate,
                "scale": self.scale,
                "loss": loss.item(),
                "norm": norm.item(),
            }
            for name, value in entry.items():
                log[name].append(value)
            self.step, self.position = self.step + 1, self.position + BATCH
            self.good += 1
            self.scale *= 2.0 if self.good % 5 == 0 else 1.0
        return log


def logs(seed: int, forgets: str, at: int = 8, steps: int = 6, dropout: float = 0.3) -> dict[str, Any]:
    """{"straight": log, "resumed": log}; `forgets` is one of `PARTS`, or "" for a sound resume."""
    state = torch.get_rng_state()
    try:
        run = Run(seed, dropout)
        run.train(at)
        kept, streams = copy.deepcopy(run), torch.get_rng_state()
        straight = {"check": run.check(), **run.train(steps)}
        fresh = Run(seed + 1, dropout)
        if forgets != "weights":
            fresh.model.load_state_dict(kept.model.state_dict())
        if forgets != "moments":
            fresh.optimizer.load_state_dict(copy.deepcopy(kept.optimizer.state_dict()))
        fresh.step = 0 if forgets == "schedule" else kept.step
        fresh.position = 0 if forgets == "position" else kept.position
        fresh.scale, fresh.good = (2.0**10, 0) if forgets == "scale" else (kept.scale, kept.good)
        if forgets != "streams":
            torch.set_rng_state(streams)
        return {"straight": straight, "resumed": {"check": fresh.check(), **fresh.train(steps)}}
    finally:
        torch.set_rng_state(state)
