"""State that the process groups of one process share: the line to the judge's broker, and the moments of a trial.

Each message has the number of torch's operations that this rank has done (`watch`), so that the broker can tell what
was computed between two of them. `begin` opens a trial, `mark` gives a moment a place in the broker's order, `late`
fetches a number of the inputs that leaves the judge only then, `finish` says that this rank has returned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d

from labkit.channel import Line
from labkit.transport_store import BrokerStore

Tensor = torch.Tensor


class Link:
    """What the groups of this process share."""

    line: Line | None = None
    store: BrokerStore | None = None  # torch's C++ side keeps no Python object alive
    position: Callable[[], int] = staticmethod(lambda: 0)  # how many operations of torch this rank has done
    trial = 0
    spoiled: Sequence[Tensor] = ()  # overwritten when the first wait begins

    @classmethod
    def tell(cls, do: str, tensors: Sequence[Tensor] = (), **facts: Any) -> int:
        assert cls.line is not None
        return cls.line.tell({"to": "transport", "do": do, "at": cls.position(), **facts}, tensors)

    @classmethod
    def ask(cls, do: str, **facts: Any) -> tuple[dict[str, Any], list[Tensor]]:
        assert cls.line is not None
        threads = len(sys._current_frames())  # one that does not wait could still send
        return cls.line.ask({"to": "transport", "do": do, "at": cls.position(), "threads": threads, **facts})


def watch(position: Callable[[], int]) -> None:
    """Send with each message the number of torch's operations that this rank has done."""
    Link.position = staticmethod(position)


def begin(trial: int, spoiled: Sequence[Tensor]) -> None:
    """Begin a trial. At its first wait these tensors are overwritten with NaN: work that needs them must come
    before."""
    Link.trial, Link.spoiled = trial, [tensor for tensor in spoiled if tensor.is_floating_point()]


def mark(name: str) -> None:
    """Give a moment of this rank a place in the broker's order; without a broker nothing happens."""
    if Link.line is not None:
        Link.tell("mark", name=name)


def late(index: int) -> float:
    """The number `index` of the input that the exercise calls `late`, which only now leaves the judge.

    Work that needs it comes after this moment, and what the broker has seen before came before it. A mark says the same
    of a program that tells the truth. In the evidence it is the mark `late 3`.
    """
    return float(Link.ask("late", trial=Link.trial, index=index)[0]["number"])


def finish(took_part: bool = True) -> None:
    """Tell the broker that this rank has returned and sends nothing more, and how many groups it has made."""
    if Link.line is not None:
        Link.tell("done", took_part=took_part, groups=distributed_c10d._world.group_count)
