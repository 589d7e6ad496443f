"""Every communication is announced here before it is called.

The problem in a sentence: an all-reduce is one line of torch, but when it goes wrong the error must say which call it
was, whether the other ranks made the same one, and for how long it has been under way.

    announce(op, axis, x)       about to call: remembered as the last one; compared where fingerprints are on
    begin(op, axis, call)       call it, and keep the deadline of the work that it returns

Collectives, messages and rings call these two and know no listener. Listeners register:

| listener            | what it does                                                     | when                        |
|---------------------|------------------------------------------------------------------|-----------------------------|
| `comm/fingerprints` | compares name, dtype and shape with what the other ranks call    | tests, labs                 |
| `comm/outstanding`  | keeps the list of calls under way, each with its deadline        | where waits do not raise    |
| `launch/watch`      | asks for the last call, for the message of a deadline            | when a rank is late         |

Module state, because a backward pass may run on autograd's thread, where a context variable would be lost; there is
one rank a process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import torch

from minimegatron.comm.axis import Axis


class Listener(Protocol):
    """Told of a call before it is made; `comparable` is False where shapes may differ between ranks by design."""

    def __call__(self, op: str, x: torch.Tensor, axis: Axis, extra: str, comparable: bool) -> None: ...


def _call(op: str, axis: Axis, call: Callable[[], Any]) -> Any:
    return call()


@dataclasses.dataclass
class _Calls:
    last: tuple[str, Axis] | None = None
    listener: Listener | None = None
    begin: Callable[[str, Axis, Callable[[], Any]], Any] = _call


_calls = _Calls()


def announce(op: str, axis: Axis, x: torch.Tensor | None = None, extra: str = "", *, comparable: bool = True) -> None:
    """Say what is about to be called.

    Args:
        op: name of the collective, or of the message.
        axis: who takes part.
        x: the tensor whose dtype and shape must agree over the axis; None for a message between two ranks.
        extra: whatever else must agree (the reduction, the source).
        comparable: False where shapes may differ by design (uneven all-to-all).
    """
    _calls.last = (op, axis)
    if _calls.listener is not None and x is not None:
        _calls.listener(op, x, axis, extra, comparable)


def begin(op: str, axis: Axis, call: Callable[[], Any]) -> Any:
    """Call a communication that returns its work, or a list of works; what it returns has a `wait()`."""
    return _calls.begin(op, axis, call)


def last() -> tuple[str, Axis] | None:
    """The call that this rank announced last."""
    return _calls.last


def listen(listener: Listener | None) -> None:
    """From now on `listener` is told of every call that has a tensor; with None there is no listener."""
    _calls.listener = listener


def begin_with(starter: Callable[[str, Axis, Callable[[], Any]], Any] | None) -> None:
    """From now on `starter` makes the calls; with None they are made as they are."""
    _calls.begin = _call if starter is None else starter
