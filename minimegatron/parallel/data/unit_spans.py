"""Each unit's forward and backward pass as a span of the trace: what gathers of weights are to be hidden behind.

The problem in a sentence: the trace knows the collectives and the passes of a microbatch, and whether a gather was
hidden can only be seen where computation that waits for weights is told apart from computation that runs.

    inside of `units_in_trace`    forward unit 1 |  | forward unit 2 | ... | backward unit 2 |  | backward unit 1
                                                  ^^ a wait for the weights of unit 2

Units are those of `parallel/data/units`, in their order; `outside` is what is in no list: embedding, output layer and
loss. A recomputed layer's second forward pass is a part of its backward pass and so called. Nothing is registered
outside of the block.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from minimegatron import trace
from minimegatron.parallel.data.data_parallel import DataParallel
from minimegatron.parallel.data.units import units_of


@contextlib.contextmanager
def units_in_trace(ddp: DataParallel, tell: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """In the block the passes of units are spans `forward` and `backward` of kind `unit`, their note is the unit.

    Args:
        ddp: a wrapped model; its hooks that gather weights wait before these spans begin.
        tell: is told at once what begins (`backward unit 2`), and "" where nothing does (`memory.Tracker.tell`).
    """
    clock = _Clock(tell)
    hooks = []
    number = 0
    for unit in units_of(ddp.module):
        outside = getattr(unit.module, "is_stage", False) or unit.module is ddp.module
        name = "outside" if outside else f"unit {number}"
        number += not outside
        module = unit.module
        hooks += [
            module.register_forward_pre_hook(partial(_pause, clock), prepend=True),  # before it waits for weights
            module.register_forward_pre_hook(partial(_enter, clock, name)),
            module.register_forward_hook(partial(_leaving, clock), prepend=True),
            module.register_forward_hook(partial(_left, clock, name)),
        ]
    try:
        yield
    finally:
        clock.switch(None)
        for hook in hooks:
            hook.remove()


class _Clock:
    """One span at a time is open.

    Attributes:
        outer: units whose forward pass contains the one that runs.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.outer: list[str] = []
        self._tell = tell
        self._open: tuple[str, str, float] | None = None

    def switch(self, what: tuple[str, str] | None) -> None:
        """End what is open, and begin (pass, unit)."""
        now = time.monotonic()
        if self._open is not None:
            name, unit, start = self._open
            trace.emit(name, "unit", start, now, note=unit)
        self._open = (*what, now) if what else None
        self._tell(" ".join(what) if what else "")

    @property
    def name(self) -> str:
        """The pass that is under way."""
        return "forward" if torch._C._current_graph_task_id() == -1 else "backward"


def _pause(clock: _Clock, module: nn.Module, args: Any) -> None:
    clock.switch(None)


def _enter(clock: _Clock, name: str, module: nn.Module, args: Any) -> None:
    if clock.name == "forward":  # a recomputation may end within a unit, whose hooks then never run
        clock.outer.append(name)
    clock.switch((clock.name, name))


def _leaving(clock: _Clock, module: nn.Module, args: Any, output: Any) -> None:
    clock.switch(None)
    for tensor in _differentiable(output):  # in front of the hook that waits for this unit's weights
        tensor.register_hook(lambda grad: clock.switch(None))


def _left(clock: _Clock, name: str, module: nn.Module, args: Any, output: Any) -> None:
    for tensor in _differentiable(output):
        tensor.register_hook(partial(_backward, clock, name))
    if clock.name == "forward":
        clock.outer.pop()
        if clock.outer:
            clock.switch(("forward", clock.outer[-1]))


def _backward(clock: _Clock, name: str, grad: torch.Tensor) -> None:
    clock.switch(("backward", name))
    torch.autograd.Variable._execution_engine.queue_callback(lambda: clock.switch(None))  # type: ignore[attr-defined]


def _differentiable(output: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tree_leaves(output) if torch.is_tensor(tensor) and tensor.requires_grad]
