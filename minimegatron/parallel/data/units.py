"""The units of a model: modules whose weights are gathered together, because they run together.

The problem in a sentence: weights that are gathered on use must come in portions smaller than the model (else no memory
is saved) and larger than a matrix (else no gather is hidden behind computation); a transformer layer is just right.

    stage          parameters outside of lists: embedding, last norm, output layer
      layer 0      an element of a `ModuleList` or `ModuleDict` is a unit ...
      layer 1      ... with everything inside it

A stage is the model, or one of several of a pipeline rank, which are elements of a list themselves and are marked
`is_stage`. Parameters outside of lists may be used anywhere in the stage (a tied embedding is used at both of its
ends). In a V-shaped pipeline the first stage and the last share one on one rank: it belongs to the first, the last
borrows it.

torch's `fully_shard` is called with the same units. Megatron-LM: `fsdp_unit_modules` of
`megatron/core/distributed/fsdp/mcore_fsdp_adapter.py`.

**Units in the trace.** A trace shows whether a gather was hidden only if waiting for weights is told apart from
computing. Inside of `units_in_trace` each unit's passes are spans:

    forward unit 1 |  | forward unit 2 | ... | backward unit 2 |  | backward unit 1
                    ^^ a wait for the weights of unit 2

`outside` names the parameters outside of lists, and the loss. The second forward pass of a recomputed layer belongs to
its backward pass and has that name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from minimegatron import trace
from minimegatron.parallel.data.data_parallel import DataParallel

LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclasses.dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together.

    Attributes:
        module: the module that uses them.
        params: each once; a parameter that several units share belongs to the first.
        borrowed: parameters that it shares with earlier units.
        stage: number of its stage.
        in_list: whether it is an element of a list.
    """

    module: nn.Module
    params: tuple[nn.Parameter, ...]
    borrowed: tuple[nn.Parameter, ...] = ()
    stage: int = 0
    in_list: bool = False


def units_of(model: nn.Module) -> list[Unit]:
    """The units in the order of registration: for each stage the parameters outside of lists, then its layers."""
    seen: set[int] = set()
    units = []
    for number, stage in enumerate(_stages(model)):
        elements = list(_elements(stage))
        inside = {id(p) for element in elements for p in element.parameters()}
        outside = [p for p in stage.parameters() if id(p) not in inside]
        for module, params in [(stage, outside), *((element, list(element.parameters())) for element in elements)]:
            fresh = tuple(p for p in params if id(p) not in seen)
            borrowed = tuple(p for p in params if id(p) in seen)
            seen |= {id(p) for p in fresh}
            if params:
                units.append(Unit(module, fresh, borrowed, number, module is not stage))
    return units


def leaves_of(unit: Unit) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """The parts of a unit that run one after the other, each with its parameters: a layer, or a module outside of
    lists."""
    if not _elements_exist(unit.module):
        yield unit.module, [*unit.params, *unit.borrowed]
        return
    members = {id(p) for p in (*unit.params, *unit.borrowed)}
    if own := [p for p in unit.module.parameters(recurse=False) if id(p) in members]:
        yield unit.module, own
    for child in unit.module.children():
        if not isinstance(child, LISTS):
            yield from leaves_of(Unit(child, tuple(p for p in child.parameters() if id(p) in members)))


def _stages(model: nn.Module) -> list[nn.Module]:
    stages = [module for module in model.modules() if getattr(module, "is_stage", False)]
    return stages or [model]


def _elements(module: nn.Module) -> Iterator[nn.Module]:
    """Elements of the outermost lists."""
    for child in module.children():
        if isinstance(child, LISTS):
            yield from (child.values() if isinstance(child, nn.ModuleDict) else child)
        else:
            yield from _elements(child)


def _elements_exist(module: nn.Module) -> bool:
    return any(isinstance(child, LISTS) for child in module.modules())


# ------------------------------------------------------------------------------------------------ in the trace


@contextlib.contextmanager
def units_in_trace(ddp: DataParallel, tell: Callable[[str], None] = lambda text: None) -> Iterator[None]:
    """In the block the passes of units are spans `forward` and `backward` of kind `unit`, with the unit as their note.

    Args:
        ddp: a wrapped model; its hooks that gather weights run before these spans begin.
        tell: called with the name of each pass that begins (`backward unit 2`), and with "" when none is under way
            (`memory.Tracker.tell`).
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
    """Keeps one span open at a time.

    Attributes:
        outer: units whose forward pass contains the one that runs.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.outer: list[str] = []
        self._tell = tell
        self._open: tuple[str, str, float] | None = None

    def switch(self, what: tuple[str, str] | None) -> None:
        """End the open span, and begin that of (pass, unit)."""
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
