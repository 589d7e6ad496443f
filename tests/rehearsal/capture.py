"""CUDA graphs: what is captured is not done, and what is played is done again on the same memory.

While a stream is captured, every operator still runs here, because Python needs the shapes of results; but all memory
that it changes is put back at the end, as a GPU would not have touched it. The tape holds each operator with the
tensors that it read and wrote; `replay` runs the tape and copies every result to where the captured one lies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tests.rehearsal.record import RECORD, place


def tensors_in(x: Any) -> list[torch.Tensor]:
    """The tensors in nested tuples, lists and dicts."""
    if isinstance(x, torch.Tensor):
        return [x]
    values = x.values() if isinstance(x, dict) else x if isinstance(x, list | tuple) else ()
    return [tensor for value in values for tensor in tensors_in(value)]


class Tape:
    """The operators of one capture."""

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[[], Any], list[torch.Tensor]]] = []
        self._before: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def run(self, call: Callable[[], Any], reads: Iterable[torch.Tensor], writes: Iterable[torch.Tensor]) -> Any:
        """Run `call` now, for its shapes, and remember how to do it again.

        Args:
            call: computes on plain CPU tensors.
            reads: its arguments; results that share their memory are not copied at a replay.
            writes: those that it may change.
        """
        for x in writes:
            whole = _bytes(x)
            if whole.data_ptr() not in self._before:
                self._before[whole.data_ptr()] = whole, whole.clone()
        out = call()
        known = {x.untyped_storage().data_ptr() for x in reads}
        fresh = [x for x in tensors_in(out) if x.untyped_storage().data_ptr() not in known]
        self._steps.append((lambda: [x for x, old in zip(tensors_in(call()), places, strict=True) if old], fresh))
        places = [x.untyped_storage().data_ptr() not in known for x in tensors_in(out)]
        return out

    def end(self) -> None:
        """The capture is over: nothing of it has happened."""
        for whole, before in self._before.values():
            whole.copy_(before)
        self._before.clear()

    def replay(self) -> None:
        for call, results in self._steps:
            for result, new in zip(results, call(), strict=True):
                result.copy_(new)


_open: list[Tape] = []


def capturing() -> Tape | None:
    """The capture under way. One at a time, for all threads: a backward pass is captured from its own."""
    return _open[-1] if _open else None


def forbid(what: str) -> None:
    """Raise where `what` happens inside a capture."""
    if _open:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {what} at {place()}")


def host_waits(kind: str) -> None:
    """The host waits for the device: counted, and forbidden inside a capture."""
    forbid(kind)
    RECORD.wait(kind)


def begin() -> Tape:
    assert not _open, "one capture at a time"
    _open.append(Tape())
    return _open[0]


def finish() -> None:
    _open.pop().end()


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
