"""A probe: what every module returns and the gradient of it, in the order in which it is computed.

The problem in a sentence: a loss that is wrong says that *something* is wrong, and the something is one of a thousand
tensors that exist for a millisecond.

Hooks hand each of them to a function of the caller's, with its place:

| pass        | tensor                                                       | seen                                   |
|-------------|--------------------------------------------------------------|----------------------------------------|
| `forward`   | an output of a module                                        | when the module returns, parts first   |
| `gradient`  | the gradient of the loss by that output                      | when the backward pass reaches it      |
| `recompute` | an output once more, in the second run of `layers/recompute` | in the backward pass                   |

Names are those of the logical model, so a module has the same name in every layout and on every stage of a pipeline.
What a stage has that depends on the cut, itself and its stack of layers, is left out; the losses of tokens are seen.
`training/comparison` compares what two runs see, `training/rerun` looks for the first number that is not finite.
Without a probe there are no hooks, and nothing costs anything. A probe reads tensors only, so the run stays as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from minimegatron.data.gpt_dataset import Batch
from minimegatron.layers.param import logical_name
from minimegatron.layers.recompute import MICROBATCH
from minimegatron.training.step import ForwardStep, LossFunc

LOSSES = "losses of tokens"


class Place(NamedTuple):
    """Where a tensor is in a step.

    Attributes:
        phase: `forward`, `gradient` or `recompute`.
        module: logical name of the module; `LOSSES` for what the last stage returns.
        output: which of its tensors, where a module returns several.
        call: which call of the module, where a microbatch passes it more than once.
        microbatch: number of the microbatch on this rank.
    """

    phase: str
    module: str
    output: int
    call: int
    microbatch: int

    @property
    def anywhere(self) -> Place:
        """The place without its microbatch."""
        return self._replace(microbatch=-1)

    def __str__(self) -> str:
        more = f"[{self.output}]" if self.output else ""
        more += f", call {self.call + 1}" if self.call else ""
        return f"{self.module}{more}"


See = Callable[[Place, torch.Tensor, "nn.Module | None"], None]


class Probe:
    """Shows every tensor of the passes of a model.

    Args:
        model: this rank's model, wrapped or not.
        see: is called with the place, the tensor and the module, without gradients; it may not change the tensor.
    """

    def __init__(self, model: nn.Module, see: See) -> None:
        self.model, self.see = model, see
        self._calls: Counter[tuple[str, str, int]] = Counter()
        self._microbatches: Counter[int] = Counter()
        self._first = 0

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """In the block tensors are seen."""
        hooks = []
        for name, module in self.model.named_modules():
            if name and not hasattr(module, "layers") and not isinstance(module, (nn.ModuleDict, nn.ModuleList)):
                hooks.append(module.register_forward_hook(self._after(logical_name(name))))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def begin(self, first: int = 0) -> None:
        """Microbatches are counted from `first` on: call it before each step."""
        self._calls.clear()
        self._microbatches.clear()
        self._first = first

    def of(self, forward_step: ForwardStep) -> ForwardStep:
        """`forward_step`, whose microbatches are counted and whose losses are seen."""

        def step(batches: Iterator[Batch], model: Any) -> tuple[torch.Tensor, LossFunc]:
            MICROBATCH.set(self._first + self._microbatches[id(model)])  # each stage runs them in order
            self._microbatches[id(model)] += 1
            output, summed = forward_step(batches, model)
            if isinstance(output, torch.Tensor):
                self._show(LOSSES, None, output)
            return output, summed

        return step

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self._show(name, module, output)

        return hook

    def _show(self, name: str, module: nn.Module | None, output: Any) -> None:
        phase = "recompute" if torch._C._current_graph_task_id() != -1 else "forward"
        microbatch = MICROBATCH.get(0)
        call = self._calls[phase, name, microbatch]
        self._calls[phase, name, microbatch] += 1
        for index, tensor in enumerate(tensors_of(output)):
            place = Place(phase, name, index, call, microbatch)
            with torch.no_grad():
                self.see(place, tensor.detach(), module)
            if phase == "forward" and tensor.requires_grad:
                tensor.register_hook(self._gradient(place._replace(phase="gradient"), module))

    def _gradient(self, place: Place, module: nn.Module | None) -> Callable[[torch.Tensor], None]:
        def hook(grad: torch.Tensor) -> None:
            with torch.no_grad():
                self.see(place, grad.detach(), module)

        return hook


def tensors_of(output: Any) -> list[torch.Tensor]:
    """The tensors in what a module returns."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Mapping):
        return [tensor for part in output.values() for tensor in tensors_of(part)]
    if dataclasses.is_dataclass(output):
        return [t for f in dataclasses.fields(output) for t in tensors_of(getattr(output, f.name))]
    if isinstance(output, Sequence) and not isinstance(output, str):
        return [tensor for part in output for tensor in tensors_of(part)]
    return []
