"""A small training run, every part of whose state must be saved for it to continue unchanged.

| part        | changes with each step                                                              |
|-------------|-------------------------------------------------------------------------------------|
| `model`     | its weights; dropout takes numbers from torch's global generator                    |
| `optimizer` | two moments and a count for each weight                                             |
| `scheduler` | its count of steps; every third step halves the rate, if `decays`                   |
| `data`      | `position` in `order`, the rows of this epoch; `generator` draws the next epoch's   |
"""

from __future__ import annotations

import torch
from torch import nn


class Batches:
    """Rows of a table, in another order each epoch.

    Attributes:
        order: the rows of this epoch, a tensor.
        position: number of rows taken.
        generator: draws the order of the next epoch.
    """

    def __init__(self, rows: int, batch: int, seed: int) -> None:
        self.table = torch.randn(rows, 4, generator=torch.Generator().manual_seed(7))
        self.batch = batch
        self.generator = torch.Generator().manual_seed(seed)
        self.order, self.position = torch.randperm(rows, generator=self.generator), 0

    def next(self) -> torch.Tensor:
        """A batch."""
        if self.position >= len(self.order):
            self.order, self.position = torch.randperm(len(self.order), generator=self.generator), 0
        rows = self.order[self.position : self.position + self.batch]
        self.position += self.batch
        return self.table[rows]


class Run:
    """A model with dropout, AdamW, a decaying rate, batches in random order.

    Args:
        seed: seed of weights, dropout and order; two runs of different seeds share nothing but the table.
        dropout: its probability.
        decays: whether the rate decays.
        rows, batch: rows of the table, and of a batch.
    """

    def __init__(self, seed: int, dropout: float = 0.5, decays: bool = True, rows: int = 6, batch: int = 2) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.5 if decays else 1.0)
        self.data = Batches(rows, batch, seed + 1000)

    def train(self, steps: int) -> list[float]:
        """The loss of each step."""
        losses = []
        for _ in range(steps):
            x = self.data.next()
            loss = (self.model(x) - x.sum(1, keepdim=True)).square().mean()
            self.optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def weights(self) -> torch.Tensor:
        """All of them, flat."""
        return torch.cat([p.detach().flatten() for p in self.model.parameters()])
