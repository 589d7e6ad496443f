"""A memory that counts: large tensors behind a counter, of which a kernel holds only tiles.

The problem in a sentence: what makes flash attention fast is what it does *not* move, and torch does not count that.

So the tensors of one attention live in a `Memory`. Code that stands for a kernel loads rows, computes on these tiles,
and stores rows; what it loads and stores is counted, in numbers (times the size of one: bytes).
"""

from __future__ import annotations

import torch

from minimegatron.errors import ConfigError


class Memory:
    """Tensors by name, cut along dim 0.

    Attributes:
        loaded, stored: {name: numbers moved so far}.
    """

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._tensors = tensors
        self.loaded, self.stored = dict.fromkeys(tensors, 0), dict.fromkeys(tensors, 0)

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

    def _rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name not in self._tensors:
            raise ConfigError(f"there is no tensor {name!r} in this memory", fix=f"it has {', '.join(self._tensors)}")
        if not 0 <= start < stop <= self._tensors[name].shape[0]:
            rows = self._tensors[name].shape[0]
            raise ConfigError(f"{name} has {rows} rows, not {start} to {stop - 1}", fix=f"0 <= start < stop <= {rows}")
        return self._tensors[name][start:stop]
