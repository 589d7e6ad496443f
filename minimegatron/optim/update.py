"""The update itself: from gradients to new weights in the model, once the step has decided to take it.

The problem in a sentence: the same decision ends in AdamW, SGD or Muon, by torch or by one kernel, and the step that
decides should not know which.

An `Update` gets gradients and the one factor that unscales and clips them, moves the main parameters, and writes them
back into the model. Its state lies where torch's optimizers keep theirs, by main parameter.

| class         | file                    | computes                                                        |
|---------------|-------------------------|-----------------------------------------------------------------|
| `TorchUpdate` | here                    | by a `torch.optim.Optimizer`, or AdamW by a kernel (`fused.py`) |
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from minimegatron.optim.fused import FusedAdam
from minimegatron.optim.main_params import MainParam

Ready = Sequence[tuple[MainParam, torch.Tensor]]  # parameters that have a gradient, and the gradient


class Update(Protocol):
    """See the module docstring.

    Attributes:
        param_groups: torch's.
        state: main parameter -> its tensors by name.
    """

    @property
    def param_groups(self) -> list[dict[str, Any]]: ...
    @property
    def state(self) -> Any: ...

    def step(self, ready: Ready, factor: float) -> None:
        """Move the main parameters by gradients times `factor`, and the model's weights with them."""

    def forget(self) -> None:
        """The state has been loaded anew."""


class TorchUpdate:
    """By an optimizer with torch's interface.

    Args:
        inner: over the main parameters.
        kernels: `config.kernels` of the model; AdamW may be computed by a kernel.
    """

    def __init__(self, inner: torch.optim.Optimizer | Chain, kernels: str) -> None:
        self.inner = inner
        self._fused = FusedAdam(inner, kernels)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    @property
    def state(self) -> Any:
        return self.inner.state

    def forget(self) -> None:
        self._fused.forget()

    def step(self, ready: Ready, factor: float) -> None:
        """See `Update`. Uses up the gradients."""
        ops = self._fused.applies(ready)
        if ops is not None:
            self._fused.step(ops, ready, factor)
            return
        grads = [grad.to(p.main.dtype) for p, grad in ready]
        if ready and factor != 1.0:
            torch._foreach_mul_(grads, factor)
        for (p, _), grad in zip(ready, grads, strict=True):
            p.main.grad = grad
        self.inner.step()
        self._fused.forget()
        for p, _ in ready:
            p.main.grad = None
        write_back([p for p, _ in ready])


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


def write_back(params: Sequence[MainParam]) -> None:
    """Round main parameters that are copies into the model."""
    copies = [p for p in params if p.is_copy]
    if copies:
        torch._foreach_copy_([p.model_part for p in copies], [p.main for p in copies])
