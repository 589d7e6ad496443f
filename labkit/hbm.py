"""A memory that counts: large tensors of which a simulated kernel loads and stores tiles.

The problem in a sentence: flash attention is fast because of what it does *not* move, and torch does not count that.

The tensors of one attention are in a `Memory`. Code that stands for a kernel loads rows, computes on these tiles, and
stores rows. The `Memory` counts the numbers that are loaded and stored.

In a check these tensors are in the judge's process (`labkit/beside.py`), and `JudgedMemory` asks it for rows. The
learner's process has no other access to them, so the counts are true.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from labkit import channel
from labkit.broker import Letter
from minimegatron.errors import ConfigError

_MAX_MOVES = 100_000  # that are kept in order


class Memory:
    """Tensors by name, cut along dim 0.

    Attributes:
        tensors: {name: tensor}.
        loaded, stored: {name: numbers moved so far}.
    """

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.tensors = tensors
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


class JudgedMemory:
    """In a check, a `Memory` whose tensors are in the judge's process.

    An exercise names them, `Exercise(memory=("q", "k"))`, its drive gives this object to the learner's function,
    and `evidence.memory` has the tables `loaded` and `stored`, `order`: [load or store, name, start,
    stop] of each move, and `tensors`: the contents of the memory at the end.

    Attributes:
        loaded, stored: {name: numbers moved so far}, as far as this process knows.
        shapes: {name: shape}.
    """

    def __init__(self) -> None:
        self._line = channel.mine()
        head, _ = self._line.ask({"to": "memory", "do": "shapes"})
        self.shapes: dict[str, list[int]] = head["shapes"]
        self.loaded, self.stored = dict.fromkeys(self.shapes, 0), dict.fromkeys(self.shapes, 0)

    @property
    def moved(self) -> int:
        """All numbers, loaded and stored."""
        return sum(self.loaded.values()) + sum(self.stored.values())

    def load(self, name: str, start: int, stop: int) -> torch.Tensor:
        """As `Memory.load`."""
        _, (tile,) = self._ask("load", name, start, stop)
        self.loaded[name] += tile.numel()
        return tile.clone()  # made by an operation, which is seen

    def store(self, name: str, start: int, stop: int, value: torch.Tensor) -> None:
        """As `Memory.store`."""
        self._ask("store", name, start, stop, value)
        self.stored[name] += value.numel()

    def _ask(self, do: str, name: str, start: int, stop: int, *tensors: torch.Tensor) -> channel.Message:
        try:
            head = {"to": "memory", "do": do, "name": name, "start": int(start), "stop": int(stop)}
            with torch._C._DisableTorchDispatch():  # what packs a message is no operation of the learner's
                return self._line.ask(head, tensors)
        except RuntimeError as error:
            raise ConfigError(str(error), fix="see the text of the exercise") from None


class MemoryService:
    """The judge's end of `JudgedMemory`: a `broker.Service`.

    Args:
        trials: the tensors of each trial.
    """

    def __init__(self, trials: Sequence[Mapping[str, torch.Tensor]]) -> None:
        self._memories = [Memory(**tensors) for tensors in trials]
        self._orders: list[list[list[Any]]] = [[] for _ in trials]
        self._trial = -1

    def handle(self, rank: int, header: dict[str, Any], tensors: list[torch.Tensor]) -> Iterable[Letter]:
        """`{"do": "trial"}` goes on to the next trial; `shapes`, `load` and `store` belong to the current one.

        Raises:
            ConfigError: as `Memory`.
        """
        do, answer = header["do"], {"id": header["id"]}
        if do == "trial":
            self._trial += 1
            return [(rank, answer, ())]
        if not 0 <= self._trial < len(self._memories):
            raise ConfigError("there is no memory now")
        memory, order = self._memories[self._trial], self._orders[self._trial]
        if do == "shapes":
            return [(rank, {**answer, "shapes": {name: list(t.shape) for name, t in memory.tensors.items()}}, ())]
        name, start, stop = str(header["name"]), int(header["start"]), int(header["stop"])
        if do not in ("load", "store") or len(order) >= _MAX_MOVES:
            raise ConfigError(f"a memory loads and stores, at most {_MAX_MOVES} times")
        tiles = [memory.load(name, start, stop)] if do == "load" else []
        if do == "store":
            [value] = tensors
            memory.store(name, start, stop, value)
        order.append([do, name, start, stop])
        return [(rank, answer, tiles)]

    def gone(self, rank: int) -> Iterable[Letter]:
        return []

    def idle(self) -> Iterable[Letter]:
        return []

    def evidence(self) -> list[dict[str, Any]]:
        """What was moved in each trial."""
        return [
            {"loaded": memory.loaded, "stored": memory.stored, "order": order, "tensors": dict(memory.tensors)}
            for memory, order in zip(self._memories, self._orders, strict=True)
        ]
