"""What a recording of a stage consists of: operations and messages, each in a window and a phase.

A *window* is the time in which one module is the innermost that runs. In the backward pass an event belongs to the
window of the forward pass in which its autograd node was made.

| phase      | what runs                                                        |
|------------|------------------------------------------------------------------|
| `FORWARD`  | the forward pass                                                 |
| `BACKWARD` | the backward pass                                                |
| `AGAIN`    | a module's forward pass during the backward pass (recompute)     |
| `WEIGHTS`  | the wgrad that a split schedule defers                           |

`recorder` records it of modules that run; the planner gives its operations and messages their seconds.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

FORWARD, AGAIN, BACKWARD, WEIGHTS = "forward", "again", "backward", "weights"


@dataclasses.dataclass(frozen=True)
class Operation:
    """What one operator asks of the device.

    Attributes:
        name: torch's name of it.
        flops: FLOPs of a matrix product or of attention; 0 for every other operator.
        nbytes: bytes read or written: all inputs and results, of a table the rows that are looked up.
    """

    name: str
    flops: float
    nbytes: int

    @property
    def unit(self) -> str:
        """The unit that computes it: `fp8`, `attention` (also batched products of narrow matrices), or `matmul`."""
        if "_scaled_mm" in self.name:
            return "fp8"
        return "attention" if "attention" in self.name or self.name in ("aten.bmm", "aten.baddbmm") else "matmul"


class Message(NamedTuple):
    """One communication of a rank, as `trace` counts it: name (`all_gather`), axis (`tp`), bytes of the payload."""

    name: str
    axis: str
    nbytes: int


@dataclasses.dataclass(frozen=True, eq=False)
class Sent:
    """A message has been issued. It is under way until its `Waited`."""

    message: Message


@dataclasses.dataclass(frozen=True)
class Waited:
    """The end of the wait for a message."""

    sent: Sent


class Event(NamedTuple):
    """An operation or message in a window (by number) and a phase."""

    window: int
    phase: str
    what: Operation | Sent | Waited


@dataclasses.dataclass
class Window:
    """The time in which module `name` is the innermost that runs.

    Attributes:
        kind: class of the module.
        part: number of the part of the stage that it is in.
        first: sequence number of its first autograd node.
        keeps: bytes that are alive when the forward pass has ended and were first saved here.
        most: {phase: most bytes alive in it}.
    """

    name: str
    kind: str
    part: int
    first: int
    keeps: int = 0
    most: dict[str, int] = dataclasses.field(default_factory=dict)


class Unpredicted(Exception):
    """Something that a plan cannot predict; the message says what."""


def require_known(known: bool, what: str) -> None:
    """Raise `Unpredicted(what)` unless `known`."""
    if not known:
        raise Unpredicted(what)
