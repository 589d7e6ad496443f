"""A memory that counts: large tensors of which a simulated kernel loads and stores tiles.

The problem in a sentence: flash attention is fast because of what it does *not* move, and torch does not count that.

The tensors of one attention are in a `Memory`. Code that stands for a kernel loads rows, computes on these tiles, and
stores rows. The `Memory` counts the numbers that are loaded and stored.
"""

from __future__ import annotations

from typing import Any

import torch

from minimegatron.errors import ConfigError


class Memory:
    """Tensors by name, cut along dim 0.

    Attributes:
        tensors: {name: tensor}.
        loaded, stored: {name: numbers moved so far}.
        order: (load or store, name, start, stop) of each move.
    """

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors
        self.loaded, self.stored = dict.fromkeys(tensors, 0), dict.fromkeys(tensors, 0)
        self.order: list[tuple[str, str, int, int]] = []

    @property
    def moved(self) -> int:
        """All numbers, loaded and stored."""
        return sum(self.loaded.values()) + sum(self.stored.values())

    def load(self, name: str, start: int, stop: int) -> torch.Tensor:
        """A copy of rows start to stop - 1.

        Raises:
            ConfigError: there is no such tensor, or no such rows.
        """
        tile = self._rows(name, start, stop).clone()
        self.loaded[name] += tile.numel()
        self.order.append(("load", name, start, stop))
        return tile

    def store(self, name: str, start: int, stop: int, value: torch.Tensor) -> None:
        """Write rows start to stop - 1.

        Raises:
            ConfigError: as `load`, or a value of another shape.
        """
        rows = self._rows(name, start, stop)
        if value.shape != rows.shape:
            raise ConfigError(
                f"{name}[{start}:{stop}] has the shape {list(rows.shape)}, the value {list(value.shape)}",
                fix="store a value of the shape of these rows",
            )
        rows.copy_(value)
        self.stored[name] += rows.numel()
        self.order.append(("store", name, start, stop))

    def _rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name not in self.tensors:
            raise ConfigError(f"there is no tensor {name!r} in this memory", fix=f"it has {', '.join(self.tensors)}")
        if not 0 <= start < stop <= self.tensors[name].shape[0]:
            there, what = self.tensors[name].shape[0], "numbers" if self.tensors[name].dim() == 1 else "rows"
            if start == stop:
                asked = f"an empty read of {name}: {start} to {stop}"
            else:
                asked = f"{name} has {there} {what}; asked for are {start} to {stop}, the last not included"
            raise ConfigError(asked, fix=f"0 <= first < last <= {there}")
        return self.tensors[name][start:stop]

    def evidence(self) -> dict[str, Any]:
        """What was moved, and what the memory holds now, as plain data for a check (`labkit.tools.note`)."""
        return {"loaded": self.loaded, "stored": self.stored, "order": self.order, "tensors": self.tensors}
