"""ZeRO-3's weights: a unit's are gathered before it runs, forward and backward, and let go of afterwards.

The problem in a sentence: a rank that keeps 1/D of every weight must have all of a layer's while it computes with that
layer, without waiting for the network at each of them.

    forward     gather 0 | layer 0        | layer 1        | layer 2
                         | gather 1       | gather 2       |
                                       free 0           free 1
    backward    output layer  | layer 2       | layer 1       | layer 0
                gather 2      | gather 1      | gather 0      |
                                         free 2 + reduce-scatter

| moment                                   | what happens                                                        |
|------------------------------------------|---------------------------------------------------------------------|
| before a unit's forward                  | wait for its weights, start to gather the next unit's               |
| after it                                 | let go, unless a backward pass is running: recomputed layers stay   |
| before its backward (a hook on its output) | the same, towards the front                                       |
| its last gradient of the pass is there   | let go                                                              |
| the end of a microbatch's backward       | let go of everything                                                |

What is in no list, embedding and output layer, is needed at both ends of a forward pass; without a pipeline it stays
until the backward pass has ended, as the root of torch's FSDP does.

Megatron-LM: `megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py` (hooks of the same kinds).
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from minimegatron.parallel.data.param_buffer import ShardedParams
from minimegatron.parallel.data.units import Unit


class GatherOnUse:
    """Hooks on the units of a model.

    Args:
        units: (unit, its buckets, names of its own parameters), in the order in which they run forward.
        keep_outside: weights outside of lists stay from forward to backward.
    """

    def __init__(self, units: Sequence[tuple[Unit, list[ShardedParams], Collection[str]]], keep_outside: bool) -> None:
        self.units = list(units)
        self._keep = keep_outside
        self._all_stay = False
        self._missing = [set(names) for _, _, names in units]
        self._unit_of = {name: i for i, (_, _, names) in enumerate(units) for name in names}
        for index, (unit, _, _) in enumerate(units):
            unit.module.register_forward_pre_hook(partial(_before_forward, self, index))
            unit.module.register_forward_hook(partial(_after_forward, self, index))

    def need(self, index: int, backward: bool) -> None:
        """Wait for a unit's weights, and start with those of the unit that is needed after it."""
        for bucket in self.units[index][1]:
            bucket.require()
        after = self._after(index, backward)
        for bucket in self.units[after][1] if after is not None else ():
            bucket.start()

    def _after(self, index: int, backward: bool) -> int | None:
        """The layer that runs after this unit; of what is in no list, the first layer, or backward the last."""
        unit = self.units[index][0]
        if backward and not unit.in_list:
            layers = [i for i, (other, _, _) in enumerate(self.units) if other.stage == unit.stage and other.in_list]
            return layers[-1] if layers else None
        after = index - 1 if backward else index + 1
        if not 0 <= after < len(self.units):
            return None
        other = self.units[after][0]
        return after if other.in_list and other.stage == unit.stage else None

    def ran(self, index: int) -> None:
        """A unit's forward pass has ended."""
        stays = self._keep and torch.is_grad_enabled() and not self.units[index][0].in_list
        if not (stays or self._all_stay or _in_backward()):
            self.release(index)

    def complete(self, name: str) -> None:
        """A parameter's gradient of this pass is there."""
        index = self._unit_of[name]
        self._missing[index].discard(name)
        if not self._missing[index]:
            self.release(index)

    def end_pass(self) -> None:
        """A backward pass has ended."""
        for index in range(len(self.units)):
            self.release(index)

    def release(self, index: int) -> None:
        """Let go of a unit's weights."""
        _, buckets, names = self.units[index]
        self._missing[index] = set(names)
        for bucket in buckets:
            bucket.release()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """Everything is here in the block, and stays."""
        for _, buckets, _ in self.units:
            for bucket in buckets:
                bucket.require()
        self._all_stay = True
        try:
            yield
        finally:
            self._all_stay = False
            self.end_pass()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _before_forward(units: GatherOnUse, index: int, module: nn.Module, args: Any) -> None:
    units.need(index, _in_backward())  # a layer is computed again on the way back


def _after_forward(units: GatherOnUse, index: int, module: nn.Module, args: Any, output: Any) -> None:
    units.ran(index)
    for tensor in tree_leaves(output):  # a stage gives named tensors
        if torch.is_tensor(tensor) and tensor.requires_grad:
            tensor.register_hook(partial(_before_backward, units, index))


def _before_backward(units: GatherOnUse, index: int, grad: torch.Tensor) -> None:
    units.need(index, backward=True)
