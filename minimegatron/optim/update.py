"""The update itself: from gradients to new weights in the model, once the step has decided to take it.

The problem in a sentence: the same decision ends in AdamW, SGD or Muon, by torch or by one kernel, and the step that
decides should not know which.

An `Update` gets gradients and the one factor that unscales and clips them, moves the main parameters, and writes them
back into the model. It alone knows where and in which dtype main parameters and moments are kept.

| class            | file                       | computes                                                         |
|------------------|----------------------------|------------------------------------------------------------------|
| `TorchUpdate`    | here                       | by a `torch.optim.Optimizer`, AdamW by a kernel where there is one |
| `PrecisionAware` | `optim/precision_aware.py` | AdamW in fp32, on numbers that are kept in 8 or 16 bits          |
| `Offloaded`      | `optim/offload.py`         | some parameters on the host, the others by another `Update`      |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from minimegatron.kernels import ops
from minimegatron.kernels.optimizer import Tables
from minimegatron.optim.main_params import MainParam

Ready = Sequence[tuple[MainParam, torch.Tensor]]  # parameters that have a gradient, and the gradient


class Update(Protocol):
    """See the module docstring.

    Attributes:
        param_groups: torch's.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...

    def step(self, ready: Ready, factor: float) -> None:
        """Move the main parameters by gradients times `factor`, and the model's weights with them."""

    def tensors(self, p: MainParam) -> dict[str, torch.Tensor]:
        """What must survive a restart: references, or fp32 copies of what is kept in another form."""

    def load(self, p: MainParam, saved: Mapping[str, torch.Tensor]) -> None:
        """Take over what `tensors` has given, and write the model's weights."""

    def reload(self, p: MainParam) -> None:
        """The model's weights are new: make the main parameter equal to them."""

    def held(self) -> dict[str, list[torch.Tensor]]:
        """{owner: tensors} that last, without scalars."""


class TorchUpdate:
    """By an optimizer with torch's interface; its state lies where torch's optimizers keep theirs, by main parameter.

    Args:
        params: all that are moved.
        inner: over their main parameters.
        kernels: `config.kernels` of the model; AdamW may be computed by a kernel.
    """

    def __init__(self, params: Sequence[MainParam], inner: torch.optim.Optimizer | Chain, kernels: str) -> None:
        self.params, self.inner, self.kernels = params, inner, kernels
        self._tables = Tables()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def tensors(self, p: MainParam) -> dict[str, torch.Tensor]:
        tensors = {k: v for k, v in self.inner.state[p.main].items() if torch.is_tensor(v)}
        return {**tensors, "fp32_param": p.main.detach()} if p.is_copy else tensors

    def load(self, p: MainParam, saved: Mapping[str, torch.Tensor]) -> None:
        for key, tensor in self.tensors(p).items():
            tensor.copy_(saved[key])
        self._tables.steps.clear()
        write_back([p])

    def reload(self, p: MainParam) -> None:
        if p.is_copy:
            p.main.copy_(p.model_part)

    def held(self) -> dict[str, list[torch.Tensor]]:
        state = [v for p in self.params for v in self.inner.state[p.main].values() if torch.is_tensor(v)]
        return {"main parameters": [p.main for p in self.params if p.is_copy], "moments": [t for t in state if t.dim()]}

    def step(self, ready: Ready, factor: float) -> None:
        """See `Update`. Uses up the gradients."""
        mains, grads = [p.main for p, _ in ready], [grad for _, grad in ready]
        copies = [p.model_part if p.is_copy else None for p, _ in ready]
        ops.optimizer_step(self.inner, mains, grads, copies, factor, self._tables, kernels=self.kernels)


class Chain:
    """Several of torch's optimizers as one: each has its own groups, and they share one state.

    Args:
        optimizers: over different parameters.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        self._optimizers = optimizers
        self.state = optimizers[0].state
        for optimizer in optimizers[1:]:
            self.state |= optimizer.state
            optimizer.state = self.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Of all, the objects themselves: what a scheduler writes here counts."""
        return [group for optimizer in self._optimizers for group in optimizer.param_groups]

    def step(self) -> None:
        """One step of each."""
        for optimizer in self._optimizers:
            optimizer.step()


def batches(ready: Ready, most: int) -> list[Ready]:
    """Parts of at most so many elements, or of one parameter."""
    found: list[list[tuple[MainParam, torch.Tensor]]] = []
    elements = most
    for p, grad in ready:
        if elements + grad.numel() > most:
            found.append([])
            elements = 0
        found[-1].append((p, grad))
        elements += grad.numel()
    return list(found)


def write_back(params: Sequence[MainParam]) -> None:
    """Round main parameters that are copies into the model."""
    copies = [p for p in params if p.is_copy]
    if copies:
        torch._foreach_copy_([p.model_part for p in copies], [p.main for p in copies])
