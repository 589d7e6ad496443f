"""ZeRO-3's weights: a unit's are gathered before it runs, forward and backward, and let go of afterwards.

The problem in a sentence: a rank that keeps 1/D of every weight must have all of a layer's while it computes with that
layer, without waiting for the network at each of them.

    forward     gather 0 | layer 0        | layer 1        | layer 2
                         | gather 1       | gather 2       |
                                       free 0           free 1
    backward    layer 2          | layer 1          | layer 0
                gather 1         | gather 0         |
                          free 2 + reduce-scatter   free 1 + reduce-scatter

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

from minimegatron.parallel.param_buffer import ShardedParams


class GatherOnUse:
    """Hooks on the units of a model.

    Args:
        units: (module, its buckets, names of its parameters), in the order in which they run forward.
        keep_outside: weights outside of lists stay from forward to backward.
    """

    def __init__(
        self, units: Sequence[tuple[nn.Module, list[ShardedParams], Collection[str]]], keep_outside: bool
    ) -> None:
        self.units = list(units)
        self._keep = keep_outside
        self._missing = [set(names) for _, _, names in units]
        self._unit_of = {name: i for i, (_, _, names) in enumerate(units) for name in names}
        for index, (module, _, _) in enumerate(units):
            module.register_forward_pre_hook(partial(_before_forward, self, index))
            module.register_forward_hook(partial(_after_forward, self, index))

    def need(self, index: int, after: int) -> None:
        """Wait for a unit's weights, and start with those of the unit that is needed after it."""
        for bucket in self.units[index][1]:
            bucket.require()
        if 0 <= after < len(self.units) and not self._is_outside(after):
            for bucket in self.units[after][1]:
                bucket.start()

    def ran(self, index: int) -> None:
        """A unit's forward pass has ended."""
        in_backward = torch._C._current_graph_task_id() != -1
        if not in_backward and not (self._keep and torch.is_grad_enabled() and self._is_outside(index)):
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
        """Everything is here in the block."""
        for _, buckets, _ in self.units:
            for bucket in buckets:
                bucket.require()
        yield
        self.end_pass()

    def _is_outside(self, index: int) -> bool:
        return getattr(self.units[index][0], "is_stage", False)


def _before_forward(units: GatherOnUse, index: int, module: nn.Module, args: Any) -> None:
    units.need(index, index + 1)


def _after_forward(units: GatherOnUse, index: int, module: nn.Module, args: Any, output: Any) -> None:
    units.ran(index)
    for tensor in output if isinstance(output, (tuple, list)) else (output,):
        if torch.is_tensor(tensor) and tensor.requires_grad:
            tensor.register_hook(partial(_before_backward, units, index))


def _before_backward(units: GatherOnUse, index: int, grad: torch.Tensor) -> None:
    units.need(index, index - 1)
